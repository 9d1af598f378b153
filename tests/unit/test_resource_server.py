"""The resource server: one effect per request, revisions, uncertain sessions, freezing (H7)."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from participants.gym import wire
from participants.gym.servers.resource import ResourceServer
from participants.gym.servers.sessions import MAX_ANSWERS
from tests.gym_world import (
    TIMED,
    TOKEN,
    World,
    code,
    commit,
    drain,
    fence,
    folder_of,
    prepare,
    release,
    send,
    stage,
    until,
)


class Tools:
    def __init__(self, root: Any, **options: Any) -> None:
        self.root, self.world = root, World(root, **options)
        self.server, self.counter = self.world.resource, self.world.counter
        self.client = self.world.clients["resource"]

    async def call(
        self, request: str, expect: int | None = None, path: str = "/add", n: int = 1, **marks: Any
    ) -> httpx.Response:
        headers = {
            wire.ROLLOUT: marks.get("rollout", "p7_g2"),
            wire.RUN: marks.get("run", "1.0"),
            wire.LINEAGE: str(marks.get("lineage", 0)),
            wire.REQUEST: request,
        }
        if expect is not None:
            headers[wire.EXPECT_REVISION] = str(expect)
        return await self.client.post(path, json={"n": n}, headers=headers)

    async def control(self, operation: str, message: Any) -> wire.Report:
        return await self.world.ask("resource", operation, message)

    async def held(self, by: Any, **options: Any) -> None:
        await self.control("prepare", prepare(by, **options))
        assert (await self.control("drain", drain(by))).quiet

    async def commit(self, by: Any) -> wire.Report:
        (self.root / folder_of(by)).mkdir()
        return await self.control("commit", commit(by))


def run(root: Any, main: Any, **options: Any) -> None:
    asyncio.run(main(Tools(root, **options)))


def test_a_repeat_has_no_second_effect(tmp_path):
    async def main(tools):
        first = await tools.call("r1", 0)
        again = await tools.call("r1", 0)
        assert (first.json(), first.headers[wire.REVISION]) == ({"count": 1}, "1")
        assert (again.json(), again.headers[wire.REVISION]) == ({"count": 1}, "1")
        assert code(await tools.call("r1", 0, n=5)) == (409, wire.CONFLICT)
        assert len(tools.counter.applied) == 1

    run(tmp_path, main)


def test_a_repeat_while_it_runs_waits_for_its_answer(tmp_path):
    async def main(tools):
        tools.counter.open.clear()
        first = asyncio.create_task(tools.call("r1", 0))
        await until(lambda: tools.server.blockers() == ["p7_g2"])
        first.cancel()  # a caller that goes away does not cut the mutation off
        second = asyncio.create_task(tools.call("r1", 0))
        tools.counter.open.set()
        assert (await second).json() == {"count": 1}
        assert len(tools.counter.applied) == 1
        assert not tools.server._sessions["p7_g2"].uncertain

    run(tmp_path, main)


def test_a_caller_of_another_state_is_refused(tmp_path):
    async def main(tools):
        await tools.call("r1", 0)
        for expected in (0, 2):
            answer = await tools.call("r2", expected)
            assert code(answer) == (409, wire.REVISION_MISMATCH)
        assert (await tools.call("r2", 1)).headers[wire.REVISION] == "2"
        assert (await tools.call("r3")).status_code == 200  # no expectation
        assert tools.counter.counts == {"p7_g2": 3}

    run(tmp_path, main)


def test_reads_change_nothing_and_need_no_request_id(tmp_path):
    async def main(tools):
        await tools.call("r1", 0)
        answer = await tools.call("", path="/look")
        assert (answer.json(), answer.headers[wire.REVISION]) == ({"count": 1}, "1")
        assert (await tools.call("r2", 1)).status_code == 200

    run(tmp_path, main, reads={"/look"})


def test_a_read_of_another_state_is_refused(tmp_path):
    """A server that was started anew would answer from an empty session."""

    async def main(tools):
        assert code(await tools.call("", 3, path="/look")) == (409, wire.REVISION_MISMATCH)
        await tools.call("r1", 0)
        assert code(await tools.call("", 0, path="/look")) == (409, wire.REVISION_MISMATCH)
        assert (await tools.call("", 1, path="/look")).json() == {"count": 1}

    run(tmp_path, main, reads={"/look"})


def test_recorded_answers_are_bounded(tmp_path):
    async def main(tools):
        for n in range(3):
            await tools.call(f"r{n}", n)
        assert list(tools.server._sessions["p7_g2"].answers) == ["r2"]  # the caller has the others
        answers = tools.server._sessions["p7_g2"].answers
        for n in range(MAX_ANSWERS + 5):
            tools.server._sessions["p7_g2"].record(f"x{n}", next(iter(answers.values())))
        assert len(answers) == MAX_ANSWERS

    run(tmp_path, main)


def test_a_newer_history_drops_the_session(tmp_path):
    async def main(tools):
        await tools.call("r1", 0)
        assert (await tools.call("r2", 1, run="1.1")).json() == {"count": 2}
        assert code(await tools.call("r3", 2)) == (409, wire.STALE_ATTEMPT)
        over = await tools.call("r1", 0, run="1.2", lineage=2)  # the same request id, anew
        assert (over.json(), over.headers[wire.REVISION]) == ({"count": 1}, "1")
        assert code(await tools.call("r4", 1, run="1.3", lineage=0)) == (409, wire.STALE_ATTEMPT)
        # Another controller without a restore: it knows nothing of this history.
        assert (await tools.call("r1", 0, run="3.0")).json() == {"count": 1}

    run(tmp_path, main)


def test_a_mutation_that_raised_is_never_exported(tmp_path):
    async def main(tools):
        broken = await tools.call("r1", 0, path="/break")
        assert broken.status_code == 500
        assert (await tools.call("r1", 0, path="/break")).status_code == 500  # not applied again
        await tools.call("r1", 0, rollout="p8")
        by = fence(1)
        await tools.held(by)
        report = await tools.commit(by)
        assert report.restarts == (wire.Restart("p7_g2", wire.UNCERTAIN),)
        assert report.revisions == {"p8": 1}

    run(tmp_path, main)


def test_shared_state_after_a_torn_mutation_aborts(tmp_path):
    async def main(tools):
        await tools.call("r1", 0, path="/break")
        by = fence(1)
        await tools.held(by)
        answer = await send(tools.client, "commit", commit(by))
        assert code(answer) == (409, wire.UNCERTAIN)

    run(tmp_path, main, isolation="shared")


@pytest.mark.parametrize(("isolation", "quiet"), [("per_session", True), ("shared", False)])
def test_with_shared_state_a_straggler_cannot_be_left_out(tmp_path, isolation, quiet):
    async def main(tools):
        tools.counter.open.clear()
        call = asyncio.create_task(tools.call("r1", 0))
        await until(lambda: tools.server.blockers())
        by = fence(1)
        await tools.control("prepare", prepare(by, timeout_s=0.0, straggler="start_over"))
        report = await tools.control("drain", drain(by, timeout_s=0.0))
        assert report.quiet == quiet
        tools.counter.open.set()
        assert (await call).status_code == 200

    run(tmp_path, main, isolation=isolation)


def test_without_a_codec_everything_starts_over(tmp_path):
    async def main(tools):
        assert (await tools.call("r1", 0)).headers[wire.REVISION] == "1"
        by = fence(1)
        await tools.held(by)
        report = await tools.commit(by)
        assert report.restarts == (wire.Restart("p7_g2", wire.RESTART_ONLY),)
        assert tools.server.capabilities().mode == "restart_only"

    run(tmp_path, main, codec=None)


def test_a_stateless_server_has_no_revisions(tmp_path):
    async def main(tools):
        answer = await tools.call("", None)
        assert (answer.status_code, wire.REVISION in answer.headers) == (200, False)
        by = fence(1)
        await tools.held(by)
        report = await tools.commit(by)
        assert (report.restarts, report.revisions) == ((), {})

    run(tmp_path, main, codec=None, mode="stateless")


@pytest.mark.parametrize("wrong", [{"mode": "stateless"}, {"codec": None, "mode": "export"}])
def test_mode_and_codec_go_together(tmp_path, wrong):
    with pytest.raises(ValueError, match="goes with a codec"):
        World(tmp_path, **wrong)


def test_turns_under_way_pass_until_frozen_others_wait(tmp_path):
    """H7."""

    async def main(tools):
        by = fence(1)
        await tools.control("prepare", prepare(by))
        assert (await tools.call("r1", 0)).status_code == 200  # closing: a turn under way
        stock = asyncio.create_task(tools.client.post("/add", json={"n": 1}))
        assert (await tools.control("drain", drain(by))).quiet
        late = asyncio.create_task(tools.call("r2", 1))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not late.done()
        assert not stock.done()
        assert tools.counter.counts == {"p7_g2": 1}
        await tools.control("resume", release(by))
        assert (await late).json() == {"count": 2}
        assert (await stock).json() == {"count": 1}

    run(tmp_path, main)


def test_drain_waits_for_running_handlers(tmp_path):
    async def main(tools):
        tools.counter.open.clear()
        call = asyncio.create_task(tools.call("r1", 0))
        stock = asyncio.create_task(tools.client.post("/add", json={"n": 1}))
        await until(lambda: len(tools.server.blockers()) == 2)
        by = fence(1)
        await tools.control("prepare", prepare(by))
        report = await tools.control("drain", drain(by, timeout_s=0.0))
        assert set(report.blockers) == {"p7_g2", "calls without a rollout"}
        tools.counter.open.set()
        assert (await tools.control("drain", drain(by))).quiet
        assert (await call).status_code == (await stock).status_code == 200

    run(tmp_path, main)


def test_sessions_and_recorded_answers_come_back(tmp_path):
    async def main(tools):
        await tools.call("r1", 0, n=4)
        by = fence(1)
        await tools.held(by)
        report = await tools.commit(by)
        assert report.revisions == {"p7_g2": 1}
        (tmp_path / folder_of(by)).rename(tmp_path / "snapshot_000001-000001")

        new, by = Tools(tmp_path), fence(1, 2)
        await new.control("fence", wire.FenceOff(fence=by, lease_s=60, **TIMED))
        await new.control("drain", drain(by))
        staged = await new.control("restore", stage(by, "snapshot_000001-000001", report.files))
        assert staged.revisions == {"p7_g2": 1}
        assert new.counter.counts == {}  # staged only (R1)
        await new.control("resume", release(by))
        assert new.counter.counts == {"p7_g2": 4}
        again = await new.call("r1", 0, n=4, run="2.1")
        assert (again.json(), new.counter.applied) == ({"count": 4}, [])
        assert (await new.call("r2", 1, run="2.1")).json() == {"count": 5}
        assert code(await new.call("r2", 1, run="1.0")) == (409, wire.STALE_ATTEMPT)

    run(tmp_path, main)


def test_an_export_is_a_copy(tmp_path):
    async def main(tools):
        live = {"count": [1]}
        tools.counter.export_session = lambda rollout_id: live
        await tools.call("r1", 0)
        by = fence(1)
        await tools.held(by)
        from participants.gym.servers import sessions

        export = sessions.export(tools.server._sessions, tools.counter, "export")
        live["count"].append(2)
        assert export.records["sessions"][0]["state"] == {"count": [1]}

    run(tmp_path, main)


@pytest.mark.parametrize("state", [float("nan"), {1, 2}, object()])
def test_a_codec_that_gives_no_json_aborts_by_name(tmp_path, state):
    async def main(tools):
        tools.counter.export_session = lambda rollout_id: state
        await tools.call("r1", 0)
        by = fence(1)
        await tools.held(by)
        answer = await send(tools.client, "commit", commit(by))
        assert code(answer) == (409, wire.BAD_STATE)
        assert "export_session('p7_g2')" in answer.json()["error"]["detail"]
        await tools.control("resume", release(by))

    run(tmp_path, main)


def test_a_missing_request_id_is_named(tmp_path):
    async def main(tools):
        assert code(await tools.call("")) == (400, wire.BAD_REQUEST)
        assert code(await tools.call("x" * 201)) == (400, wire.BAD_REQUEST)
        assert tools.counter.applied == []

    run(tmp_path, main)


def test_lifespan_belongs_to_the_wrapped_app(tmp_path):
    async def main():
        seen = []

        async def app(scope, receive, send):
            seen.append(scope["type"])

        server = ResourceServer("tools", app, root=tmp_path, token=TOKEN)
        await server.app({"type": "lifespan"}, None, None)
        assert seen == ["lifespan"]

    asyncio.run(main())

"""The agent server: runs, journal and replay, parking, what is saved of it (H5, H6, R3, R4, R7)."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from fsm import strict
from participants.gym import wire
from tests.gym_world import (
    TIMED,
    World,
    code,
    drain,
    fence,
    folder_of,
    prepare,
    report,
    run_request,
    send,
    until,
)


def agent_close(world: World, by: Any, **options: Any) -> Any:
    return world.ask("agent", "prepare", prepare(by, **options))


async def parked(world: World, by: Any, **options: Any) -> wire.Report:
    await agent_close(world, by, **options)
    return await world.ask("agent", "drain", drain(by))


async def commit_agent(world: World, by: Any) -> wire.Report:
    (world.root / folder_of(by)).mkdir()
    message = wire.Commit(fence=by, folder=folder_of(by), **TIMED)
    return await world.ask("agent", "commit", message)


# -- /run -------------------------------------------------------------------------------------


def test_a_run_survives_its_caller_and_a_repeat_joins_it(tmp_path):
    async def main():
        world = World(tmp_path)
        world.upstream.open.clear()
        first = world.start()
        await until(lambda: world.upstream.asked)
        first.cancel()
        second, third = world.start(), world.start()
        world.upstream.open.set()
        answers = [(await task).json() for task in (second, third)]
        assert answers[0] == answers[1] == (await world.start()).json()  # retained
        assert len(world.upstream.asked) == 3

    asyncio.run(main())


def test_a_newer_run_closes_the_older_one(tmp_path):
    async def main():
        world = World(tmp_path)
        world.upstream.open.clear()
        old = world.start()
        await until(lambda: world.upstream.asked)
        new = world.start(attempt_index=1)
        assert code(await old) == (409, wire.STALE_ATTEMPT)
        world.upstream.open.set()
        assert (await new).json()["rows"][0] == "p7_g2-a1/call-1"
        assert code(await world.start()) == (409, wire.STALE_ATTEMPT)

    asyncio.run(main())


@pytest.mark.parametrize("expect", ["continuation", "finished"])
def test_never_a_silent_fresh_start(tmp_path, expect):
    async def main():
        world = World(tmp_path)
        answer = await world.start(attempt_index=1, expect=expect, expect_call="call-1")
        assert code(answer) == (409, wire.NO_CONTINUATION)
        assert world.upstream.asked == []

    asyncio.run(main())


@pytest.mark.parametrize("outcome", ["raises", "not json"])
def test_a_loop_that_fails_is_an_answer(tmp_path, outcome):
    async def loop(task, http):
        if outcome == "raises":
            raise LookupError("no such thing")
        return object()

    async def main():
        world = World(tmp_path, loop)
        reply = await world.run()
        assert reply.result is None
        assert reply.error.startswith("LookupError: no" if outcome == "raises" else "the loop's")
        assert await world.run() == reply

    asyncio.run(main())


def test_results_are_kept_until_acknowledged(tmp_path):
    async def main():
        world = World(tmp_path)
        reply = await world.run()
        unknown = wire.Finished("p9_g9", 0, "d")
        other = wire.Finished("p7_g2", 0, "another digest")
        acknowledge = wire.Acknowledge(results=(unknown, other))
        await world.ask("agent", wire.ACKNOWLEDGE, acknowledge)
        assert await world.run() == reply

        own = wire.Finished("p7_g2", 0, reply.result_digest)
        await world.ask("agent", wire.ACKNOWLEDGE, wire.Acknowledge(results=(own,)))
        assert code(await world.start()) == (409, wire.STALE_ATTEMPT)
        # Its neighbours forget it too.
        await until(lambda: world.resource.live_runs() + world.policy.live_runs() == 0)
        assert world.counter.counts == {}

    asyncio.run(main())


def test_retire_cancels_and_closes(tmp_path):
    async def main():
        world = World(tmp_path)
        world.upstream.open.clear()
        task = world.start()
        await until(lambda: world.upstream.asked)
        await world.ask("agent", wire.RETIRE, wire.Retire(rollouts=("p7_g2", "unknown")))
        assert code(await task) == (409, wire.STALE_ATTEMPT)
        assert world.agent.live_runs() == 0
        assert code(await world.start()) == (409, wire.STALE_ATTEMPT)

    asyncio.run(main())


def test_bad_requests_are_named_and_start_nothing(tmp_path):
    async def main():
        world = World(tmp_path)
        good = strict.write(run_request())
        bad = [
            good | {"rollout_id": "../x"},
            good | {"attempt_index": -1, "lineage": -1},
            good | {"lineage": 3},
            good | {"attempt_index": "0"},
            good | {"extra": 1},
            {},
        ]
        for body in bad:
            answer = await world.clients["agent"].post("/run", json=body)
            assert code(answer) == (400, wire.BAD_REQUEST), body
        assert world.agent.live_runs() == 0

    asyncio.run(main())


# -- parking ----------------------------------------------------------------------------------


def test_a_closed_agent_starts_nothing_and_records_no_finish(tmp_path):
    async def main():
        world = World(tmp_path)
        world.upstream.open.clear()
        last_turn = world.start("p1_g0", task={"turns": 1, "say": "x"})
        await until(lambda: world.upstream.asked)
        await agent_close(world, fence(1))
        at_the_door = world.start("p2_g0")
        world.upstream.open.set()
        drained = await world.ask("agent", "drain", drain(fence(1)))
        assert drained.quiet
        assert not last_turn.done()
        assert not at_the_door.done()
        saved = await commit_agent(world, fence(1))
        assert saved.finished == ()  # the loop has returned, but its finish waits (H6)
        assert [line.rollout_id for line in saved.continuations] == ["p1_g0"]
        await world.release(fence(1))
        assert (await last_turn).status_code == (await at_the_door).status_code == 200

    asyncio.run(main())


def test_between_two_tries_it_is_not_parked(tmp_path):
    """H5: the policy server closed first and refuses; the agent is still open."""

    async def main():
        world = World(tmp_path)
        by = fence(1)
        await world.ask("policy", "prepare", prepare(by))
        task = world.start()
        await until(lambda: _places(world) == {"retry"})
        assert world.agent.blockers() == ["p7_g2"]
        drained = await parked(world, by)
        assert drained.quiet
        assert _places(world) == {"gate"}
        await world.release(by)
        assert (await task).status_code == 200

    asyncio.run(main())


def test_tool_calls_of_the_turn_under_way_go_through(tmp_path):
    async def main():
        world = World(tmp_path)
        world.counter.open.clear()
        task = world.start()
        await until(lambda: world.agent.live_runs() and "resource" in _places(world))
        await agent_close(world, fence(1))
        waiting = await world.ask("agent", "drain", drain(fence(1), timeout_s=0.0))
        assert (waiting.quiet, waiting.blockers) == (False, ("p7_g2",))
        world.counter.open.set()
        assert (await world.ask("agent", "drain", drain(fence(1)))).quiet
        saved = await commit_agent(world, fence(1))
        assert saved.continuations[0].resource_state_revisions == {"tools": 1}
        assert saved.rows == {"p7_g2": ("p7_g2/call-1",)}
        await world.release(fence(1))
        assert (await task).status_code == 200

    asyncio.run(main())


def _places(world: World) -> set[str]:
    return {place for run in world.agent._runs() for place in run.places.values()}


def test_drain_none_does_not_wait_for_the_model(tmp_path):
    async def main():
        world = World(tmp_path)
        world.upstream.open.clear()
        task = world.start()
        await until(lambda: world.upstream.asked)
        _, saved = await world.save(fence(1), drain="none")
        assert saved["agent"].continuations[0].last_committed_model_call_id is None
        assert world.sink.rows == {}
        world.upstream.open.set()
        await asyncio.sleep(0)
        renew = wire.Renew(fence=fence(1), lease_s=60, **TIMED)
        for kind in ("policy", "agent", "resource"):
            assert not (await world.ask(kind, "renew", renew)).moved
        assert world.sink.rows == {}  # the reply is here, its row waits
        await world.release(fence(1))
        assert (await task).status_code == 200
        assert len(world.upstream.asked) == 3

    asyncio.run(main())


def test_the_loops_own_time_out_does_not_see_parked_time(tmp_path):
    async def loop(task, http):
        reply = await http.post("http://policy/v1/chat/completions", json=ASK, timeout=0.001)
        return reply.status_code

    async def main():
        world = World(tmp_path, loop)
        await agent_close(world, fence(1))
        task = world.start()
        await asyncio.sleep(0.01)
        await world.release(fence(1))
        assert (await task).json()["result"] == 200

    asyncio.run(main())


ASK = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("stuck", ["model", "tool", "code"])
def test_a_straggler_is_left_out_or_stands_at_its_last_turn(tmp_path, stuck):
    """straggler="start_over": who waits for the model is saved where it stands (H5), who is
    anywhere else is left out, and goes on unharmed after the release."""
    go = asyncio.Event()

    async def loop(task, http):
        await http.post("http://policy/v1/chat/completions", json=ASK)
        if stuck == "code":
            await go.wait()
        await http.post("http://tools/add", json={"n": 1})
        return (await http.post("http://tools/look", json={})).json()["count"]

    async def main():
        world = World(tmp_path, loop, reads={"/look"})
        if stuck == "model":
            world.upstream.open.clear()
        if stuck == "tool":
            world.counter.open.clear()
        task = world.start()
        places = {"model": "model", "tool": "resource"}
        if stuck == "code":
            await until(lambda: world.sink.rows and not _places(world))
        else:
            await until(lambda: world.upstream.asked and places[stuck] in _places(world))
        by = fence(1)
        for kind in ("policy", "agent", "resource"):
            await world.ask(kind, "prepare", prepare(by, timeout_s=0.0, straggler="start_over"))
        for kind in ("policy", "agent", "resource"):
            assert (await world.ask(kind, "drain", drain(by))).quiet, kind
        saved = await world.commit(by)
        if stuck == "model":
            assert [one.rollout_id for one in saved["agent"].continuations] == ["p7_g2"]
            assert saved["agent"].restarts == ()
        else:
            assert saved["agent"].continuations == ()
            assert saved["agent"].restarts == (wire.Restart("p7_g2", wire.NOT_PARKED),)
        if stuck == "tool":
            assert saved["resource"].restarts == (wire.Restart("p7_g2", wire.NOT_PARKED),)
            assert saved["resource"].revisions == {}
        for event in (go, world.upstream.open, world.counter.open):
            event.set()
        await asyncio.sleep(0)
        renew = wire.Renew(fence=by, lease_s=60, **TIMED)
        assert not any([(await world.ask(kind, "renew", renew)).moved for kind in world.servers])
        await world.release(by)
        assert (await task).json()["result"] == 1

    asyncio.run(main())


# -- calls with an unknown outcome ------------------------------------------------------------


class Flaky(httpx.AsyncBaseTransport):
    """Delivers, then breaks the connection for the first `times` calls to a path."""

    def __init__(self, inner: httpx.AsyncBaseTransport, path: str, times: int) -> None:
        self.inner, self.path, self.times = inner, path, times
        self.error: Any = httpx.ReadError("connection reset")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.inner.handle_async_request(request)
        if request.url.path == self.path and self.times:
            self.times -= 1
            await response.aread()
            raise self.error
        return response


def _flaky(world: World, server: str, path: str, times: int) -> Flaky:
    flaky = Flaky(world.inner[server], path, times)
    world.agent._neighbours.transports[server] = flaky
    return flaky


@pytest.mark.parametrize(
    ("server", "path"), [("tools", "/add"), ("policy", "/v1/chat/completions")]
)
def test_a_broken_connection_is_repeated_and_applied_once(tmp_path, server, path, no_pauses):
    async def main():
        world = World(tmp_path)
        _flaky(world, server, path, 2)
        reply = await world.run()
        assert [count for _, count in reply.result] == [1, 3, 6]
        assert len(world.counter.applied) == len(world.upstream.asked) == 3

    asyncio.run(main())


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr("participants.gym.servers.transport.PAUSES_S", (0.0,))
    monkeypatch.setattr("participants.gym.servers.transport.MAX_TRIES", 5)


def test_a_tool_call_that_stays_unknown_starts_the_rollout_over(tmp_path, no_pauses):
    async def main():
        world = World(tmp_path)
        _flaky(world, "tools", "/add", 99)
        assert code(await world.start()) == (409, wire.UNCERTAIN)
        assert len(world.counter.applied) == 1
        await parked(world, fence(1))
        saved = await commit_agent(world, fence(1))
        assert saved.restarts == (wire.Restart("p7_g2", wire.UNCERTAIN),)
        assert saved.continuations == ()

    asyncio.run(main())


def test_a_tool_call_that_timed_out_is_told_and_never_saved(tmp_path):
    async def loop(task, http):
        try:
            await http.post("http://tools/add", json={"n": 1})
        except httpx.ReadTimeout:
            await http.post("http://policy/v1/chat/completions", json=ASK)
            return "told"

    async def main():
        world = World(tmp_path, loop)
        _flaky(world, "tools", "/add", 1).error = httpx.ReadTimeout("too slow")
        world.upstream.open.clear()
        task = world.start()
        await until(lambda: world.upstream.asked)
        await agent_close(world, fence(1), drain="none")
        assert (await world.ask("agent", "drain", drain(fence(1)))).quiet
        saved = await commit_agent(world, fence(1))
        assert saved.restarts == (wire.Restart("p7_g2", wire.UNCERTAIN),)
        await world.release(fence(1))
        world.upstream.open.set()
        assert (await task).json()["result"] == "told"

    asyncio.run(main())


def test_a_server_that_is_down_for_good_is_told_to_the_loop(tmp_path, no_pauses):
    async def loop(task, http):
        try:
            await http.post("http://tools/add", json={"n": 1})
        except httpx.ConnectError:
            return "down"

    class Down(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused")

    async def main():
        world = World(tmp_path, loop)
        world.agent._neighbours.transports["tools"] = Down()
        assert (await world.run()).result == "down"

    asyncio.run(main())


# -- restore ----------------------------------------------------------------------------------


async def _saved_at_call_2(world: World, by: Any, **start: Any) -> Any:
    """Saves with one finished turn, the second call asked for again after the restore."""
    world.upstream.open.clear()
    task = world.start(**start)
    await until(lambda: world.upstream.asked)
    saving = asyncio.create_task(world.save(by))
    await until(lambda: world.resource.gate.closed)
    world.upstream.open.set()
    return task, *(await saving)


CONTINUE = {"attempt_index": 1, "incarnation": 2, "expect": "continuation", "expect_call": "call-1"}


async def _restored(world: World, snapshot: str, saved: Any, incarnation: int = 2) -> None:
    by = fence(1, incarnation)
    await world.stage(by, snapshot, saved)
    await world.release(by)


def test_another_way_through_the_loop_is_a_mismatch(tmp_path):
    async def other(task, http):
        reply = await http.post("http://policy/v1/chat/completions", json=ASK)
        return reply.status_code

    async def short(task, http):
        return "nothing asked"

    async def main():
        _, snapshot, saved = await _saved_at_call_2(World(tmp_path), fence(1))
        for loop in (other, short):
            world = World(tmp_path, loop)
            await _restored(world, snapshot, saved)
            assert code(await world.start(**CONTINUE)) == (409, wire.REPLAY_MISMATCH)
            assert world.upstream.asked == []
            fresh = await world.run(attempt_index=2, incarnation=2)
            assert (fresh.replayed, fresh.error) == (0, None)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"expect_call": "call-2"}, wire.NO_CONTINUATION),
        ({"expect_call": None}, wire.NO_CONTINUATION),
        ({"expect": "finished"}, wire.NO_CONTINUATION),
        ({"lineage": 1}, wire.NO_CONTINUATION),
        ({"incarnation": 1}, wire.STALE_ATTEMPT),
        ({"attempt_index": 0, "lineage": 0}, wire.STALE_ATTEMPT),
        ({"task": {"turns": 9, "say": "other"}}, wire.REPLAY_MISMATCH),
    ],
)
def test_a_continuation_is_claimed_by_who_knows_it(tmp_path, wrong, why):
    async def main():
        _, snapshot, saved = await _saved_at_call_2(World(tmp_path), fence(1))
        world = World(tmp_path)
        await _restored(world, snapshot, saved)
        assert code(await world.start(**(CONTINUE | wrong))) == (409, why)
        assert (await world.run(**CONTINUE)).replayed == 1

    asyncio.run(main())


def test_restore_into_servers_that_lived_on(tmp_path):
    """R4: only the trainer died. What lives is closed, sessions and answers are replaced."""

    async def main():
        world = World(tmp_path)
        task, snapshot, saved = await _saved_at_call_2(world, fence(1))
        await world.release(fence(1))
        assert (await task).status_code == 200
        assert world.counter.counts == {"p7_g2": 6}
        world.upstream.open.clear()
        stale = world.start("p8_g0")
        await until(lambda: len(world.upstream.asked) == 4)
        staging = asyncio.create_task(world.stage(fence(1, 2), snapshot, saved))
        await until(lambda: world.agent.gate.closed)
        world.upstream.open.set()
        await staging
        assert world.counter.counts["p7_g2"] == 6  # staged only (R1)
        await world.release(fence(1, 2))
        assert code(await stale) == (409, wire.STALE_ATTEMPT)
        assert world.counter.counts == {"p7_g2": 1}
        reply = await world.run(**CONTINUE)
        assert [count for _, count in reply.result] == [1, 3, 6]

    asyncio.run(main())


def test_rollback_leaves_what_lived(tmp_path):
    async def main():
        world = World(tmp_path)
        task, snapshot, saved = await _saved_at_call_2(world, fence(1))
        await world.stage(fence(1, 2), snapshot, saved)
        await world.release(fence(1, 2), "rollback")
        assert [count for _, count in (await task).json()["result"]] == [1, 3, 6]

    asyncio.run(main())


def test_what_nobody_claimed_yet_is_in_the_next_snapshot(tmp_path):
    async def main():
        _, snapshot, saved = await _saved_at_call_2(World(tmp_path), fence(1))
        world = World(tmp_path)
        await _restored(world, snapshot, saved)
        again, saved = await world.save(fence(2, 2))
        (line,) = saved["agent"].continuations
        assert (line.attempt_index, line.capture_key) == (1, "p7_g2")
        world = World(tmp_path)
        await _restored(world, again, saved, incarnation=3)
        reply = await world.run(**(CONTINUE | {"attempt_index": 2, "incarnation": 3}))
        assert reply.rows == ("p7_g2/call-1", "p7_g2-a2/call-2", "p7_g2-a2/call-3")

    asyncio.run(main())


def test_three_snapshots_and_crashes_in_a_row(tmp_path):
    async def main():
        whole = await World(tmp_path).run()
        world, start = World(tmp_path), {}
        for number in (1, 2, 3):
            _, snapshot, saved = await _saved_at_call_2(world, fence(9, number), **start)
            line = saved["agent"].continuations[0]
            assert line.last_committed_model_call_id == f"call-{number}"
            world = World(tmp_path)
            await _restored(world, snapshot, saved, incarnation=number + 1)
            start = {
                "attempt_index": number, "incarnation": number + 1, "expect": "continuation",
                "expect_call": f"call-{number}",
            }  # fmt: skip
        reply = await world.run(**start)
        assert reply.result == whole.result
        assert reply.rows == ("p7_g2/call-1", "p7_g2-a1/call-2", "p7_g2-a2/call-3")

    asyncio.run(main())


def test_finished_results_are_part_of_the_snapshot(tmp_path):
    async def main():
        world = World(tmp_path)
        reply = await world.run()
        snapshot, saved = await world.save(fence(1))
        assert saved["agent"].finished == (wire.Finished("p7_g2", 0, reply.result_digest),)
        world = World(tmp_path)
        await _restored(world, snapshot, saved)
        again = await world.run(attempt_index=1, incarnation=2, expect="finished", lineage=0)
        assert (again.result, again.rows, again.attempt_index) == (reply.result, reply.rows, 1)
        assert world.upstream.asked == []
        done = wire.Finished("p7_g2", 0, reply.result_digest)  # an ACK owed since before the crash
        await world.ask("agent", wire.ACKNOWLEDGE, wire.Acknowledge(results=(done,)))
        assert code(await world.start(attempt_index=1, incarnation=2)) == (409, wire.STALE_ATTEMPT)

    asyncio.run(main())


def test_discard_takes_out_of_what_is_staged(tmp_path):
    async def main():
        _, snapshot, saved = await _saved_at_call_2(World(tmp_path), fence(1))
        world, by = World(tmp_path), fence(1, 2)
        await world.stage(by, snapshot, saved)
        for kind in world.servers:
            await world.ask(kind, "discard", wire.Discard(fence=by, rollouts=("p7_g2",), **TIMED))
        await world.release(by)
        assert code(await world.start(**CONTINUE)) == (409, wire.NO_CONTINUATION)
        assert world.counter.counts == {}
        assert (await world.run(attempt_index=1, incarnation=2)).replayed == 0

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["agent", "policy", "resource"])
def test_a_damaged_part_is_refused_whole(tmp_path, kind):
    async def main():
        _, snapshot, saved = await _saved_at_call_2(World(tmp_path), fence(1))
        entry = next(file for file in saved[kind].files if file.size_bytes)
        path = tmp_path / snapshot / entry.path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        world, by = World(tmp_path), fence(1, 2)
        await world.ask(kind, "fence", wire.FenceOff(fence=by, lease_s=60, **TIMED))
        await world.ask(kind, "drain", drain(by))
        message = wire.Stage(fence=by, snapshot=snapshot, files=saved[kind].files, **TIMED)
        answer = await send(world.clients[kind], "restore", message)
        assert code(answer) == (409, wire.BAD_STATE)
        assert entry.path in answer.json()["error"]["detail"]
        assert world.servers[kind].gate.phase == "fenced"
        assert world.servers[kind].live_runs() == 0

    asyncio.run(main())


def test_a_start_from_nothing_closes_what_lived(tmp_path):
    async def main():
        world = World(tmp_path)
        world.upstream.open.clear()
        task = world.start()
        await until(lambda: world.upstream.asked)
        by = fence(1, 2)
        staging = asyncio.create_task(world.stage(by, "", NOTHING))
        await until(lambda: world.agent.gate.closed)
        world.upstream.open.set()
        await staging
        await world.release(by)
        assert code(await task) == (409, wire.STALE_ATTEMPT)
        assert (await world.run(incarnation=2)).error is None

    asyncio.run(main())


NOTHING = {kind: wire.Report(phase="") for kind in ("policy", "agent", "resource")}


def test_model_calls_at_the_same_time(tmp_path):
    """A failed call leaves a hole in the numbers, and nothing else."""

    async def loop(task, http):
        asked = [
            http.post("http://policy/v1/chat/completions", json=ASK | {"n": n}) for n in range(3)
        ]
        replies = await asyncio.gather(*asked)
        last = await http.post("http://policy/v1/chat/completions", json=ASK)
        return sorted(reply.status_code for reply in (*replies, last))

    async def main():
        world = World(tmp_path, loop)
        world.upstream.fail = [500]
        reply = await world.run()
        assert reply.result == [200, 200, 200, 500]
        assert (reply.turns, len(reply.rows)) == (3, 3)

    asyncio.run(main())


def test_release_after_an_abort_lets_everybody_go_on(tmp_path):
    async def main():
        world = World(tmp_path)
        tasks = [world.start(f"p1_g{n}") for n in range(8)]
        await until(lambda: len(world.upstream.asked) >= 4)
        await world.close(fence(1))
        assert report(await send(world.clients["agent"], "status", drain(fence(1)))).quiet
        await world.release(fence(1))
        assert [(await task).status_code for task in tasks] == [200] * 8

    asyncio.run(main())


def test_the_policy_must_be_one_of_the_servers(tmp_path):
    from participants.gym.servers.agent import AgentServer

    with pytest.raises(ValueError, match="not one of the servers"):
        AgentServer("a", None, {"tools": "http://t"}, tmp_path, "token")


def test_unknown_server_names_are_told_to_the_loop(tmp_path):
    async def loop(task, http):
        await http.get("http://judge/score")

    async def main():
        reply = await World(tmp_path, loop).run()
        assert reply.error == "ConnectError: no server 'judge' here (known: policy, tools)"

    asyncio.run(main())


def test_texts_that_utf8_cannot_hold_come_through(tmp_path):
    async def loop(task, http):
        return {"said": "\ud800"}

    async def main():
        assert (await World(tmp_path, loop).run()).result == {"said": "\ud800"}

    asyncio.run(main())


def test_lifespan_closes_the_connections(tmp_path):
    async def main():
        world, sent = World(tmp_path), []
        for server in (world.agent, world.policy):
            events = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

            async def receive(events=events):
                return next(events)

            async def remember(message):
                sent.append(message["type"])

            await server.app({"type": "lifespan"}, receive, remember)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"] * 2
        assert world.policy._upstream.is_closed

    asyncio.run(main())

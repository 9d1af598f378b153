"""A save and a restore of real Gym servers over HTTP: engine, Gym, actor, folder store.

Two rollouts of three turns each; both are caught in their second turn. Every process is then
replaced by a fresh one, and each rollout goes on after its second turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from fsm.config import EngineConfig
from fsm.engine import SnapshotEngine
from fsm.outcome import Aborted, Refused, RestoreFailed, Saved
from fsm.participant import Attempt, Facts, Participant, Restore
from participants.gym import wire
from participants.gym.actor import NemoGymActor
from participants.gym.client import GymServer
from participants.gym.fake import TOKEN
from participants.gym.participant import Gym
from participants.gym.servers.agent import AgentServer
from participants.gym.servers.policy import PolicyServer
from participants.gym.servers.resource import ResourceServer
from participants.memory_data_plane import MemoryDataPlane
from storage.store import FolderStore
from tests.gym_support import run, until
from tests.integration.http_support import Ports, served

TURNS = 3
ROLLOUTS = ("p7_g2", "p8_g0")
NAMES: dict[str, wire.Kind] = {"agent0": "agent", "policy": "policy", "tools": "resource"}


class Upstream:
    """A model that answers each call at once, but the second of every rollout when it may."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.may_answer, self.all_wait = asyncio.Event(), asyncio.Event()
        self.app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> JSONResponse:
        messages = (await request.json())["messages"]
        rollout, turn = messages[0]["content"], len(messages)
        self.calls.append((rollout, turn))
        if turn == 2:
            if len({name for name, at in self.calls if at == 2}) == len(ROLLOUTS):
                self.all_wait.set()
            await self.may_answer.wait()
        message = {"role": "assistant", "content": f"{rollout} turn {turn}"}
        return JSONResponse({"choices": [{"message": message, "token_ids": [turn]}]})


class Counter:
    """The environment: one number for each rollout, and its codec. Calls of the rollout `slow`
    wait for `go_on`."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.slow, self.waits, self.go_on = "", asyncio.Event(), asyncio.Event()
        self.app = Starlette(routes=[Route("/add", self.add, methods=["POST"])])

    async def add(self, request: Request) -> JSONResponse:
        rollout = request.headers[wire.ROLLOUT]
        if rollout == self.slow:
            self.waits.set()
            await self.go_on.wait()
        self.counts[rollout] = self.counts.get(rollout, 0) + 1
        return JSONResponse({"count": self.counts[rollout]})

    def export_session(self, rollout_id: str) -> Any:
        return self.counts.get(rollout_id)

    def import_session(self, rollout_id: str, state: Any) -> None:
        self.counts[rollout_id] = state

    def drop_session(self, rollout_id: str) -> None:
        self.counts.pop(rollout_id, None)


async def loop(task: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
    """Somebody's turn loop: ask the model, use the tool, again. It knows nothing of snapshots."""
    messages, counts = [{"role": "user", "content": task["rollout"]}], []
    for _ in range(TURNS):
        url = "http://policy/v1/chat/completions"
        reply = (await http.post(url, json={"messages": messages})).json()
        messages.append(reply["choices"][0]["message"])
        counts.append((await http.post("http://tools/add", json={})).json()["count"])
    said = [message["content"] for message in messages[1:]]
    return {"said": said, "counts": counts}


class World:
    """All processes of one incarnation: Gym's servers, the model, the trainer's engine."""

    def __init__(self, root: Path, sink: MemoryDataPlane, **config: Any) -> None:
        self.upstream, self.counter, self.sink = Upstream(), Counter(), sink
        self.ports = Ports(dict.fromkeys([*NAMES, "upstream"]))
        urls = self.ports.urls
        targets = {"policy": urls["policy"], "tools": urls["tools"]}
        self.network = httpx.AsyncHTTPTransport()  # between servers; closed with the world
        self.agent = AgentServer("agent0", loop, targets, root, TOKEN, inner=self.network)
        self.apps = {
            "upstream": self.upstream.app,
            "agent0": self.agent.app,
            "policy": PolicyServer(
                "policy", urls["upstream"], sink, root, TOKEN, inner=self.network
            ).app,
            "tools": ResourceServer(
                "tools", self.counter.app, codec=self.counter, root=root, token=TOKEN
            ).app,
        }
        self.root = root
        self.start_trainer(**config)

    def start_trainer(self, **config: Any) -> None:
        """A fresh trainer process; the servers live on."""
        urls = self.ports.urls
        servers = [GymServer(kind, name, urls[name]) for name, kind in NAMES.items()]
        self.actor = NemoGymActor(servers, TOKEN)
        self.store = FolderStore(self.root)
        self.controller = LastToDrain(self.upstream)
        participants = [Gym([self.actor]), self.controller]
        self.engine = SnapshotEngine(EngineConfig(**config), self.store, participants)

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[World]:
        async with served(self.apps, self.ports), contextlib.aclosing(self.network):
            yield self
            await self.stop_trainer()

    async def stop_trainer(self) -> None:
        await self.engine.close()
        await self.actor.close()

    def start(self, rollout: str, attempt: int = 0, **expect: Any) -> asyncio.Task[wire.RunReply]:
        request = wire.RunRequest(
            rollout_id=rollout,
            attempt_index=attempt,
            incarnation=self.store.incarnation,
            lineage=0,
            task={"rollout": rollout},
            **({"expect": "fresh"} | expect),
        )
        return asyncio.create_task(self.actor.run_rollout("agent0", request))

    async def until_all_wait(self) -> list[asyncio.Task[wire.RunReply]]:
        """Start every rollout; return when each waits for its second model call."""
        await self.engine.open()
        runs = [self.start(rollout) for rollout in ROLLOUTS]
        await self.upstream.all_wait.wait()
        return runs

    async def saved_and_busy(self) -> asyncio.Task[wire.RunReply]:
        """A snapshot is there, every rollout of it has finished, and another one is in a tool."""
        runs = await self.until_all_wait()
        assert isinstance(await self.engine.save(), Saved)
        await asyncio.gather(*runs)
        self.counter.slow = "p5_g0"
        busy = self.start("p5_g0")
        await self.counter.waits.wait()
        return busy


class LastToDrain(Participant):
    """In the controller's place: the model may answer once Gym is closed, and a join."""

    name, calls, restore_step = "controller", frozenset({"gym"}), "load_controller"

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.gym: Facts = {}
        self.discard: list[str] = []
        self.answers = True

    async def drain(self, attempt: Attempt) -> None:
        if self.answers:
            self._upstream.may_answer.set()

    async def commit(self, attempt: Attempt) -> Facts:
        return {}

    async def restore(self, restore: Restore) -> Facts:
        self.gym = restore.facts["gym"]
        return {"discard": self.discard}

    async def resume(self, attempt: Attempt | Restore) -> None:
        """Dispatch opens."""


def expected(rollout: str) -> dict[str, Any]:
    said = [f"{rollout} turn {turn}" for turn in range(1, TURNS + 1)]
    return {"said": said, "counts": list(range(1, TURNS + 1))}


def rows_of(rollout: str, *runs: int) -> tuple[str, ...]:
    """Row keys of a history whose call N was made by run runs[N - 1]."""
    keys = (wire.capture_key(rollout, attempt) for attempt in runs)
    return tuple(f"{key}/call-{number}" for number, key in enumerate(keys, start=1))


def test_rollouts_go_on_after_their_last_turn(tmp_path: Path) -> None:
    async def main() -> None:
        sink = MemoryDataPlane()
        first = World(tmp_path / "root", sink)
        async with first.up():
            runs = await first.until_all_wait()
            outcome = await first.engine.save()
            assert isinstance(outcome, Saved), outcome
            assert outcome.unreleased == {}
            assert outcome.facts["gym"] == {
                "continuations": 2,
                "finished": 0,
                "sessions": 2,
                "restarts": {},
                "servers": ["agent0", "policy", "tools"],
            }
            # Nobody noticed: released, the rollouts end as if nothing had been.
            replies = await asyncio.gather(*runs)
            assert [reply.result for reply in replies] == [expected(name) for name in ROLLOUTS]

        # All of that work is lost but the snapshot: fresh processes everywhere.
        second = World(tmp_path / "root", sink)
        second.controller.discard = ["p8_g0"]
        second.upstream.may_answer.set()
        async with second.up():
            restored = await second.engine.restore()
            assert restored.snapshot == outcome.snapshot
            found = second.controller.gym
            assert found["_continuations"]["p7_g2"] == {
                "attempt_index": 0,
                "server": "agent0",
                "capture_key": "p7_g2",
                "last_call": "call-2",
            }
            assert found["_rows"]["p7_g2"] == list(rows_of("p7_g2", 0, 0))

            reply = await second.start("p7_g2", 1, expect="continuation", expect_call="call-2")
            assert reply.result == expected("p7_g2")
            assert (reply.turns, reply.replayed) == (3, 2)
            assert reply.rows == rows_of("p7_g2", 0, 0, 1)
            assert second.upstream.calls == [("p7_g2", 3)]
            assert second.counter.counts == {"p7_g2": 3}

            # The join dropped the other one everywhere: it may only start over.
            with pytest.raises(Refused, match=wire.NO_CONTINUATION):
                await second.start("p8_g0", 1, expect="continuation", expect_call="call-2")

    run(main)


def test_what_show_reads_from_the_folder(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path / "root", MemoryDataPlane())
        async with world.up():
            runs = await world.until_all_wait()
            assert isinstance(await world.engine.save(), Saved)
            await asyncio.gather(*runs)
            topology = {one.name: dict(await one.describe()) for one in world.engine.participants}
            formats = {one.name: one.format_version for one in world.engine.participants}
            saved = await world.store.newest(topology, formats, if_bad="raise")
            assert saved is not None
            shown = Gym.inspect(saved.part("gym"))
            assert shown["sessions"] == 2
            for rollout in ROLLOUTS:
                assert shown["rollouts"][rollout] == {
                    "server": "agent0",
                    "run": 0,
                    "last_call": "call-2",
                    "rows": 2,
                    "starts_over": None,
                }

    run(main)


def test_a_model_that_does_not_answer_aborts_and_everyone_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path / "root", MemoryDataPlane(), prepare_timeout_s=2.0)
        world.controller.answers = False
        async with world.up():
            runs = await world.until_all_wait()
            outcome = await world.engine.save()
            assert isinstance(outcome, Aborted), outcome
            assert outcome.cause.code == "not_parked"
            assert "p7_g2" in outcome.cause.detail
            world.upstream.may_answer.set()
            replies = await asyncio.gather(*runs)
            assert [reply.result for reply in replies] == [expected(name) for name in ROLLOUTS]

    run(main)


def test_drain_none_does_not_wait_for_the_model(tmp_path: Path) -> None:
    """The rollout stands at its last finished turn; once restored, it asks the model again."""

    async def main() -> None:
        sink = MemoryDataPlane()
        first = World(tmp_path / "root", sink, drain="none")
        first.controller.answers = False
        async with first.up():
            runs = await first.until_all_wait()
            assert isinstance(await first.engine.save(), Saved)
            first.upstream.may_answer.set()
            replies = await asyncio.gather(*runs)
            assert [reply.result for reply in replies] == [expected(name) for name in ROLLOUTS]
            assert first.upstream.calls.count(("p7_g2", 2)) == 1

        second = World(tmp_path / "root", sink)
        second.upstream.may_answer.set()
        async with second.up():
            await second.engine.restore()
            place = second.controller.gym["_continuations"]["p7_g2"]
            assert place["last_call"] == "call-1"
            reply = await second.start("p7_g2", 1, expect="continuation", expect_call="call-1")
            assert reply.result == expected("p7_g2")
            assert second.upstream.calls == [("p7_g2", 2), ("p7_g2", 3)]
            assert reply.rows == rows_of("p7_g2", 0, 1, 1)

    run(main)


def test_a_straggler_in_a_tool_is_left_out_and_named(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(
            tmp_path / "root", MemoryDataPlane(), prepare_timeout_s=1.0, straggler="start_over"
        )
        world.counter.slow = "p7_g2"
        world.upstream.may_answer.set()
        async with world.up():
            await world.engine.open()
            runs = [world.start("p7_g2")]
            await world.counter.waits.wait()
            outcome = await world.engine.save()
            assert isinstance(outcome, Saved), outcome
            assert outcome.facts["gym"]["continuations"] == 0
            assert outcome.facts["gym"]["restarts"].keys() == {"p7_g2"}
            world.counter.go_on.set()
            (reply,) = await asyncio.gather(*runs)
            assert reply.result == expected("p7_g2")

    run(main)


def test_servers_that_lived_on_close_the_old_runs(tmp_path: Path) -> None:
    """Only the trainer died: its runs go on in the servers until the restore ends them (R4)."""

    async def main() -> None:
        world = World(tmp_path / "root", MemoryDataPlane())
        async with world.up():
            lost = await world.saved_and_busy()
            old_actor, old_incarnation = world.actor, world.store.incarnation
            await world.engine.close()

            world.start_trainer()
            restoring = asyncio.create_task(world.engine.restore())
            await until(lambda: world.agent.gate.closed)
            world.counter.go_on.set()  # fencing waits for the tool, and lets no further call begin
            await restoring
            assert world.store.incarnation == old_incarnation + 1
            with pytest.raises(Refused) as caught:
                await lost
            assert caught.value.code == wire.STALE_ATTEMPT
            await old_actor.close()

            # The sessions are those of the snapshot again, not those of the work since then.
            reply = await world.start("p7_g2", 1, expect="continuation", expect_call="call-2")
            assert reply.result == expected("p7_g2")
            assert (reply.turns, reply.replayed) == (3, 2)

    run(main)


def test_servers_with_runs_of_another_job_are_taken_over_only_on_purpose(tmp_path: Path) -> None:
    """H1: another root's uuid; a wrong address must not end somebody else's rollouts."""

    async def main() -> None:
        world = World(tmp_path / "root", MemoryDataPlane())
        async with world.up():
            theirs = await world.saved_and_busy()
            await world.stop_trainer()

            world.root = tmp_path / "another"
            world.start_trainer()
            with pytest.raises(RestoreFailed, match="foreign_root"):
                await world.engine.restore(if_none="start")
            assert not world.agent.gate.closed
            assert world.agent.live_runs() == 1

            restoring = asyncio.create_task(
                world.engine.restore(if_none="start", if_foreign="take_over")
            )
            await until(lambda: world.agent.gate.closed)
            world.counter.go_on.set()
            await restoring
            assert world.agent.live_runs() == 0
            assert isinstance((await asyncio.gather(theirs, return_exceptions=True))[0], Refused)

    run(main)

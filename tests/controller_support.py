"""A Gym for controller tests: it keeps runs in memory, and moves only when told to."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from fsm.outcome import Refused
from participants.barrier import AsyncBarrier
from participants.controller.controller import RlController
from participants.controller.loader import ListLoader
from participants.controller.state import Found, Loaded
from participants.data_plane import CAPTURE, TRAIN
from participants.gym.wire import (
    NO_CONTINUATION,
    STALE_ATTEMPT,
    Finished,
    RunReply,
    RunRequest,
    capture_key,
)
from participants.memory_data_plane import MemoryDataPlane

SERVERS = ("agent-0", "agent-1")


@define
class Run:
    """What an agent server knows of one rollout."""

    server: str
    attempt_index: int
    calls: int = 0
    rows: list[str] = field(factory=list)
    result: dict[str, Any] | None = None
    waiting: list[asyncio.Future[None]] = field(factory=list)


class FakeGym:
    def __init__(self, plane: MemoryDataPlane) -> None:
        self.plane = plane
        self.runs: dict[str, Run] = {}
        self.acknowledged: list[Finished] = []
        self.retired: list[str] = []
        self.asked: list[RunRequest] = []
        self.failures: list[Exception] = []  # raised by the next calls of run_rollout
        self.ack_failures: list[Exception] = []
        self.auto = False  # runs finish by themselves, after two more turns
        self.pace = 0  # rounds of the loop that a turn takes then

    # -- GymCalls ------------------------------------------------------------------------------

    async def run_rollout(self, server_name: str, request: RunRequest) -> RunReply:
        self.asked.append(request)
        if self.failures:
            raise self.failures.pop(0)
        run = self.accept(server_name, request)
        if self.auto and run.result is None:
            for _ in range(2):
                await settle(self.pace)
                await self.turn(request.rollout_id)
            self.end(request.rollout_id)
        if run.result is None:
            done = asyncio.get_running_loop().create_future()
            run.waiting.append(done)
            await done
        return self.reply(request)

    async def acknowledge(self, results: Sequence[Finished], timeout_s: float) -> None:
        if self.ack_failures:
            raise self.ack_failures.pop(0)
        self.acknowledged += results
        for one in results:
            self.runs.pop(one.rollout_id, None)

    async def retire(self, rollouts: Sequence[str], timeout_s: float) -> None:
        self.retired += rollouts
        for name in rollouts:
            self.runs.pop(name, None)

    # -- what happens inside ---------------------------------------------------------------------

    def accept(self, server: str, request: RunRequest) -> Run:
        run = self.runs.get(request.rollout_id)
        if request.expect == "fresh":
            if run is not None and run.attempt_index > request.attempt_index:
                raise Refused(STALE_ATTEMPT, request.rollout_id)
            if run is None or run.attempt_index < request.attempt_index:
                run = Run(server, request.attempt_index)
        elif run is None or run.server != server:
            raise Refused(NO_CONTINUATION, request.rollout_id)
        elif request.expect == "continuation":
            assert run.result is not None or last_call(run) == request.expect_call
        else:
            assert run.result is not None
        run.attempt_index = request.attempt_index
        self.runs[request.rollout_id] = run
        return run

    async def turn(self, rollout_id: str) -> None:
        run = self.runs[rollout_id]
        key = f"{capture_key(rollout_id, run.attempt_index)}/call-{run.calls}"
        await self.plane.put(key, {"tokens": [run.calls, 7], "version": 0, "model": "tiny"})
        run.calls += 1
        run.rows.append(key)

    def end(self, rollout_id: str, reward: Any = 1.0) -> None:
        run = self.runs[rollout_id]
        run.result = {"reward": reward}
        for done in run.waiting:
            done.set_result(None)
        run.waiting.clear()

    def reply(self, request: RunRequest) -> RunReply:
        run = self.runs[request.rollout_id]
        return RunReply(
            rollout_id=request.rollout_id,
            attempt_index=request.attempt_index,
            result=run.result,
            result_digest=f"digest of {request.rollout_id}",
            rows=tuple(run.rows),
            turns=run.calls,
            replayed=0,
        )

    # -- a snapshot of it ------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """As the Gym participant's restore gives them to the join."""
        parked = {n: r for n, r in self.runs.items() if r.result is None}
        ended = {n: r for n, r in self.runs.items() if r.result is not None}
        base = {
            n: {"attempt_index": r.attempt_index, "server": r.server} for n, r in parked.items()
        }
        return {
            "_continuations": {
                n: {**base[n], "last_call": last_call(r)} for n, r in parked.items()
            },
            "_finished": {
                n: {"attempt_index": r.attempt_index, "server": r.server} for n, r in ended.items()
            },
            "_restarts": {},
            "_rows": {n: list(r.rows) for n, r in self.runs.items()},
        }


def last_call(run: Run) -> str | None:
    return f"call-{run.calls - 1}" if run.calls else None


@define
class World:
    """One trainer with its controller, data plane and Gym; `saved` is what a snapshot holds."""

    rl: RlController
    gym: FakeGym
    plane: MemoryDataPlane
    barrier: AsyncBarrier
    loaded: Loaded = field(factory=Loaded)

    def save(self, anchor_step: int | None = None) -> Saved:
        cut = self.rl.state()
        runs = {
            name: Run(r.server, r.attempt_index, r.calls, list(r.rows), r.result)
            for name, r in self.gym.runs.items()
        }
        plane = MemoryDataPlane()
        plane._partitions = copy.deepcopy(self.plane._partitions)
        step = self.rl.step if anchor_step is None else anchor_step
        records = json.loads(json.dumps(dict(cut.records)))
        return Saved(records, self.gym.facts(), runs, plane, step)


@define
class Saved:
    records: dict[str, list[Any]]
    facts: dict[str, Any]
    runs: dict[str, Run]
    plane: MemoryDataPlane
    anchor_step: int


def world(
    tasks: int = 3,
    *,
    group_size: int = 2,
    epochs: int | None = 1,
    plane: MemoryDataPlane | None = None,
    opened: bool = True,
    **options: Any,
) -> World:
    plane, barrier = plane or MemoryDataPlane(), AsyncBarrier()
    gym = FakeGym(plane)
    loader = ListLoader([{"seed": n} for n in range(tasks)], epochs)
    rl = RlController(
        plane, barrier, gym, loader, servers=SERVERS, group_size=group_size, **options
    )
    if opened:
        rl.open_dispatch(frozenset())
    return World(rl, gym, plane, barrier)


async def restore(saved: Saved, incarnation: int = 2, **options: Any) -> World:
    """Fresh processes, and every step of a restore up to its resume."""
    plane = MemoryDataPlane()
    plane._partitions = copy.deepcopy(saved.plane._partitions)
    new = world(plane=plane, opened=False, **options)
    new.gym.runs = copy.deepcopy(saved.runs)
    found = Found(incarnation=incarnation, anchor_step=saved.anchor_step, gym=saved.facts)
    new.loaded = await new.rl.load(saved.records, found)
    for partition, kept in (
        (TRAIN, new.loaded.keep_train),
        (CAPTURE, new.loaded.keep_capture),
    ):
        present = await plane.keys(partition)
        assert set(kept) <= present.keys(), "a row that the join keeps does not exist"
        await plane.clear(partition, [key for key in present if key not in kept])
    for name in new.loaded.discard:
        new.gym.runs.pop(name, None)
    new.rl.open_dispatch(frozenset())
    return new


async def send_all(one: World) -> list[RunRequest]:
    """Send what is unsent, as the pump would."""
    requests = [await one.rl.send(name) for name in list(one.rl.ledger.unsent())]
    sent = [request for request in requests if request is not None]
    for request in sent:
        one.gym.accept(_server(one, request), request)
    return sent


async def play(one: World, request: RunRequest, turns: int = 2) -> bool:
    """Some turns, the end, and the result taken in."""
    for _ in range(turns):
        await one.gym.turn(request.rollout_id)
    one.gym.end(request.rollout_id)
    return await one.rl.finish(request, one.gym.reply(request))


async def until(condition: Callable[[], object], rounds: int = 10_000) -> None:
    """Let other tasks run until it holds."""
    for _ in range(rounds):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came to hold")


async def settle(rounds: int = 50) -> None:
    """Let every other task go as far as it can."""
    for _ in range(rounds):
        await asyncio.sleep(0)


def _server(one: World, request: RunRequest) -> str:
    entry = one.rl.ledger.get(request.rollout_id)
    assert entry is not None
    return entry.server

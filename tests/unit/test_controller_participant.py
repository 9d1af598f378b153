"""The controller as a participant, through the real engine with a data plane and a small Gym."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fsm.config import EngineConfig
from fsm.engine import SnapshotEngine
from fsm.outcome import (
    Aborted,
    AbortReason,
    Anchor,
    NotReleased,
    Refused,
    RestoreFailed,
    Saved,
    Skipped,
    SkipReason,
    SnapshotRejected,
)
from fsm.participant import Attempt, Participant, Restore
from participants.controller.participant import Controller
from participants.controller.pumps import RolloutPump
from participants.controller.state import Found, Loaded, Records, RlCut
from participants.data_plane import CAPTURE, TRAIN, DataPlanePart
from quiesce.demo.anchors import BOOTSTRAP, Anchors
from quiesce.demo.pumps import TrainPump
from storage.memory import MemoryDisk, MemoryStore
from tests.controller_support import FakeGym, Run, World, play, send_all, settle, world


class GymPart(Participant):
    """Saves and restores a FakeGym. silent: servers whose release is not confirmed."""

    name = "gym"

    def __init__(self, gym: FakeGym) -> None:
        self.gym = gym
        self.silent: frozenset[str] = frozenset()
        self.refusal: str | None = None

    async def prepare(self, attempt: Attempt) -> None:
        """Told, so that it is released."""

    async def commit(self, attempt: Attempt) -> dict[str, Any]:
        async with attempt.part() as part:
            for name, run in self.gym.runs.items():
                record = [name, run.server, run.attempt_index, run.calls, run.rows, run.result]
                part.document(name, record)
        return {"_rows": {name: run.rows for name, run in self.gym.runs.items()}}

    async def restore(self, restore: Restore) -> dict[str, Any]:
        saved = restore.saved()
        for entry in saved.files():
            stem = entry.path.rsplit("/", 1)[-1].removesuffix(".json")
            name, *fields = saved.document(stem)
            self.gym.runs[name] = Run(*fields)
        return self.gym.facts()

    async def reconcile(self, restore: Restore) -> None:
        if self.refusal:
            raise Refused(self.refusal)
        for name in restore.facts["controller"]["discard"]:
            self.gym.runs.pop(name, None)

    async def resume(self, attempt: Attempt | Restore) -> None:
        if self.silent:
            raise NotReleased(self.silent)


class Trainer:
    """One process of the trainer: controller, participants, engine."""

    def __init__(self, disk: MemoryDisk, **options: Any) -> None:
        self.world: World = world(tasks=4, opened=False, **options)
        self.rl, self.gym = self.world.rl, self.world.gym
        self.gym_part = GymPart(self.gym)
        self.controller = Controller(self.rl)
        self.store = MemoryStore(disk)
        self.engine = self.new_engine(lambda: Anchor(self.rl.step, "weights"))

    def new_engine(self, anchor: Callable[[], Anchor]) -> SnapshotEngine:
        return SnapshotEngine(
            EngineConfig(resume_attempts=1),
            self.store,
            [self.gym_part, DataPlanePart(self.world.plane), self.controller],
            barrier=self.world.barrier.cut,
            anchor=anchor,
        )


async def started(disk: MemoryDisk, **options: Any) -> Trainer:
    one = Trainer(disk, **options)
    await one.engine.restore(if_none="start")
    return one


def running(main: Callable[[MemoryDisk], Any]) -> None:
    asyncio.run(main(MemoryDisk()))


def test_what_is_saved_comes_back_and_says_so() -> None:
    async def main(disk: MemoryDisk) -> None:
        one = await started(disk)
        assert not one.rl.gate.closed
        assert one.rl.incarnation == 1
        await one.rl.draw()
        await one.rl.draw()
        first, *_ = await send_all(one.world)
        await play(one.world, first)
        await one.gym.turn("p1_g0")
        saved = await one.engine.save()
        assert isinstance(saved, Saved)
        facts = saved.facts["controller"]
        assert facts["counts"]["in_flight"] == 2
        assert facts["records"] == {"ledger": 4, "totals": 1, "loader": 1, "replay": 1}
        assert not one.rl.gate.closed
        one.store.crash()

        again = Trainer(disk)
        restored = await again.engine.restore()
        said = restored.facts["controller"]
        assert said["decisions"] == (
            "p0_g0: finished, kept",
            "p0_g1: run 0 → run 1, continues before its first call",
            "p1_g0: run 0 → run 1, continues after call-0",
            "p1_g1: run 0 → run 1, continues before its first call",
        )
        assert said["keep_train"] == ("p0_g0",)
        assert said["keep_capture"] == ("p1_g0/call-0",)
        assert again.rl.incarnation == 2
        assert not again.rl.gate.closed
        for request in await send_all(again.world):
            assert (request.incarnation, request.attempt_index) == (2, 1)
            assert await play(again.world, request)
        assert again.rl.conservation()["buffered"] == 2
        assert set(await again.world.plane.keys(TRAIN)) == {"p0_g0", "p0_g1", "p1_g0", "p1_g1"}

    running(main)


def test_a_result_that_gym_still_keeps_does_not_stop_the_cut() -> None:
    """Its capture rows are cleared here before its ACK goes out."""

    async def main(disk: MemoryDisk) -> None:
        one = await started(disk)
        await one.rl.draw()
        request, *_ = await send_all(one.world)
        await play(one.world, request)
        one.gym.ack_failures.append(Refused("busy"))
        assert await one.world.plane.keys(CAPTURE) == {}
        assert isinstance(await one.engine.save(), Saved)
        one.store.crash()
        again = Trainer(disk)
        restored = await again.engine.restore()
        assert restored.facts["controller"]["kept"] == ("p0_g0",)
        assert "p0_g0" not in again.gym.runs
        assert [ack.rollout_id for ack in again.rl.ledger.owed()] == ["p0_g0"]

    running(main)


def test_an_attempt_is_skipped_only_if_nothing_changed_since_one_that_was_published() -> None:
    async def main(disk: MemoryDisk) -> None:
        one = await started(disk)
        await one.rl.draw()
        one.store.faults.fail("seal", OSError("no space left"))
        assert isinstance(await one.engine.save(), Aborted)
        assert isinstance(await one.engine.save(), Saved), "the aborted one does not count"
        skipped = await one.engine.save()
        assert skipped == Skipped(SkipReason.NOTHING_CHANGED)
        await send_all(one.world)
        assert isinstance(await one.engine.save(), Saved)
        assert isinstance(await one.engine.save(), Saved), "turns may have finished in Gym"

    running(main)


def test_an_optimizer_commit_is_left_alone() -> None:
    async def main(disk: MemoryDisk) -> None:
        one = await started(disk)
        one.rl.committing = True
        assert (await one.engine.save()).reason is SkipReason.OPTIMIZER_COMMIT
        assert not one.rl.gate.closed

    running(main)


def test_silent_servers_get_nothing_until_they_have_confirmed() -> None:
    async def main(disk: MemoryDisk) -> None:
        one = await started(disk)
        await one.rl.draw()
        one.gym_part.silent = frozenset({"agent-1"})
        saved = await one.engine.save()
        assert saved.unreleased == {"gym": frozenset({"agent-1"})}
        assert one.rl.gate.lets("agent-0")
        assert not one.rl.gate.lets("agent-1")
        one.gym_part.silent = frozenset()
        await one.engine.save()
        assert one.rl.gate.lets("agent-1")

    running(main)


def test_a_failed_restore_puts_the_bookkeeping_back_and_stays_closed() -> None:
    async def main(disk: MemoryDisk) -> None:
        one = await started(disk)
        await one.rl.draw()
        await one.engine.save()
        one.store.crash()
        again = Trainer(disk)
        again.gym_part.refusal = "busy"
        with pytest.raises(RestoreFailed, match="busy"):
            await again.engine.restore()
        assert again.rl.ledger.entries() == ()
        assert again.rl.loader.drawn == 0
        assert again.rl.gate.closed
        again.gym_part.refusal = None
        restored = await again.engine.restore()
        assert restored.facts["controller"]["started_over"].keys() == {"p0_g0", "p0_g1"}
        assert again.rl.ledger.get("p0_g0").attempt_index == 1, "run n+1 again (R3)"

    running(main)


@pytest.mark.parametrize("name", ["ledger", "totals"])
def test_records_that_are_not_whole_are_rejected(name: str) -> None:
    class Half(Controller):
        async def cut(self, attempt: Attempt) -> Mapping[str, Any]:
            async with attempt.part() as part:
                part.document("index", {"records": {name: 2}, "counts": {}})
                part.records(name)({"rollout_id": "p0_g0"})
            return {}

    async def main(disk: MemoryDisk) -> None:
        one = Trainer(disk)
        one.engine = SnapshotEngine(EngineConfig(), one.store, [Half(one.rl, calls=())])
        await one.engine.restore(if_none="start")
        assert isinstance(await one.engine.save(), Saved)
        with pytest.raises(SnapshotRejected, match=f"{name}.jsonl"):
            await one.engine.restore()

    running(main)


def test_inspect_tells_where_every_prompt_was() -> None:
    async def main(disk: MemoryDisk) -> None:
        one = await started(disk)
        await one.rl.draw()
        await one.engine.save()
        formats = {part.name: part.format_version for part in one.engine.participants}
        topology = {part.name: {} for part in one.engine.participants}
        found = await one.store.newest(topology, formats, if_bad="raise")
        seen = Controller.inspect(found.part("controller"))
        assert seen["counts"]["reserved"] == 1
        assert seen["records"]["ledger"] == 2

    running(main)


# A step that becomes durable while an attempt is under way ends it.
EXPECTED = {AbortReason.TRAINER_MOVED, SkipReason.NOTHING_CHANGED, SkipReason.OPTIMIZER_COMMIT}


@pytest.mark.parametrize("crash_after", [1, 2, 3, 5, 8, 13])
def test_pumps_run_on_under_snapshots_and_after_a_crash(crash_after: int, tmp_path: Path) -> None:
    """Saves at any moment, a crash after one of them: every rollout is trained once."""

    async def life(disk: MemoryDisk, saves: int | None) -> None:
        one = Trainer(disk)
        one.gym.auto, one.gym.pace = True, 100
        train = TrainPump(one.rl, Anchors(tmp_path), groups_per_step=1)
        one.engine = one.new_engine(lambda: train.anchor)
        restored = await one.engine.restore(if_none="start")
        train.load(restored.anchor or BOOTSTRAP)
        pump = RolloutPump(one.rl, concurrency=3, max_open_groups=2, sleep=lambda _: settle(1))
        pumps = [asyncio.create_task(pump.run()), asyncio.create_task(train.run())]
        for _ in range(saves or 0):
            await settle(7)
            while one.rl.committing:
                await one.rl.bell.heard().wait()
            outcome = await one.engine.save()
            assert isinstance(outcome, Saved) or outcome.reason in EXPECTED, outcome
        if saves is not None:
            for task in pumps:
                task.cancel()
        ended = await asyncio.gather(*pumps, return_exceptions=True)
        assert not [error for error in ended if isinstance(error, Exception)]
        one.store.crash()

    async def main(disk: MemoryDisk) -> None:
        await life(disk, saves=crash_after)
        await life(disk, saves=2)
        await life(disk, saves=None)
        anchors = Anchors(tmp_path)
        trained = [name for step in anchors.steps() for name in anchors.read(step)["rows"]]
        assert sorted(trained) == [f"p{group}_g{number}" for group in range(4) for number in (0, 1)]

    running(main)


class Foreign:
    """A trainer with its own controller: five calls, nothing else."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rollouts = ["a"]

    def stop_dispatch(self) -> None:
        self.calls.append("stop")

    def open_dispatch(self, unavailable: frozenset[str]) -> None:
        self.calls.append("open")

    async def flush_acks(self, limit_s: float) -> int:
        self.calls.append("flush")
        return 0

    def state(self) -> RlCut:
        return RlCut({"rollouts": list(self.rollouts)})

    async def load(self, state: Records | None, found: Found | None) -> Loaded:
        self.calls.append("load")
        self.rollouts = list(state["rollouts"]) if state is not None else []
        return Loaded(decisions=tuple(f"{name}: continues" for name in self.rollouts))


def test_a_trainer_with_its_own_controller() -> None:
    async def main(disk: MemoryDisk) -> None:
        rl = Foreign()
        store = MemoryStore(disk)
        engine = SnapshotEngine(EngineConfig(), store, [Controller(rl, calls=())])
        await engine.restore(if_none="start")
        rl.rollouts = ["b", "c"]
        rl.calls.clear()
        assert isinstance(await engine.save(), Saved)
        assert rl.calls == ["stop", "flush", "open"]
        rl.rollouts = []
        restored = await engine.restore()
        assert restored.facts["controller"]["decisions"] == ("b: continues", "c: continues")
        assert rl.rollouts == ["b", "c"]
        assert rl.calls[-1] == "open"

    running(main)

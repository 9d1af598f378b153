"""The real engine with participants in memory, on virtual time: what each failure leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal

import pytest
from attrs import evolve

from fsm.config import EngineConfig
from fsm.engine import SnapshotEngine
from fsm.outcome import (
    Aborted,
    AbortReason,
    Anchor,
    InvariantError,
    NotReleased,
    Restored,
    Saved,
    Skipped,
    SkipReason,
    SnapshotRejected,
    Unresolved,
)
from fsm.participant import Attempt, Restore
from participants.memory import Fault, MemoryParticipant
from participants.virtual_time import run
from storage.memory import MemoryDisk, MemoryStore

CONFIG = EngineConfig(
    prepare_timeout_s=60, lease_s=30, renew_every_s=5, resume_timeout_s=10, hold_after_seal_s=20
)
HOOKS = ("prepare", "drain", "commit")


class World:
    """A controller that calls Gym, Gym that calls the data plane; a disk that outlives them."""

    def __init__(self, config: EngineConfig = CONFIG, disk: MemoryDisk | None = None) -> None:
        self.controller = MemoryParticipant("controller", calls={"gym"})
        self.gym = MemoryParticipant("gym")
        self.data_plane = MemoryParticipant(
            "data_plane", called_by={"gym"}, restore_step="load_data_plane"
        )
        self.store = MemoryStore(disk)
        self.engine = SnapshotEngine(config, self.store, self.everyone)

    @property
    def everyone(self) -> list[MemoryParticipant]:
        return [self.controller, self.gym, self.data_plane]

    def snapshots(self) -> list[str]:
        return sorted(self.store.disk.snapshots)

    def assert_all_run(self) -> None:
        assert [one.name for one in self.everyone if one.is_held] == []

    def assert_nothing_left(self) -> None:
        assert self.store.disk.drafts == {}


def order(everyone: Iterable[MemoryParticipant], hook: str) -> list[str]:
    calls = [(at, i, one.name) for i, one in enumerate(everyone) for h, at in one.log if h == hook]
    return [name for _, _, name in sorted(calls)]


def test_a_save_publishes_what_everyone_held_and_lets_everyone_go() -> None:
    async def main() -> None:
        world = World()
        world.gym.work("turn 1")
        outcome = await world.engine.save()
        assert isinstance(outcome, Saved)
        assert world.snapshots() == [outcome.snapshot]
        assert outcome.durable
        assert outcome.facts["gym"] == {"items": 1}
        assert list(outcome.phases) == [
            "pause", "prepare", "drain", "commit", "cut", "seal", "publish", "resume",
        ]  # fmt: skip
        world.assert_all_run()
        world.assert_nothing_left()

    run(main())


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("who", ["controller", "gym", "data_plane"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.refuse("busy"), AbortReason.REFUSED),
        (Fault.fail(), AbortReason.IO_ERROR),
        (Fault.hang(), AbortReason.TIMEOUT),
        (Fault.lost(), AbortReason.UNAVAILABLE),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_every_failure_before_publish_aborts(
    hook: str, who: str, fault: Fault, reason: AbortReason
) -> None:
    """S1, S6: whoever fails, however, in whichever step: aborted, nothing published, all run."""

    async def main() -> None:
        world = World()
        getattr(world, who).fault(hook, fault)
        outcome = await world.engine.save()
        assert isinstance(outcome, Aborted)
        assert outcome.reason is reason
        assert outcome.cause.step == hook
        assert outcome.unreleased == {}
        assert world.snapshots() == []
        world.assert_all_run()
        world.assert_nothing_left()
        assert isinstance(await world.engine.save(), Saved), "the next attempt succeeds"

    run(main())


@pytest.mark.parametrize("hook", HOOKS)
def test_a_bug_is_raised_after_everyone_was_released(hook: str) -> None:
    """S9."""

    async def main() -> None:
        world = World()
        world.gym.fault(hook, Fault.bug())
        with pytest.raises(InvariantError, match="ZeroDivisionError"):
            await world.engine.save()
        world.assert_all_run()
        world.assert_nothing_left()

    run(main())


@pytest.mark.parametrize("hook", HOOKS)
def test_cancellation_from_outside_aborts_and_is_passed_on(hook: str) -> None:
    async def main() -> None:
        world = World()
        world.gym.fault(hook, Fault.hang())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await world.engine.save()
        world.assert_all_run()
        world.assert_nothing_left()

    run(main())


def test_a_task_group_failure_cancels_a_save() -> None:
    async def main() -> None:
        world = World()
        world.gym.fault("drain", Fault.hang())

        async def fails() -> None:
            await asyncio.sleep(1)
            raise KeyError("a sibling")

        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            async with asyncio.TaskGroup() as group:
                group.create_task(world.engine.save())
                group.create_task(fails())
        world.assert_all_run()
        world.assert_nothing_left()

    run(main())


def test_a_cancellation_during_publish_waits_for_the_outcome() -> None:
    """S2: shielded; the caller is cancelled only after everyone was released."""

    async def main() -> None:
        world = World()
        publish = world.store.faults.next_publish(held=True)
        save = asyncio.create_task(world.engine.save())
        await publish.reached.wait()
        save.cancel()
        await asyncio.sleep(1)
        assert not save.done()
        publish.release()
        with pytest.raises(asyncio.CancelledError):
            await save
        assert len(world.snapshots()) == 1
        world.assert_all_run()

    run(main())


def test_a_lapsed_hold_aborts() -> None:
    """S4: the server restarted in between; its renewal says so."""

    async def main() -> None:
        world = World()
        world.data_plane.fault("drain", Fault.late(12))
        save = asyncio.create_task(world.engine.save())
        await asyncio.sleep(1)
        world.gym.crash()
        outcome = await save
        assert isinstance(outcome, Aborted)
        assert outcome.reason is AbortReason.HOLD_LOST
        assert world.snapshots() == []
        world.assert_all_run()

    run(main())


def test_something_that_moves_after_its_commit_aborts() -> None:
    """S4: the check after the cut."""

    async def main() -> None:
        world = World()
        world.data_plane.fault("commit", Fault.late(2))
        save = asyncio.create_task(world.engine.save())
        await asyncio.sleep(1)
        world.gym.move("a late row")
        outcome = await save
        assert isinstance(outcome, Aborted)
        assert outcome.reason is AbortReason.HOLD_LOST
        assert world.snapshots() == []

    run(main())


def test_leases_outlast_a_long_drain() -> None:
    async def main() -> None:
        world = World()
        world.gym.fault("drain", Fault.late(55))
        assert isinstance(await world.engine.save(), Saved)

    run(main())


def test_order_is_callers_first_to_stop_and_callees_first_to_open() -> None:
    """S5."""

    async def main() -> None:
        world = World()
        for one in world.everyone:
            one.fault("prepare", Fault.late(1))
            one.fault("resume", Fault.late(1))
        await world.engine.save()
        assert order(world.everyone, "prepare") == ["controller", "gym", "data_plane"]
        assert order(world.everyone, "resume") == ["data_plane", "gym", "controller"]

    run(main())


@pytest.mark.parametrize("release_at", ["publish", "cut"])
def test_silent_ranks_do_not_keep_dispatch_closed(release_at: Literal["publish", "cut"]) -> None:
    """S6: a round is shared by the ranks. The controller is the last one, and has no lease."""

    async def main() -> None:
        world = World(evolve(CONFIG, resume_attempts=1, release_at=release_at))
        for one in (world.gym, world.data_plane):
            one.fault("resume", Fault.hang())
        outcome = await world.engine.save()
        assert isinstance(outcome, Saved)
        assert outcome.unreleased.keys() == {"gym", "data_plane"}
        assert not world.controller.is_held
        assert isinstance(await world.engine.save(), Saved), "preflight releases the others"

    run(main())


def test_a_release_knows_how_long_it_may_take() -> None:
    """A hook that is cut off cannot say who of its own is silent, so it must see its own limit:
    also in the release that preflight repeats, long after the step's own deadline."""
    limits: list[float] = []

    class Slow(MemoryParticipant):
        async def resume(self, attempt: Attempt | Restore) -> None:
            limits.append(attempt.remaining_s())
            await asyncio.sleep(attempt.remaining_s() - 0.5)
            raise NotReleased(frozenset({"server-3"}))

    async def main() -> None:
        config = evolve(CONFIG, resume_attempts=2)
        engine = SnapshotEngine(config, MemoryStore(), [Slow("gym")])
        outcome = await engine.save()
        assert isinstance(outcome, Saved)
        assert outcome.unreleased == {"gym": frozenset({"server-3"})}
        await asyncio.sleep(1000)
        skipped = await engine.save()
        assert skipped == Skipped(SkipReason.RELEASE_PENDING, "server-3")
        assert limits == [pytest.approx(config.resume_timeout_s)] * 3

    run(main())


def test_publish_that_never_answers_releases_rollouts_and_later_resolves() -> None:
    """S2: the hold has a deadline, the rename has not."""

    async def main() -> None:
        world = World()
        publish = world.store.faults.next_publish(held=True)
        outcome = await world.engine.save()
        assert isinstance(outcome, Unresolved)
        world.assert_all_run()
        assert await world.engine.save() == Skipped(SkipReason.PUBLISH_UNRESOLVED)
        publish.release()
        await asyncio.sleep(1)
        assert world.snapshots() == [outcome.snapshot]
        assert isinstance(await world.engine.save(), Saved)

    run(main())


def test_a_claimed_folder_is_not_published() -> None:
    async def main() -> None:
        world = World()
        world.store.faults.next_publish(published=False)
        outcome = await world.engine.save()
        assert isinstance(outcome, Aborted)
        assert outcome.reason is AbortReason.NOT_PUBLISHED
        assert world.snapshots() == []
        world.assert_all_run()
        world.assert_nothing_left()

    run(main())


def test_a_release_that_reaches_nobody_is_pending_and_retried_first() -> None:
    async def main() -> None:
        world = World()
        world.gym.fault("resume", *[Fault.refuse("away")] * (CONFIG.resume_attempts + 1))
        outcome = await world.engine.save()
        assert isinstance(outcome, Saved)
        assert outcome.unreleased == {"gym": frozenset({"gym"})}
        again = await world.engine.save()
        assert again == Skipped(SkipReason.RELEASE_PENDING, "gym")
        assert isinstance(await world.engine.save(), Saved), "the retry reached it"

    run(main())


def test_skips_are_decided_before_anybody_is_told() -> None:
    """S7."""

    async def main() -> None:
        world = World()
        with world.engine.hold_off("optimizer_commit"):
            assert await world.engine.save() == Skipped(
                SkipReason.OPTIMIZER_COMMIT, "optimizer_commit"
            )
        with world.engine.hold_off("evaluation"):
            assert await world.engine.save() == Skipped(SkipReason.HELD_OFF, "evaluation")
        world.store.faults.fail("begin", OSError(28, "No space left on device"))
        skipped = await world.engine.save()
        assert isinstance(skipped, Skipped)
        assert skipped.reason is SkipReason.NO_ROOM
        assert [one.hooks() for one in world.everyone] == [[], [], []]

    run(main())


def test_a_second_save_meanwhile_is_skipped() -> None:
    """S8."""

    async def main() -> None:
        world = World()
        world.gym.fault("drain", Fault.late(5))
        first = asyncio.create_task(world.engine.save())
        await asyncio.sleep(1)
        assert await world.engine.save() == Skipped(SkipReason.ATTEMPT_IN_PROGRESS)
        assert isinstance(await first, Saved)

    run(main())


def test_a_trainer_that_moves_on_aborts_the_attempt_at_the_cut() -> None:
    async def main() -> None:
        world = World()
        step = [Anchor(1, "one")]
        engine = SnapshotEngine(CONFIG, world.store, world.everyone, anchor=lambda: step[0])
        world.gym.fault("drain", Fault.late(5))
        save = asyncio.create_task(engine.save())
        await asyncio.sleep(1)
        step[0] = Anchor(2, "two")
        outcome = await save
        assert isinstance(outcome, Aborted)
        assert outcome.reason is AbortReason.TRAINER_MOVED
        world.assert_all_run()
        saved = await engine.save()
        assert isinstance(saved, Saved)

    run(main())


def test_no_anchor_no_snapshot() -> None:
    async def main() -> None:
        world = World()
        engine = SnapshotEngine(CONFIG, world.store, world.everyone, anchor=lambda: None)
        assert await engine.save() == Skipped(SkipReason.NO_TRAINER_ANCHOR)

    run(main())


def test_a_cut_that_outlives_its_deadline_keeps_later_attempts_away() -> None:
    """S3: a thread cannot be stopped; the barrier is let go and attempts wait for its end."""

    async def main() -> None:
        world = World(EngineConfig(cut_timeout_s=5))
        ended = asyncio.get_running_loop().create_future()

        class Stuck(MemoryParticipant):
            async def cut(self, attempt: object) -> None:
                # What `in_thread` keeps of a thread that goes on: a future nobody can cancel.
                operation = attempt._operation  # type: ignore[attr-defined]
                operation.threads.add(ended)
                await asyncio.shield(ended)

        engine = SnapshotEngine(world.engine.config, world.store, [Stuck("data_plane")])
        outcome = await engine.save()
        assert isinstance(outcome, Aborted)
        assert outcome.reason is AbortReason.TIMEOUT
        assert await engine.save() == Skipped(SkipReason.PREVIOUS_CUT_RUNNING)
        ended.set_result(None)
        await asyncio.sleep(0)
        assert (await engine.save()) != Skipped(SkipReason.PREVIOUS_CUT_RUNNING)

    run(main())


def test_release_at_cut_lets_go_before_sealing() -> None:
    """S10."""

    async def main() -> None:
        world = World(EngineConfig(release_at="cut"))
        publish = world.store.faults.next_publish(held=True)
        save = asyncio.create_task(world.engine.save())
        await publish.reached.wait()
        world.assert_all_run()
        publish.release()
        outcome = await save
        assert isinstance(outcome, Saved)
        assert list(outcome.phases)[-3:] == ["resume", "seal", "publish"]

        world.store.faults.fail("seal", OSError(5, "Input/output error"))
        outcome = await world.engine.save()
        assert isinstance(outcome, Aborted)
        assert outcome.reason is AbortReason.IO_ERROR
        world.assert_nothing_left()

    run(main())


# -- restore -----------------------------------------------------------------------------------


async def saved_world(items: dict[str, list[str]]) -> World:
    world = World()
    for name, work in items.items():
        for item in work:
            getattr(world, name).work(item)
    assert isinstance(await world.engine.save(), Saved)
    return world


def test_restore_gives_back_what_was_saved() -> None:
    async def main() -> None:
        old = await saved_world({"gym": ["turn 1", "turn 2"], "data_plane": ["row"]})
        old.gym.work("turn 3, after the snapshot")
        old.store.crash()
        new = World(disk=old.store.disk)
        restored = await new.engine.restore()
        assert isinstance(restored, Restored)
        assert restored.snapshot == old.snapshots()[0]
        assert new.gym.items == ["turn 1", "turn 2"]
        assert new.data_plane.items == ["row"]
        new.assert_all_run()

    run(main())


@pytest.mark.parametrize("who", ["controller", "gym", "data_plane"])
@pytest.mark.parametrize("hook", ["fence", "restore"])
@pytest.mark.parametrize(
    "fault", [Fault.refuse(), Fault.hang(), Fault.lost()], ids=lambda f: f.kind
)
def test_a_restore_that_fails_activates_nothing(who: str, hook: str, fault: Fault) -> None:
    """R1, R5: all or nothing, and the next restore gives the same state."""

    async def main() -> None:
        old = await saved_world({"gym": ["turn 1"], "data_plane": ["row"]})
        old.store.crash()
        new = World(disk=old.store.disk)
        for one in new.everyone:
            one.work("what lived before")
        getattr(new, who).fault(hook, fault)
        with pytest.raises(Exception, match="rolled back"):
            await new.engine.restore()
        assert [one.items for one in new.everyone] == [["what lived before"]] * 3
        assert [one.staged for one in new.everyone] == [None] * 3
        new.assert_all_run()
        await new.engine.restore()
        assert new.gym.items == ["turn 1"]
        assert new.data_plane.items == ["row"]

    run(main())


def test_a_damaged_snapshot_is_refused_by_name_and_the_older_one_is_a_choice() -> None:
    """R2."""

    async def main() -> None:
        old = await saved_world({"gym": ["turn 1"]})
        old.gym.work("turn 2")
        assert isinstance(await old.engine.save(), Saved)
        first, second = old.snapshots()
        old.store.disk.flip(second, "gym/items.jsonl")
        old.store.crash()
        new = World(disk=old.store.disk)
        with pytest.raises(SnapshotRejected, match=r"gym/items\.jsonl"):
            await new.engine.restore()
        assert new.gym.items == []
        restored = await new.engine.restore(if_bad="older")
        assert restored.snapshot == first
        assert new.gym.items == ["turn 1"]

    run(main())


def test_nothing_to_restore_is_an_explicit_choice() -> None:
    async def main() -> None:
        world = World()
        with pytest.raises(SnapshotRejected, match='if_none="start"'):
            await world.engine.restore()
        restored = await world.engine.restore(if_none="start")
        assert restored.snapshot is None
        assert restored.anchor is None
        world.assert_all_run()

    run(main())

"""Do the tests bite? Ten bugs are planted one at a time; each is found by a named check.

A check is a small deterministic scenario: it passes on the healthy engine and fails on the planted
one. Those plants that the machine of `test_engine_machine.py` finds within seconds are listed, and
found by it again; it finds others too, with more examples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from attrs import evolve
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fsm.engine import SnapshotEngine
from fsm.operation import HookFailed, Operation
from fsm.outcome import Aborted, AbortReason, RestoreFailed, Saved
from fsm.participant import hook_of
from fsm.release import Release
from fsm.restore_steps import Restoring
from fsm.run import Run
from fsm.save_steps import Saving
from fsm.storing import Fence, Publication
from participants.memory import Fault, MemoryParticipant
from participants.virtual_time import run
from storage.memory import MemoryStore
from tests.model.test_engine_machine import EngineMachine
from tests.world import CONFIG, World

Plant = Callable[[pytest.MonkeyPatch], None]


# -- the bugs ------------------------------------------------------------------------------------


def abort_before_cancel_finished(patch: pytest.MonkeyPatch) -> None:
    async def end(self: Run, step: str, task: asyncio.Task[None]) -> None:
        if step in self._steps.unstoppable and not task.done():
            self._steps.left_behind(step, task)
        else:
            task.cancel()  # and no waiting for it

    patch.setattr(Run, "_end", end)


def barrier_kept_during_release(patch: pytest.MonkeyPatch) -> None:
    cut, release = Saving.cut, Saving.release

    async def keeps(self: Saving) -> None:
        try:
            await cut(self)
        except BaseException:
            self.kept = self.setting.barrier()  # type: ignore[attr-defined,misc]
            await self.kept.__aenter__()  # type: ignore[attr-defined]
            raise

    async def gives_back(self: Saving) -> None:
        await release(self)
        if hasattr(self, "kept"):
            await self.kept.__aexit__(None, None, None)

    patch.setattr(Saving, "cut", keeps)
    patch.setattr(Saving, "release", gives_back)


def not_published_decided_by_a_look(patch: pytest.MonkeyPatch) -> None:
    publish = MemoryStore.publish

    async def looks(self: MemoryStore, draft: Any) -> Publication:
        trying = asyncio.ensure_future(publish(self, draft))
        await asyncio.wait({trying}, timeout=1.0)
        return trying.result() if trying.done() else Publication(draft.id in self.disk.snapshots)

    patch.setattr(MemoryStore, "publish", looks)


def told_after_sent(patch: pytest.MonkeyPatch) -> None:
    call = Operation.call

    async def late(self: Operation, one: Any, name: str, seen: Any, *, tell: bool = False) -> Any:
        answer = await call(self, one, name, seen)
        if tell and hook_of(one, name) is not None:
            self.told.setdefault(one.name, one)
        return answer

    patch.setattr(Operation, "call", late)


def epoch_not_checked(patch: pytest.MonkeyPatch) -> None:
    take = Run._take

    def takes(self: Run, event: Any, step: str) -> bool:
        return take(self, evolve(event, epoch=None), step)

    patch.setattr(Run, "_take", takes)


def resume_order_reversed(patch: pytest.MonkeyPatch) -> None:
    one_round = Release.one_round

    async def reversed_round(self: Release) -> bool:
        self.operation.ranks.reverse()
        try:
            return await one_round(self)
        finally:
            self.operation.ranks.reverse()

    patch.setattr(Release, "one_round", reversed_round)


def dispatch_opened_before_gym_confirms(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: Release) -> bool:
        told = self.operation.told.values()
        await asyncio.gather(*(self._one(one, frozenset()) for one in told))
        return not self.operation.unreleased

    patch.setattr(Release, "one_round", at_once)


def hold_not_checked_after_the_cut(patch: pytest.MonkeyPatch) -> None:
    cut = Saving.cut

    async def unchecked(self: Saving) -> None:
        async def fine() -> None: ...

        self.renewal.check = fine  # type: ignore[method-assign]
        try:
            await cut(self)
        finally:
            del self.renewal.check

    patch.setattr(Saving, "cut", unchecked)


def abort_of_a_restore_activates(patch: pytest.MonkeyPatch) -> None:
    async def activates(self: Restoring) -> None:
        await self.renewal.stop()
        await self.activation.rounds(self.setting.config.resume_attempts)

    patch.setattr(Restoring, "rollback", activates)


def late_prepare_accepted_after_its_abort(patch: pytest.MonkeyPatch) -> None:
    close = MemoryParticipant._close

    def forgets(self: MemoryParticipant, fence: Fence) -> None:
        before = self.closed_fence
        close(self, fence)
        self.closed_fence = before

    patch.setattr(MemoryParticipant, "_close", forgets)


# -- the checks ----------------------------------------------------------------------------------


async def an_abort_waits_until_what_it_undoes_has_ended() -> None:
    """S6."""
    world = World()
    world.stations["controller"].fault("commit", Fault.late(5))
    save = asyncio.ensure_future(world.engine.save())
    await asyncio.sleep(1)
    save.cancel()
    await asyncio.wait({save})
    assert world.witness.broken == []


async def a_failing_cut_lets_the_barrier_go_before_it_releases() -> None:
    """S3: a server that answers its release slowly does not stop the data plane."""
    world = World()
    world.stations["controller"].fault("cut", Fault.refuse())
    world.stations["gym"].fault("resume", Fault.late(5))
    outcome = await world.engine.save()
    assert isinstance(outcome, Aborted)
    assert world.witness.broken == []


async def what_ended_aborted_is_never_published() -> None:
    """S2: the rename was only late."""
    world = World()
    publish = world.controller.memory.faults.next_publish(held=True)
    world.stations["gym"].fault("resume", Fault.late(5))
    save = asyncio.ensure_future(world.engine.save())
    await asyncio.sleep(3)
    publish.release()
    outcome = await save
    await asyncio.sleep(1)
    assert isinstance(outcome, Saved) == bool(world.snapshots())


async def whoever_may_have_heard_is_released() -> None:
    """S6: it is held although its answer was lost."""
    server = MemoryParticipant("server")
    server.fault("prepare", Fault.lost())
    outcome = await SnapshotEngine(CONFIG, MemoryStore(), [server]).save()
    assert isinstance(outcome, Aborted)
    assert not server.is_held


async def an_answer_that_comes_too_late_moves_nothing() -> None:
    """A seal that succeeds although it was cancelled is not the success of the abort."""
    world = World()
    seal = world.controller.memory.seal

    async def seals_all_the_same(draft: Any, body: Any) -> None:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            await seal(draft, body)

    world.controller.memory.seal = seals_all_the_same  # type: ignore[method-assign]
    save = asyncio.ensure_future(world.engine.save())
    await asyncio.sleep(1)
    save.cancel()
    await asyncio.wait({save})
    assert world.held() == []


async def callees_open_before_their_callers() -> None:
    """S5."""
    world = World()
    assert isinstance(await world.engine.save(), Saved)
    assert world.witness.broken == []


async def dispatch_waits_for_a_slow_gym() -> None:
    """S5, S6: work that is sent to a server which still refuses it is lost."""
    world = World()
    world.stations["gym"].fault("resume", Fault.late(5))
    assert isinstance(await world.engine.save(), Saved)
    assert world.witness.broken == []


async def what_moves_between_two_commits_is_not_published() -> None:
    """S4: the parts would not describe one instant."""
    world = World()
    world.stations["data_plane"].fault("commit", Fault.late(2))
    save = asyncio.ensure_future(world.engine.save())
    await asyncio.sleep(1)
    world.move("gym", "a late row")
    outcome = await save
    assert isinstance(outcome, Aborted)
    assert outcome.reason is AbortReason.HOLD_LOST
    assert [world.problems_of(snapshot) for snapshot in world.snapshots()] == []


async def a_failed_restore_leaves_everything_as_it_was() -> None:
    """R1."""
    world = World()
    world.work("gym", "saved")
    assert isinstance(await world.engine.save(), Saved)
    world.work("gym", "since")
    world.stations["controller"].fault("restore", Fault.refuse())
    with pytest.raises(RestoreFailed, match="rolled back"):
        await world.engine.restore()
    assert world.stations["gym"].items == ["saved", "since"]


async def a_prepare_that_its_abort_overtook_holds_nobody() -> None:
    """H1: the abort has fenced it."""
    world = World()
    world.stations["gym"].fault("prepare", Fault.late(CONFIG.prepare_timeout_s + 5))
    outcome = await world.engine.save()
    assert isinstance(outcome, Aborted)
    await asyncio.sleep(6)
    assert world.held() == []


PLANTS: list[tuple[Plant, Callable[[], Awaitable[None]]]] = [
    (abort_before_cancel_finished, an_abort_waits_until_what_it_undoes_has_ended),
    (barrier_kept_during_release, a_failing_cut_lets_the_barrier_go_before_it_releases),
    (not_published_decided_by_a_look, what_ended_aborted_is_never_published),
    (told_after_sent, whoever_may_have_heard_is_released),
    (epoch_not_checked, an_answer_that_comes_too_late_moves_nothing),
    (resume_order_reversed, callees_open_before_their_callers),
    (dispatch_opened_before_gym_confirms, dispatch_waits_for_a_slow_gym),
    (hold_not_checked_after_the_cut, what_moves_between_two_commits_is_not_published),
    (abort_of_a_restore_activates, a_failed_restore_leaves_everything_as_it_was),
    (late_prepare_accepted_after_its_abort, a_prepare_that_its_abort_overtook_holds_nobody),
]


def found_by(check: Callable[[], Awaitable[None]]) -> str | None:
    """What the check says about the engine as it is now: None for nothing."""
    try:
        run(check())  # type: ignore[arg-type]
    except (AssertionError, pytest.fail.Exception) as error:
        return str(error) or type(error).__name__
    return None


@pytest.mark.parametrize(("plant", "check"), PLANTS, ids=lambda value: value.__name__)
def test_each_planted_bug_is_found(
    plant: Plant,
    check: Callable[[], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    traces: list[str],
) -> None:
    assert found_by(check) is None, "the healthy engine passes"
    assert traces == []
    plant(monkeypatch)
    assert found_by(check) is not None, f"{plant.__name__} was not found by {check.__name__}"
    traces.clear()  # what the planted engine did is not this test's concern


FOUND_BY_THE_MACHINE = [
    abort_before_cancel_finished,
    barrier_kept_during_release,
    resume_order_reversed,
    dispatch_opened_before_gym_confirms,
    abort_of_a_restore_activates,
]


@pytest.mark.parametrize("plant", FOUND_BY_THE_MACHINE, ids=lambda one: one.__name__)
def test_the_machine_finds_it_too(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, traces: list[str]
) -> None:
    plant(monkeypatch)
    quickly = settings(max_examples=400, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(BaseException) as found:  # noqa: PT011  whatever the oracle says
        run_state_machine_as_test(EngineMachine, settings=quickly)
    assert not isinstance(found.value, HookFailed)
    traces.clear()

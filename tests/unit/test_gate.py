"""The hold of one server: fences, repeated messages, leases, releases (H1 to H4)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from attrs import evolve

from fsm import hold
from fsm.hold import EVENTS, HOLD
from fsm.machine import IllegalEvent, Machine
from fsm.outcome import Refused
from participants.gym import wire
from participants.gym.servers.gate import Gate
from participants.gym.servers.parts import Export
from tests.gym_world import (
    TIMED,
    commit,
    drain,
    fence,
    folder_of,
    lines,
    prepare,
    release,
    stage,
    until,
)  # fmt: skip


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Any] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Any) -> FakeTimer:
        timer = FakeTimer(when, callback)
        self.timers.append(timer)
        return timer

    def pass_time(self, seconds: float, *, fire: bool = True) -> None:
        self.now += seconds
        for timer in self.timers if fire else ():
            if timer.live and timer.when <= self.now:
                timer.live = False
                timer.callback()


class FakeTimer:
    def __init__(self, when: float, callback: Any) -> None:
        self.when, self.callback, self.live = when, callback, True

    def cancel(self) -> None:
        self.live = False


class FakePart:
    kind: wire.Kind = "agent"
    name = "agent0"

    def __init__(self) -> None:
        self.moving: list[str] = []
        self.live = 0
        self.exports = 0
        self.did: list[Any] = []
        self.rows: Any = [{"a": 1}]

    def begin(self) -> None:
        self.did.append("begin")

    def freeze(self) -> None:
        self.did.append("freeze")

    def blockers(self) -> list[str]:
        return list(self.moving)

    def give_up(self) -> None:
        self.did.append("give_up")
        self.moving = []

    def export(self, commit: wire.Commit) -> Export:
        self.exports += 1
        return Export({"rows": self.rows}, wire.Report(phase="", counts={"rows": 1}))

    def check(self, read: Any) -> Any:
        return list(read("rows"))

    def stage(self, checked: Any) -> wire.Report:
        self.did.append(("stage", checked))
        return wire.Report(phase="")

    def activate(self, incarnation: int) -> None:
        self.did.append(("activate", incarnation))

    def drop(self) -> None:
        self.did.append("drop")

    def discard(self, rollouts: tuple[str, ...]) -> None:
        self.did.append(("discard", rollouts))

    def live_runs(self) -> int:
        return self.live


class Rig:
    def __init__(self, root: Any) -> None:
        self.root, self.part, self.clock = root, FakePart(), FakeClock()
        self.gate = Gate(self.part, root, clock=self.clock)

    async def to(self, state: str, by: Any = None) -> Any:
        """Bring an open gate into `state` with the fence `by`."""
        by = by or fence(1)
        if state in (hold.CLOSING, hold.HELD, hold.COMMITTED):
            await self.gate.prepare(prepare(by))
        if state in (hold.FENCING, hold.FENCED, hold.STAGED):
            await self.gate.fence_off(fence_off(by))
        if state in (hold.HELD, hold.COMMITTED, hold.FENCED, hold.STAGED):
            await self.gate.drain(drain(by))
        if state == hold.COMMITTED:
            (self.root / folder_of(by)).mkdir()
            await self.gate.commit(commit(by))
        if state == hold.STAGED:
            await self.gate.stage(stage(by, "", ()))
        assert self.gate.phase == state
        return by


def fence_off(by: Any, **options: Any) -> wire.FenceOff:
    return wire.FenceOff(fence=by, **{"lease_s": 60.0, **TIMED, **options})


async def refused(work: Any) -> str:
    with pytest.raises(Refused) as caught:
        await work
    return caught.value.code


STATES = list(HOLD.states)
CLOSED = [state for state in STATES if state != hold.OPEN]
SAVE = (hold.CLOSING, hold.HELD, hold.COMMITTED)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_full_product_of_the_table(state, event):
    machine = Machine(HOLD)
    machine._model.state = state
    expected = HOLD.next(state, event)
    if expected is None:
        with pytest.raises(IllegalEvent):
            machine.fire(event)
        assert machine.state == state
    else:
        assert machine.fire(event).target == machine.state == expected


OPERATIONS = {
    hold.PREPARE: lambda gate, by: gate.prepare(prepare(by)),
    hold.COMMIT: lambda gate, by: gate.commit(commit(by)),
    hold.FENCE: lambda gate, by: gate.fence_off(fence_off(by)),
    hold.STAGE: lambda gate, by: gate.stage(stage(by, "", ())),
    hold.RESUME: lambda gate, by: gate.resume(release(by)),
    hold.ROLLBACK: lambda gate, by: gate.rollback(release(by)),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", OPERATIONS)
def test_full_product_of_the_operations(tmp_path, state, event):
    """Every operation in every state: the table's row, or refused with nothing changed; an
    operation that was done already gives its recorded answer (H2)."""

    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(state)
        (tmp_path / folder_of(by)).mkdir(exist_ok=True)
        expected, did = HOLD.next(state, event), list(rig.part.did)
        done_before = {
            hold.PREPARE: state in SAVE,
            hold.FENCE: state in CLOSED and state not in SAVE,
            hold.COMMIT: state == hold.COMMITTED,
            hold.STAGE: state == hold.STAGED,
        }
        if done_before.get(event):
            await OPERATIONS[event](rig.gate, by)
            expected = state
        elif expected is None:
            assert await refused(OPERATIONS[event](rig.gate, by)) == wire.INVALID_PHASE
            assert rig.part.did == did
            expected = state
        else:
            assert (await OPERATIONS[event](rig.gate, by)).phase == expected
        assert rig.gate.phase == expected

    asyncio.run(main())


# -- H1 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", CLOSED)
def test_a_newer_fence_ends_the_older_hold_from_any_state(tmp_path, state):
    async def main():
        rig = Rig(tmp_path)
        old = await rig.to(state)
        assert (await rig.gate.prepare(prepare(fence(2)))).phase == hold.CLOSING
        assert ("drop" in rig.part.did) == (state not in SAVE)
        assert not any(isinstance(did, tuple) and did[0] == "activate" for did in rig.part.did)
        for operation in OPERATIONS.values():
            assert await refused(operation(rig.gate, old)) == wire.STALE_FENCE
        assert await refused(rig.gate.renew(wire.Renew(fence=old, lease_s=60, **TIMED))) == (
            wire.STALE_FENCE
        )
        assert (rig.gate.phase, rig.gate.fence) == (hold.CLOSING, fence(2))

    asyncio.run(main())


def test_an_abort_that_overtakes_its_prepare_fences_it(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        assert (await rig.gate.resume(release(fence(1)))).phase == hold.OPEN
        assert await refused(rig.gate.prepare(prepare(fence(1)))) == wire.STALE_FENCE
        assert rig.gate.phase == hold.OPEN
        assert (await rig.gate.prepare(prepare(fence(2)))).phase == hold.CLOSING

    asyncio.run(main())


def test_late_repeats_change_nothing(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.COMMITTED)
        await rig.gate.resume(release(by))
        assert (await rig.gate.resume(release(by))).phase == hold.OPEN  # the recorded answer
        for event in (hold.PREPARE, hold.COMMIT, hold.FENCE, hold.STAGE):
            assert await refused(OPERATIONS[event](rig.gate, by)) == wire.STALE_FENCE
        assert await refused(rig.gate.drain(drain(by))) == wire.STALE_FENCE
        assert rig.gate.phase == hold.OPEN
        assert rig.part.exports == 1

    asyncio.run(main())


def test_an_older_incarnation_is_stale_whatever_its_sequence(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        await rig.to(hold.HELD, fence(1, incarnation=2))
        assert await refused(rig.gate.prepare(prepare(fence(99, incarnation=1)))) == (
            wire.STALE_FENCE
        )

    asyncio.run(main())


def test_another_root_needs_an_empty_server_or_take_over(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        rig.part.live = 1
        await rig.to(hold.HELD)
        other = fence(1, root="other")
        for work in (rig.gate.prepare(prepare(other)), rig.gate.fence_off(fence_off(other))):
            assert await refused(work) == wire.FOREIGN_ROOT
        assert (rig.gate.phase, rig.gate.fence) == (hold.HELD, fence(1))
        taken = await rig.gate.fence_off(fence_off(other, take_over=True))
        assert (taken.phase, taken.fence) == (hold.FENCING, other)

        empty = Rig(tmp_path)
        await empty.to(hold.CLOSING)
        assert (await empty.gate.prepare(prepare(other))).fence == other

    asyncio.run(main())


# -- H2 ---------------------------------------------------------------------------------------


def test_same_arguments_give_the_running_answer_others_conflict(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.HELD)
        (tmp_path / folder_of(by)).mkdir()
        first = asyncio.create_task(rig.gate.commit(commit(by)))
        second = asyncio.create_task(rig.gate.commit(evolve(commit(by), timeout_s=1.0)))
        assert await first == await second == await rig.gate.commit(commit(by))
        assert rig.part.exports == 1
        other = evolve(commit(by), folder="tmp_000001-000009_abcdef01")
        assert await refused(rig.gate.commit(other)) == wire.CONFLICT
        assert await refused(rig.gate.prepare(prepare(by, lease_s=1.0))) == wire.CONFLICT

    asyncio.run(main())


def test_an_answer_survives_the_caller_that_went_away(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.HELD)
        (tmp_path / folder_of(by)).mkdir()
        caller = asyncio.create_task(rig.gate.commit(commit(by)))
        await until(lambda: rig.part.exports)
        caller.cancel()
        assert (await rig.gate.commit(commit(by))).phase == hold.COMMITTED
        assert rig.part.exports == 1

    asyncio.run(main())


def test_a_failed_commit_is_not_an_answer(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.HELD)
        with pytest.raises(OSError, match="No such file"):  # a discarded folder never comes back
            await rig.gate.commit(commit(by))
        assert rig.gate.phase == hold.HELD
        bad = evolve(commit(by), folder="../elsewhere")
        assert await refused(rig.gate.commit(bad)) == wire.BAD_REQUEST

    asyncio.run(main())


# -- H3 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", CLOSED)
def test_a_hold_that_nobody_renews_ends_by_itself(tmp_path, state):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(state)
        rig.clock.pass_time(59.0)
        await rig.gate.renew(wire.Renew(fence=by, lease_s=60, **TIMED))
        rig.clock.pass_time(59.0)
        assert rig.gate.phase == state
        rig.clock.pass_time(1.0)
        assert rig.gate.phase == hold.OPEN
        for event in (hold.PREPARE, hold.COMMIT, hold.STAGE):
            assert await refused(OPERATIONS[event](rig.gate, by)) == wire.LEASE_EXPIRED
        if state in SAVE:
            assert (await rig.gate.resume(release(by))).phase == hold.OPEN
        else:  # R1: what lapsed was dropped; a release must not claim that it was activated
            assert "drop" in rig.part.did
            assert await refused(rig.gate.resume(release(by))) == wire.LEASE_EXPIRED
            assert (await rig.gate.rollback(release(by))).phase == hold.OPEN

    asyncio.run(main())


def test_after_a_stall_a_late_commit_comes_before_the_timer(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.HELD)
        rig.clock.pass_time(60.0, fire=False)
        assert await refused(rig.gate.commit(commit(by))) == wire.LEASE_EXPIRED
        assert (rig.gate.phase, rig.part.exports) == (hold.OPEN, 0)

    asyncio.run(main())


# -- H4 and S4 --------------------------------------------------------------------------------


def test_commit_answers_with_the_files_that_it_wrote(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.HELD)
        (tmp_path / folder_of(by)).mkdir()
        report = await rig.gate.commit(commit(by))
        (entry,) = report.files
        assert entry.path == "gym/agent/agent0/rows.jsonl"
        assert lines(tmp_path / folder_of(by) / entry.path) == [{"a": 1}]
        assert report.counts == {"rows": 1}

    asyncio.run(main())


def test_a_release_stops_and_awaits_a_writer(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.HELD)
        (tmp_path / folder_of(by)).mkdir()
        started, go = threading.Event(), threading.Event()

        def rows():
            yield {"n": 1}
            started.set()
            go.wait()
            yield {"n": 2}
            raise AssertionError("it was not stopped")

        rig.part.rows = rows()
        committing = asyncio.create_task(rig.gate.commit(commit(by)))
        await asyncio.to_thread(started.wait)
        releasing = asyncio.create_task(rig.gate.resume(release(by)))
        await until(lambda: rig.gate.phase == hold.OPEN)  # rollouts go on at once
        assert not releasing.done()
        go.set()
        assert (await releasing).phase == hold.OPEN
        assert await refused(committing) == wire.STALE_FENCE

    asyncio.run(main())


@pytest.mark.parametrize("state", [hold.HELD, hold.COMMITTED])
def test_what_moves_under_a_quiet_hold_is_reported(tmp_path, state):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(state)
        rig.gate.touch(included=False)
        renew = wire.Renew(fence=by, lease_s=60, **TIMED)
        assert not (await rig.gate.renew(renew)).moved
        rig.gate.touch()
        assert (await rig.gate.renew(renew)).moved

    asyncio.run(main())


def test_what_moves_while_closing_is_fine(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.CLOSING)
        rig.gate.touch()
        assert not (await rig.gate.drain(drain(by))).moved

    asyncio.run(main())


# -- drain ------------------------------------------------------------------------------------


def test_drain_waits_for_blockers_and_names_at_most_a_hundred(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.CLOSING)
        rig.part.moving = [f"p{n}" for n in range(250)]
        report = await rig.gate.drain(drain(by, timeout_s=0.0))
        assert (report.quiet, len(report.blockers), report.blocker_count) == (False, 100, 250)
        assert report.phase == hold.CLOSING

        rig.part.moving = ["p1"]
        waiting = asyncio.create_task(rig.gate.drain(drain(by)))
        await asyncio.sleep(0)
        rig.part.moving = []
        rig.gate.stir()
        report = await waiting
        assert (report.quiet, report.phase, report.blockers) == (True, hold.HELD, ())

    asyncio.run(main())


def test_a_drain_ends_when_its_hold_ends(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.CLOSING)
        rig.part.moving = ["p1"]
        waiting = asyncio.create_task(rig.gate.drain(drain(by)))
        await asyncio.sleep(0)
        await rig.gate.resume(release(by))
        assert await refused(waiting) == wire.STALE_FENCE

    asyncio.run(main())


@pytest.mark.parametrize("straggler", ["abort", "start_over"])
def test_stragglers_are_given_up_only_if_that_was_asked_for(tmp_path, straggler):
    async def main():
        rig = Rig(tmp_path)
        by = fence(1)
        await rig.gate.prepare(prepare(by, timeout_s=10.0, straggler=straggler))
        rig.part.moving = ["p1"]
        assert not (await rig.gate.drain(drain(by, timeout_s=0.0))).quiet
        rig.clock.pass_time(9.5)
        report = await rig.gate.drain(drain(by, timeout_s=0.0))
        assert report.quiet == ("give_up" in rig.part.did) == (straggler == "start_over")

    asyncio.run(main())


def test_a_restore_is_activated_by_resume_only(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        by = await rig.to(hold.STAGED, fence(1, incarnation=4))
        await rig.gate.discard(wire.Discard(fence=by, rollouts=("p1",), **TIMED))
        await rig.gate.resume(release(by))
        await rig.gate.resume(release(by))
        assert rig.part.did[-2:] == [("discard", ("p1",)), ("activate", 4)]
        assert await refused(rig.gate.rollback(release(by))) == wire.STALE_FENCE

    asyncio.run(main())

"""Anything in any order on the real engine: what is on the disk and what servers did is judged.

Hypothesis chooses the rules: work, faults, deaths, time. The oracle never asks the tables: it
asks the bytes on the disk and the `Witness` of `tests/world.py`. One virtual-time loop a machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar

from attrs import define, evolve
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fsm.outcome import (
    Aborted,
    InvariantError,
    Restored,
    RestoreFailed,
    Saved,
    Skipped,
    SkipReason,
    SnapshotRejected,
    Unresolved,
)
from fsm.restore import RESTORE
from fsm.save import SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED
from fsm.storing import Fence
from fsm.token import RestoreToken
from participants.memory import Fault
from participants.virtual_time import VirtualTimeLoop
from storage.memory import MemoryStore
from storage.memory_faults import PublishFault
from storage.names import order_of, snapshot_name
from tests.world import CONFIG, HOOKS, NAMES, RELEASES, Controller, World

TABLES = [SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED, RESTORE]
WHO = st.sampled_from(NAMES)
HOOK = st.sampled_from(HOOKS)
LONGEST_DELAY_S = 65.0
DELAY_S = st.sampled_from([1.0, 12.0, 35.0, LONGEST_DELAY_S])
PASSES_S = st.sampled_from([0.5, 3.0, 7.0, 21.0, 61.0])
STORE_OPERATION = st.sampled_from(["begin", "write", "seal", "discard", "newest", "restored"])
# Ways in which an operation ends that need no bug in the engine.
EXPECTED = (asyncio.CancelledError, RestoreFailed, SnapshotRejected, InvariantError, ValueError)
SAVES, RESTORES = ("save", "stay_paused"), ("restore", "take_over")


@define(eq=False)
class Job:
    """A save or a restore under way, and where the records stood when it began.

    token: what a restore goes on from, in the process that takes it over (R8).
    """

    kind: str
    controller: Controller
    task: asyncio.Task[Any]
    head_before: str | None
    fences_before: int
    calls_before: int
    token: RestoreToken | None = None
    cancelled: bool = False

    @property
    def fence(self) -> Fence | None:
        if self.token is not None:
            return self.token.fence
        given = self.controller.cable.fences[self.fences_before :]
        return given[0] if given else None

    @property
    def called(self) -> list[str]:
        """Hooks that it called. Renewals may be of what is held in the background."""
        called = self.controller.cable.called[self.calls_before :]
        return [hook for _, hook in called if hook != "renew"]


class EngineMachine(RuleBasedStateMachine):
    reached: ClassVar[set[str]] = set()  # rows that fired, over all examples

    @initialize(
        seed=st.integers(0, 7),
        release_at=st.sampled_from(["publish", "cut"]),
        latency_s=st.sampled_from([0.0, 1.0]),
    )
    def begin(self, seed: int, release_at: str, latency_s: float) -> None:
        self.loop = VirtualTimeLoop(seed)
        self.world = World(evolve(CONFIG, release_at=release_at), latency_s)
        self.jobs: list[Job] = []
        self.published: dict[str, dict[str, bytes]] = {}
        self.never: set[str] = set()  # snapshots of attempts that ended unpublished
        self.head: str | None = None  # what a restore has to find
        self.may_be_held: set[str] = set()  # named as unreleased by the last outcome
        self.faulty_releases: set[str] = set()
        self.quiet_after_s = 0.0  # until then what a dead controller held may still be held
        self.bugs = self.items = 0
        self.publishes: list[PublishFault] = []
        self.token: RestoreToken | None = None
        self.kept_up = False  # somebody was held in the background when we last looked

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(main)

    @property
    def controller(self) -> Controller:
        return self.world.controller

    @property
    def busy(self) -> bool:
        return any(job.controller is self.controller for job in self.jobs)

    # -- rollouts and servers --------------------------------------------------------------------

    def new_item(self) -> str:
        self.items += 1
        return f"i{self.items}"

    @rule(who=WHO)
    def work(self, who: str) -> None:
        held = self.world.stations[who].phase not in ("open", "closing")
        assert self.world.work(who, self.new_item()) is not held

    @rule(who=WHO)
    def move(self, who: str) -> None:
        self.world.move(who, self.new_item())

    @rule(who=WHO)
    def server_dies(self, who: str) -> None:
        self.world.crash(who)

    # -- faults of servers -----------------------------------------------------------------------

    def fault(self, who: str, hook: str, fault: Fault) -> None:
        self.world.stations[who].fault(hook, fault)
        if hook in RELEASES:
            self.faulty_releases.add(who)

    @rule(who=WHO, hook=HOOK)
    def refuses(self, who: str, hook: str) -> None:
        self.fault(who, hook, Fault.refuse())

    @rule(who=WHO, hook=HOOK)
    def fails(self, who: str, hook: str) -> None:
        self.fault(who, hook, Fault.fail())

    @rule(who=WHO, hook=HOOK)
    def has_a_bug(self, who: str, hook: str) -> None:
        self.bugs += 1
        self.fault(who, hook, Fault.bug())

    @rule(who=WHO, hook=HOOK)
    def hangs(self, who: str, hook: str) -> None:
        self.fault(who, hook, Fault.hang())

    @rule(who=WHO, hook=HOOK, delay_s=DELAY_S)
    def is_late(self, who: str, hook: str, delay_s: float) -> None:
        self.fault(who, hook, Fault.late(delay_s))

    @rule(who=WHO, hook=HOOK)
    def loses_its_answer(self, who: str, hook: str) -> None:
        self.fault(who, hook, Fault.lost())

    @rule(who=WHO)
    def stays_silent_when_released(self, who: str) -> None:
        for _ in range(CONFIG.resume_attempts):
            self.fault(who, "resume", Fault.refuse("away"))

    @rule()
    def next_cancelled_call_is_answered(self) -> None:
        self.controller.cable.stubborn += 1

    # -- faults of the disk ----------------------------------------------------------------------

    @rule(operation=STORE_OPERATION)
    def disk_fails(self, operation: Any) -> None:
        self.controller.memory.faults.fail(operation, OSError(28, "No space left on device"))

    @rule()
    def the_last_write_fails(self) -> None:
        self.disk_fails("seal")

    @rule(operation=STORE_OPERATION, delay_s=DELAY_S)
    def disk_is_slow(self, operation: str, delay_s: float) -> None:
        self.controller.store.slow[operation] = delay_s

    def next_publish(self, **how: bool) -> None:
        self.publishes.append(self.controller.memory.faults.next_publish(**how))

    @rule()
    def publish_is_held(self) -> None:
        self.next_publish(held=True)

    @rule()
    def publish_loses_its_answer(self) -> None:
        self.next_publish(held=True, renamed_early=True)

    @rule()
    def publish_does_not_happen(self) -> None:
        self.next_publish(published=False)

    @rule()
    def publish_is_not_durable(self) -> None:
        self.next_publish(durable=False)

    @precondition(lambda self: self.publishes)
    @rule(published=st.booleans())
    def held_publish_goes_on(self, published: bool) -> None:
        self.publishes.pop(0).release(published=published)
        self.run(asyncio.sleep(0))

    # -- what the trainer does -------------------------------------------------------------------

    def start(
        self, kind: str, main: Coroutine[Any, Any, Any], token: RestoreToken | None = None
    ) -> None:
        cable = self.controller.cable
        began = (self.head, len(cable.fences), len(cable.called))
        self.jobs.append(Job(kind, self.controller, self.loop.create_task(main), *began, token))

    @precondition(lambda self: not self.busy)
    @rule()
    def start_a_save(self) -> None:
        self.start("save", self.world.engine.save())
        self.run(asyncio.sleep(0))

    @precondition(lambda self: not self.busy)
    @rule()
    def save(self) -> None:
        self.start("save", self.world.engine.save())
        self.finish()

    @precondition(lambda self: not self.busy)
    @rule()
    def start_a_restore(self) -> None:
        self.start("restore", self.world.engine.restore(if_none="start"))
        self.run(asyncio.sleep(0))

    @precondition(lambda self: not self.busy)
    @rule()
    def restore(self) -> None:
        self.start("restore", self.world.engine.restore(if_none="start"))
        self.finish()

    @precondition(lambda self: not self.busy)
    @rule()
    def save_and_stay_paused(self) -> None:
        self.start("stay_paused", self.world.engine.save(then="stay_paused"))
        self.run(asyncio.sleep(0))

    @precondition(lambda self: not self.busy)
    @rule()
    def let_go(self) -> None:
        self.start("let_go", self.world.engine.let_go())
        self.finish()

    @precondition(lambda self: not self.busy)
    @rule()
    def begin_to_hand_over(self) -> None:
        engine = self.world.engine
        self.start("hand_over", engine.restore(if_none="start", until="gym_restored"))
        self.run(asyncio.sleep(0))

    @precondition(lambda self: not self.busy)
    @rule()
    def hand_over(self) -> None:
        self.begin_to_hand_over()
        self.finish()

    @precondition(lambda self: not self.busy and self.token)
    @rule(first_dies=st.booleans())
    def take_over(self, first_dies: bool) -> None:
        """By another process. The one before may go on: it can only renew, or stop (R8)."""
        if first_dies or not self.controller.engine.handed_over:
            self.controller.die()
        self.world.new_controller()
        self.start("take_over", self.world.engine.restore(self.token), self.token)
        self.run(asyncio.sleep(0))

    @precondition(lambda self: not self.busy and len(self.world.controllers) > 1)
    @rule()
    def the_process_before_lets_go(self) -> None:
        before = self.world.controllers[-2]
        if before.engine.handed_over and not before.cable.is_cut:
            assert self.run(before.engine.let_go()) == {}

    @precondition(lambda self: not self.busy)
    @rule()
    def controller_is_closed(self) -> None:
        """Nobody is told anything: what it held in the background ends with the leases."""
        self.run(self.world.engine.close())
        self.quiet_after_s = self.loop.time() + LONGEST_DELAY_S + CONFIG.lease_s + 1
        self.world.new_controller()

    @precondition(lambda self: self.busy)
    @rule()
    def save_meanwhile(self) -> None:
        if self.world.engine.activity() is not None:
            assert immediately(self.world.engine.save()) == Skipped(SkipReason.ATTEMPT_IN_PROGRESS)

    @precondition(lambda self: self.busy)
    @rule()
    def cancel(self) -> None:
        job = self.jobs[-1]
        if job.task.cancel():
            job.cancelled = True
        self.run(asyncio.sleep(0))

    @precondition(lambda self: not self.busy)
    @rule(seconds=st.sampled_from([0.0, 1.5, 4.5, 9.5, 14.5, 25.0]))
    def save_is_cancelled_after(self, seconds: float) -> None:
        self.start_a_save()
        self.time_passes(seconds)
        if self.busy:
            self.cancel()
            self.finish()

    @precondition(lambda self: self.busy)
    @rule()
    def finish(self) -> None:
        tasks = {job.task for job in self.jobs if not job.controller.cable.is_cut}
        self.run(asyncio.wait(tasks))

    @rule()
    def tick(self) -> None:
        self.run(asyncio.sleep(0))

    @rule(seconds=PASSES_S)
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    # -- controllers -----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, CONFIG.lease_s + 1]))
    def controller_dies(self, seconds: float) -> None:
        self.controller.die()
        self.quiet_after_s = self.loop.time() + LONGEST_DELAY_S + CONFIG.lease_s + 1
        self.world.new_controller()
        self.run(asyncio.sleep(seconds))

    @precondition(lambda self: self.world.disk.holder is self.controller.memory)
    @rule()
    def controller_loses_its_lock(self) -> None:
        """It goes on as if nothing had happened, beside the new one."""
        self.controller.lose_lock()
        self.quiet_after_s = self.loop.time() + LONGEST_DELAY_S + CONFIG.lease_s + 1
        self.world.new_controller()

    @precondition(lambda self: self.world.disk.holder is not None)
    @rule()
    def second_controller_is_refused(self) -> None:
        try:
            self.run(MemoryStore(self.world.disk).open())
        except BlockingIOError:
            return
        raise AssertionError("two controllers hold one root")

    # -- the oracle ------------------------------------------------------------------------------

    @invariant()
    def no_rule_was_seen_broken(self) -> None:
        assert self.world.witness.broken == []

    @invariant()
    def what_is_published_is_whole_and_stays(self) -> None:
        """S4, R5: one instant, everybody's part, never changed afterwards; nothing that ended
        unpublished ever appears (S2)."""
        for snapshot, files in self.world.disk.snapshots.items():
            if snapshot not in self.published:
                assert self.world.problems_of(snapshot) == []
                self.published[snapshot] = dict(files)
                if self.is_on_the_living_history(snapshot):
                    self.head = snapshot
            assert files == self.published[snapshot]
        assert self.never.isdisjoint(self.world.disk.snapshots)

    def is_on_the_living_history(self, snapshot: str) -> bool:
        last = max(record.at for record in self.world.disk.records)
        order = order_of(snapshot)
        return last[0] == order[0] and last < order

    @invariant()
    def jobs_end_as_their_outcome_says(self) -> None:
        for job in [job for job in self.jobs if job.task.done()]:
            self.jobs.remove(job)
            if job.controller is self.controller:
                self.judge(job)
            elif not job.task.cancelled():
                job.task.exception()

    @invariant()
    def nobody_is_held_when_nothing_runs(self) -> None:
        kept_up = any(_keeps_up(one) for one in self.world.controllers)
        if kept_up or self.kept_up:
            self.quiet_after_s = self.loop.time() + LONGEST_DELAY_S + CONFIG.lease_s + 1
        self.kept_up = kept_up
        if not self.jobs and self.loop.time() > self.quiet_after_s:
            assert set(self.world.held()) <= self.may_be_held

    def judge(self, job: Job) -> None:
        trace = job.controller.engine.last_trace
        self.what_is_published_is_whole_and_stays()
        if trace is not None:
            self.reached.update(trace.rows())
        outcome = error = None
        try:
            outcome = job.task.result()
        except EXPECTED as raised:
            error = raised
        self.judge_error(job, error)
        if job.kind in SAVES:
            self.judge_save(job, outcome)
        elif job.kind in RESTORES:
            self.judge_restore(job, outcome, error)
        elif job.kind == "hand_over":
            self.judge_hand_over(job, outcome)
        if self.holds_on(job, outcome):
            self.kept_up = True
        elif not isinstance(outcome, Skipped) and job.fence is not None:
            self.judge_release(job, outcome)

    def holds_on(self, job: Job, outcome: Any) -> bool:
        """Others are still held, and that is right: their leases end it in any case."""
        stays = job.kind == "stay_paused" and isinstance(outcome, Saved)
        # A process that takes over holds nobody before its first call.
        not_yet = job.token is not None and not job.called
        return stays or not_yet or isinstance(outcome, RestoreToken)

    def judge_error(self, job: Job, error: BaseException | None) -> None:
        if isinstance(error, InvariantError):
            assert self.bugs, f"a bug of the engine: {error.__cause__!r}"
        if isinstance(error, asyncio.CancelledError):
            assert job.cancelled
        if job.cancelled and error is None and job.fence is not None:
            raise AssertionError(f"a cancellation of {job.kind} was swallowed")
        if isinstance(error, ValueError):
            assert "restore" in str(error) or "let_go()" in str(error), error
            assert job.called == []

    def judge_save(self, job: Job, outcome: Any) -> None:
        if isinstance(outcome, Skipped):
            assert set(job.called) <= {"resume"}, "S7: skipped, but somebody was told"
        elif isinstance(outcome, Saved):
            assert outcome.snapshot in self.world.disk.snapshots
        elif job.fence is not None and not isinstance(outcome, Unresolved):
            snapshot = snapshot_name(job.fence)
            if isinstance(outcome, Aborted):
                assert snapshot not in self.world.disk.snapshots, "aborted, and published"
            if snapshot not in self.world.disk.snapshots and not self.is_unresolved(job):
                self.never.add(snapshot)

    def is_unresolved(self, job: Job) -> bool:
        return job.controller.engine._leftovers.unresolved is not None

    def judge_restore(self, job: Job, outcome: Any, error: BaseException | None) -> None:
        """R1: exactly what was saved, everywhere; or nothing, anywhere; or a loud failure."""
        witness = self.world.witness
        activated = [witness.activated.get((job.fence, name)) for name in NAMES]
        if isinstance(outcome, Restored):
            # An earlier publish of unknown outcome may have come through meanwhile.
            assert outcome.snapshot in (self.head, job.head_before)
            self.head = outcome.snapshot
            expected = self.world.saved_items(self.head) if self.head else [None] * len(NAMES)
            assert activated == list(expected)
        elif "not confirmed" not in str(error) and not self.faulty_releases:
            nothing = activated == [None] * len(NAMES)
            assert nothing or isinstance(error, asyncio.CancelledError)
            assert nothing or activated == list(self.world.saved_items(self.head))

    def judge_hand_over(self, job: Job, outcome: Any) -> None:
        """R8: nothing is activated by the process that only begins."""
        if isinstance(outcome, RestoreToken):
            self.token = outcome
            assert outcome.snapshot in (self.head, job.head_before)
        fences = {fence for fence, _ in self.world.witness.activated}
        assert job.fence not in fences

    def judge_release(self, job: Job, outcome: Any) -> None:
        """S6: whoever is still held by this operation is named."""
        unreleased = getattr(outcome, "unreleased", None)
        named = self.faulty_releases if unreleased is None else set().union(*unreleased.values())
        stations = self.world.stations.values()
        held = {one.name for one in stations if one.is_held and one.active_fence == job.fence}
        assert held <= named, f"{held - named} still held after {outcome!r}"
        self.may_be_held = set(named)

    # -- the end ---------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.everything_ends_well()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.run(self.drained())
            self.loop.close()

    async def drained(self) -> None:
        """Cancelled engines release everybody first: their tasks need some time."""
        current = asyncio.current_task()
        for _ in range(100):
            others = asyncio.all_tasks(self.loop) - {current}
            if not others:
                return
            await asyncio.wait(others, timeout=CONFIG.release_timeout_s)
            for task in others:
                task.cancel()
        raise AssertionError(f"these tasks do not end: {others}")

    def everything_ends_well(self) -> None:
        """Liveness: leases free everybody; without faults the next restore and save succeed."""
        for publish in self.publishes:
            publish.release()
        if self.busy:
            self.finish()
        self.jobs_end_as_their_outcome_says()
        for one in self.world.controllers:
            if one.engine.last_trace is not None:
                self.reached.update(one.engine.last_trace.rows())
            one.die()
        self.run(asyncio.sleep(LONGEST_DELAY_S + CONFIG.lease_s + 1))
        assert self.world.held() == []
        self.what_is_published_is_whole_and_stays()
        for one in self.world.stations.values():
            one._faults.clear()
        self.controller_dies(CONFIG.lease_s + 1)
        self.restore()
        self.jobs_end_as_their_outcome_says()
        self.save()
        self.what_is_published_is_whole_and_stays()
        assert self.jobs[-1].task.result().snapshot == self.head
        self.jobs_end_as_their_outcome_says()
        assert self.world.held() == []


def _keeps_up(controller: Controller) -> bool:
    """It holds somebody in the background: a save that stays paused, or a hand-over."""
    held = controller.engine._held
    return held is not None and not held.over and not controller.cable.is_cut


def immediately(main: Coroutine[Any, Any, Any]) -> Any:
    """The answer of a coroutine that never waits, without a turn of the loop."""
    try:
        main.send(None)
    except StopIteration as answer:
        return answer.value
    raise AssertionError("it waits")


def test_anything_in_any_order() -> None:
    EngineMachine.reached.clear()
    run_state_machine_as_test(EngineMachine)
    entered = {row.rsplit(" ", 1)[1] for row in EngineMachine.reached}
    every = {name for table in TABLES for name in table.states if name != table.initial}
    # Another release of Hypothesis draws other examples: one or two rare states may be missed.
    assert len(every - entered) <= 2, f"never entered, so never tested: {every - entered}"

"""The engine: one attempt at a time, and what comes of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from attrs import frozen

from fsm import restore_steps, save_steps
from fsm.config import EngineConfig
from fsm.operation import HookFailed, Operation, judge
from fsm.outcome import (
    Aborted,
    Cause,
    InvariantError,
    Restored,
    RestoreFailed,
    Saved,
    SaveOutcome,
    Skip,
    Skipped,
    SkipReason,
    SnapshotRejected,
    Unresolved,
)
from fsm.participant import Participant, ranks
from fsm.restore import RESTORE
from fsm.restore_steps import IfBad, IfNone, Restoring
from fsm.run import Run, Steps
from fsm.save import SAVE, SAVE_RELEASE_AT_CUT
from fsm.save_steps import AnchorSource, Barrier, Saving, Setting
from fsm.storing import Fence, Store
from fsm.table import PARKED, PARKING, Table
from fsm.trace import Trace

log = logging.getLogger("quiesce.engine")
LABELS = {SAVE.name: "save", SAVE_RELEASE_AT_CUT.name: "save", RESTORE.name: "restore"}


@frozen
class Activity:
    """What the engine is doing right now. Times are seconds; waiting: participant → names."""

    operation: str
    label: str
    state: str
    step: str | None
    since_s: float
    left_s: float | None
    waiting: Mapping[str, tuple[str, ...]]
    then: str


class SnapshotEngine:
    """Takes and restores snapshots of its participants.

    Raises ValueError at construction for two participants of one name, an unknown name or a
    cycle. `save` answers with data; only a bug (`InvariantError`) and a cancellation are raised.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        participants: Iterable[Participant],
        *,
        barrier: Barrier | None = None,
        anchor: AnchorSource | None = None,
    ) -> None:
        self.config, self.store = config, store
        self.participants = tuple(participants)
        ranks(self.participants)
        self.last_trace: Trace | None = None
        self._anchor = anchor
        self._setting = Setting(
            config, store, anchor or (lambda: None), lambda: bool(self._held_off), barrier
        )
        self._lock = asyncio.Lock()
        self._held_off: list[str] = []
        self._last_saved: Fence | None = None  # of the newest snapshot known to be published
        self._pending: Saving | None = None  # whose release is not confirmed by everyone
        self._left_behind: set[asyncio.Future[Any]] = set()  # cuts that outlived their deadline
        self._unresolved: asyncio.Task[None] | None = None  # a rename whose outcome is not known
        self._running: tuple[Run, Operation] | None = None
        self._opening: asyncio.Task[None] | None = None

    # -- public --------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the store: one writer, a new incarnation (F6). `save` and `restore` do it too."""
        if self._opening is None or _failed(self._opening):
            self._opening = asyncio.ensure_future(self.store.open())
        # A cancelled caller must not leave a root that is locked by an engine that forgot it.
        await asyncio.shield(self._opening)

    async def close(self) -> None:
        """Let the store go. Waits for an attempt under way."""
        async with self._lock:
            opening, self._opening = self._opening, None
            if opening is not None:
                await asyncio.wait({opening})
                if not _failed(opening):
                    await self.store.close()

    async def save(self) -> SaveOutcome:
        """One attempt now; `Skipped(ATTEMPT_IN_PROGRESS)` while another one runs (S8)."""
        if self._lock.locked():
            return Skipped(SkipReason.ATTEMPT_IN_PROGRESS)
        async with self._lock:
            return await self._attempt()

    @asynccontextmanager
    async def exclusive(self, what: str) -> AsyncIterator[list[SaveOutcome]]:
        """Nobody else snapshots inside; on leaving, the snapshot that belongs to what was done
        inside is taken under the same lock (S8). Its outcome is put into the list yielded."""
        outcomes: list[SaveOutcome] = []
        async with self._lock:
            log.debug("exclusive: %s", what)
            yield outcomes
            outcomes.append(await self._attempt())

    @contextmanager
    def hold_off(self, why: str) -> Iterator[None]:
        """No attempt starts inside; one that is under way before its cut aborts."""
        self._held_off.append(why)
        try:
            yield
        finally:
            self._held_off.remove(why)

    async def restore(self, *, if_none: IfNone = "raise", if_bad: IfBad = "raise") -> Restored:
        """Restore the newest snapshot that verifies.

        if_none: "start" activates with nothing restored. if_bad: "raise" refuses when the newest
        one does not verify, "older" quarantines it and takes the one before (R2).
        Raises SnapshotRejected; RestoreFailed when servers must be started afresh;
        InvariantError for a bug; any other failure as RestoreFailed after a full rollback.
        """
        async with self._lock:
            await self.open()
            trace = Trace(RESTORE.name, asyncio.get_running_loop().time)
            operation = Operation("restore", self.participants, trace)
            operation.lease_s = self.config.lease_s
            steps = Restoring(self._setting, operation, if_none, if_bad)
            run = await self._drive(RESTORE, operation, steps, restore_steps.BUDGETS)
            return self._restored(run, operation, steps)

    def activity(self) -> Activity | None:
        """What is going on, or None when nothing is."""
        if self._running is None:
            return None
        run, operation = self._running
        now = run.trace.clock()
        left = None if operation.until_s is None else max(0.0, operation.until_s - now)
        machine = run.machine
        late = machine.table.next(machine.state, "late") or machine.state
        return Activity(
            LABELS[machine.table.name],
            operation.label,
            machine.state,
            machine.step,
            now - run.entered_s,
            left,
            dict(operation.waiting),
            late,
        )

    # -- save ----------------------------------------------------------------------------------

    async def _attempt(self) -> SaveOutcome:
        """One attempt, with the lock held."""
        await self.open()
        trace = Trace(SAVE.name, asyncio.get_running_loop().time)
        operation = Operation("save", self.participants, trace)
        operation.lease_s = self.config.lease_s
        try:
            attempt = await self._preflight(operation)
        except Skip as skip:
            return Skipped(skip.reason, skip.detail)
        table = SAVE if self.config.release_at == "publish" else SAVE_RELEASE_AT_CUT
        run = await self._drive(table, operation, attempt, save_steps.BUDGETS)
        return await self._outcome(run, operation, attempt)

    async def _preflight(self, operation: Operation) -> Saving:
        """Every reason to leave the attempt out, before anybody is told anything (S7)."""
        await self._skip_for_earlier()
        if self._held_off:
            optimizer = self._held_off[-1] == "optimizer_commit"
            reason = SkipReason.OPTIMIZER_COMMIT if optimizer else SkipReason.HELD_OFF
            raise Skip(reason, self._held_off[-1])
        anchor = self._setting.anchor()
        if self._anchor is not None and anchor is None:
            raise Skip(SkipReason.NO_TRAINER_ANCHOR)
        operation.fence = await self.store.fence()
        operation.label = f"save-{operation.fence.incarnation}-{operation.fence.sequence}"
        attempt = Saving(self._setting, operation, anchor, self._last_saved)
        try:
            async with asyncio.timeout(self.config.prepare_timeout_s):
                await attempt.preflight()
        except TimeoutError as late:
            detail = f"preflight took longer than {self.config.prepare_timeout_s:g} s"
            raise Skip(SkipReason.PARTICIPANT, detail) from late
        except HookFailed as failed:
            if isinstance(failed.__cause__, Skip):
                raise failed.__cause__ from None
            _, cause = judge("preflight", failed)
            if operation.bug is not None:
                raise InvariantError(str(cause)) from operation.bug
            raise Skip(SkipReason.PARTICIPANT, str(cause)) from failed
        except OSError as error:
            raise Skip(SkipReason.NO_ROOM, str(error)) from error
        return attempt

    async def _skip_for_earlier(self) -> None:
        if self._unresolved is not None:
            raise Skip(SkipReason.PUBLISH_UNRESOLVED)
        if self._left_behind:
            raise Skip(SkipReason.PREVIOUS_CUT_RUNNING)
        if self._pending is not None:
            if not await self._pending.releasing.one_round():
                silent = self._pending.releasing.silent()
                names = sorted(name for group in silent.values() for name in group)
                raise Skip(SkipReason.RELEASE_PENDING, ", ".join(names))
            self._pending = None

    async def _outcome(self, run: Run, operation: Operation, attempt: Saving) -> SaveOutcome:
        phases, unreleased = run.trace.phases(), attempt.releasing.silent()
        self._pending = attempt if unreleased else None
        if attempt.publication is not None and attempt.publication.published:
            self._last_saved = operation.fence
        if operation.bug is not None:
            raise InvariantError(str(run.cause or repr(operation.bug))) from operation.bug
        if run.cancelled:
            raise asyncio.CancelledError
        if attempt.publication is not None and attempt.publication.published:
            assert attempt.draft is not None
            if attempt.publication.durable:
                await self._prune()
            return Saved(
                attempt.draft.id,
                attempt.publication.durable,
                phases,
                _pause_s(run),
                unreleased,
                operation.public_facts(),
            )
        if run.machine.state == "publish_unresolved":
            assert attempt.draft is not None
            return Unresolved(attempt.draft.id, phases, unreleased)
        assert run.cause is not None, "an attempt that was not published has a cause"
        return Aborted(run.cause, phases, unreleased)

    async def _prune(self) -> None:
        try:
            await self.store.prune()
        except OSError as error:  # old snapshots stay: not a reason to call the new one a failure
            log.warning("pruning failed, old snapshots are kept: %s", error)

    # -- restore -------------------------------------------------------------------------------

    def _restored(self, run: Run, operation: Operation, steps: Restoring) -> Restored:
        if operation.bug is not None:
            raise InvariantError(str(run.cause or repr(operation.bug))) from operation.bug
        if run.machine.state == "failed":
            aborted = any(row.target == "aborting" for row in run.machine.fired)
            release = steps.dropping if aborted else steps.activation
            silent = sorted(name for names in release.silent().values() for name in names)
            raise RestoreFailed(
                f"{run.cause or 'activation'}: not confirmed by {', '.join(silent)}; start these "
                "servers afresh and restore again, the snapshot is untouched"
            )
        if run.cancelled:
            raise asyncio.CancelledError
        if run.machine.state == "aborted":
            self._raise_rejected(run.cause)
        snapshot = steps.snapshot
        return Restored(
            None if snapshot is None else snapshot.id,
            None if snapshot is None else snapshot.anchor,
            operation.facts,
            run.trace.phases(),
        )

    def _raise_rejected(self, cause: Cause | None) -> None:
        rejected, self._rejected = self._rejected, None
        if rejected is not None:
            raise rejected
        raise RestoreFailed(f"{cause}; everything was rolled back, the snapshot is untouched")

    # -- driving -------------------------------------------------------------------------------

    _rejected: SnapshotRejected | None = None

    async def _drive(
        self,
        table: Table,
        operation: Operation,
        performing: Saving | Restoring,
        budgets: Mapping[str, str],
    ) -> Run:
        until: dict[str, float] = {}

        def deadline(step: str) -> float | None:
            budget = budgets.get(step)
            if budget is not None:
                seconds = getattr(self.config, budget)
                if step in table.rules.releasing:
                    seconds *= len(operation.ranks)  # a silent rank must not use up the next's (S6)
                until.setdefault(budget, asyncio.get_running_loop().time() + seconds)
            operation.until_s = until[budget] if budget is not None else None
            return operation.until_s

        steps = Steps(
            performing.steps(),
            partial(self._judge, operation),
            deadline,
            self._leave_behind,
            frozenset({"publish"}),
        )
        run = Run(table, steps, operation.trace)
        self._rejected = None
        performing.post = run.post
        self._running, self.last_trace = (run, operation), operation.trace
        try:
            await run.drive()
        finally:
            await performing.renewal.stop()
            self._running = None
            for thread in operation.threads:
                self._keep(thread)
        return run

    def _judge(self, operation: Operation, step: str, error: BaseException) -> tuple[str, Cause]:
        if isinstance(error, SnapshotRejected):
            self._rejected = error
        elif isinstance(error, HookFailed) and isinstance(error.__cause__, SnapshotRejected):
            self._rejected = error.__cause__
        operation.note_bug(step, error)
        return judge(step, error)

    def _leave_behind(self, step: str, task: asyncio.Task[None]) -> None:
        log.warning("step %r outlived its deadline and is left behind", step)
        if step == "publish":
            self._unresolved = task
            task.add_done_callback(self._resolved)
        else:
            self._keep(task)

    def _keep(self, future: asyncio.Future[Any]) -> None:
        self._left_behind.add(future)
        future.add_done_callback(self._left_behind.discard)

    def _resolved(self, _: asyncio.Task[None]) -> None:
        self._unresolved = None


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _pause_s(run: Run) -> float:
    """Seconds in which rollouts did not run."""
    states = run.machine.table.states
    waiting = [
        event.data["took_s"]
        for event in run.trace.events
        if event.kind == "row" and states[event.what.split(" --")[0]].rollouts in (PARKING, PARKED)
    ]
    return float(sum(waiting))

"""The engine: one operation at a time, and what comes of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Literal, overload

from fsm import restore_steps, save_steps, verdict
from fsm.config import EngineConfig
from fsm.drive import Activity, Drive, Performing
from fsm.held import Held
from fsm.leftovers import Leftovers
from fsm.opening import Opening
from fsm.operation import Operation
from fsm.outcome import Anchor, Restored, SaveOutcome, Skip, Skipped, SkipReason
from fsm.participant import Participant, ranks
from fsm.restore import HANDED_OVER, RESTORE, RESTORE_HANDING_OVER, RESTORE_TAKING_OVER
from fsm.restore_steps import Choices, IfBad, IfForeign, IfNone, Restoring
from fsm.save import SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED, STAYING
from fsm.save_steps import AnchorSource, Barrier, Saving, Setting
from fsm.storing import Fence, Store
from fsm.table import Table
from fsm.token import RestoreToken
from fsm.trace import Trace
from fsm.turn import Turn

log = logging.getLogger("quiesce.engine")

Then = Literal["resume", "stay_paused"]
Until = Literal["gym_restored"]
KeptAnchors = Callable[[], Iterable[int]]


class SnapshotEngine:
    """Takes and restores snapshots of its participants.

    kept_anchors: trainer steps whose checkpoints are still kept; the newest snapshot of each is
    kept too (R6). Raises ValueError at construction for two participants of one name, an unknown
    name or a cycle. `save` answers with data; what is raised is a bug (`InvariantError`), a wrong
    call (ValueError) and a cancellation.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        participants: Iterable[Participant],
        *,
        barrier: Barrier | None = None,
        anchor: AnchorSource | None = None,
        kept_anchors: KeptAnchors | None = None,
    ) -> None:
        self.config, self.store = config, store
        self.participants = tuple(participants)
        ranks(self.participants)
        self.last_trace: Trace | None = None
        self._anchor, self._kept_anchors = anchor, kept_anchors
        self._setting = Setting(
            config,
            store,
            self._trainer_anchor,
            lambda: bool(self._held_off),
            lambda: self._hold_offs,
            barrier,
        )
        self._lock = Turn()
        self._held_off: list[str] = []
        self._hold_offs = 0
        self._last_saved: Fence | None = None  # of the newest snapshot known to be published
        self._leftovers = Leftovers()
        self._drive: Drive | None = None
        self._held: Held | None = None
        self._opening = Opening(store)
        self._handed_over = False

    # -- public --------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the store: one writer, a new incarnation (F6). `save` and `restore` do it too."""
        if self._handed_over:
            raise ValueError(
                "this engine handed its restore over, and the store with it: save in the process "
                "that took over, or call restore() here to begin anew"
            )
        await self._opening.open()

    async def close(self) -> None:
        """Let the store go. Waits for an attempt under way. Rollouts that stay paused are not
        released: nobody renews any more, so their holds end with their leases."""
        async with self._lock.take("close"):
            await self._leave()
            await self._opening.close()

    async def save(self, then: Then = "resume") -> SaveOutcome:
        """One attempt now; `Skipped(ATTEMPT_IN_PROGRESS)` while another one runs (S8).

        then: "stay_paused" keeps everyone paused after the snapshot is published, renewing their
        leases, until `let_go` or the end of the process (S11).
        """
        if then not in ("resume", "stay_paused"):
            raise ValueError(f"then must be 'resume' or 'stay_paused', not {then!r}")
        if self._lock.locked():
            return Skipped(SkipReason.ATTEMPT_IN_PROGRESS)
        async with self._lock.take("save"):
            return await self._attempt(then)

    async def let_go(self) -> Mapping[str, frozenset[str]]:
        """End what `save(then="stay_paused")` or `restore(until=...)` keeps up.

        After such a save everyone runs again; returns those that have not confirmed, as in
        `Saved.unreleased`. After such a restore this process stops to renew, no more. Safe to
        repeat. Raises InvariantError for a bug met since.
        """
        held = self._held
        if held is None:
            return {}
        await held.let_go()
        self._held = None
        saving = held.drive.performing
        silent: Mapping[str, frozenset[str]] = {}
        if isinstance(saving, Saving):
            silent = self._leftovers.released(saving.releasing)
        verdict.raise_bug(held.drive)
        return silent

    @asynccontextmanager
    async def exclusive(self, what: str) -> AsyncIterator[list[SaveOutcome]]:
        """Nobody else snapshots inside; on leaving, the snapshot that belongs to what was done
        inside is taken under the same lock (S8). Its outcome is put into the list yielded. A body
        that raises gets no snapshot."""
        outcomes: list[SaveOutcome] = []
        async with self._lock.take("exclusive"):
            log.debug("exclusive: %s", what)
            yield outcomes
            outcomes.append(await self._attempt())

    @contextmanager
    def hold_off(self, why: str) -> Iterator[None]:
        """No attempt starts inside; one that is under way before its cut aborts."""
        self._held_off.append(why)
        self._hold_offs += 1
        try:
            yield
        finally:
            self._held_off.remove(why)

    async def cut_over(self) -> None:
        """Wait until no cut is under way. Inside `hold_off` none follows: for trainers that change
        what participants read from another thread."""
        async with self._setting.cutting:
            pass

    @overload
    async def restore(
        self,
        *,
        if_none: IfNone = ...,
        if_bad: IfBad = ...,
        if_foreign: IfForeign = ...,
        until: Until,
    ) -> RestoreToken: ...
    @overload
    async def restore(
        self,
        token: RestoreToken | None = None,
        *,
        if_none: IfNone = ...,
        if_bad: IfBad = ...,
        if_foreign: IfForeign = ...,
        until: None = ...,
    ) -> Restored: ...
    async def restore(
        self,
        token: RestoreToken | None = None,
        *,
        if_none: IfNone = "raise",
        if_bad: IfBad = "raise",
        if_foreign: IfForeign = "refuse",
        until: Until | None = None,
    ) -> Restored | RestoreToken:
        """Restore the newest snapshot that verifies.

        if_none: "start" activates with nothing restored. if_bad: "raise" refuses when the newest
        one does not verify, "older" quarantines it and takes the one before (R2).
        if_foreign: "take_over" also fences servers with live runs of another root's job, and closes
        those runs (H1).
        until: "gym_restored" stops where everything is staged and returns the token with which
        another engine goes on; this one renews meanwhile (R8). token: go on with such a restore.
        Raises SnapshotRejected; RestoreFailed when servers must be started afresh;
        InvariantError for a bug; any other failure as RestoreFailed after a full rollback.
        """
        if until not in (None, HANDED_OVER) or (token is not None and until is not None):
            raise ValueError(f"until must be {HANDED_OVER!r}, and not with a token: {until!r}")
        async with self._lock.take("restore"):
            await self._make_way()
            if token is not None:
                return await self._go_on(token)
            return await self._restore(Choices(if_none, if_bad, if_foreign), until)

    @property
    def handed_over(self) -> bool:
        """Another process has the token of this engine's restore, and the store with it (R8)."""
        return self._handed_over

    def activity(self) -> Activity | None:
        """What is going on, or None when nothing is."""
        if self._drive is None or self._drive.run.machine.over:
            return None
        return self._drive.activity()

    # -- save ----------------------------------------------------------------------------------

    async def _attempt(self, then: Then = "resume") -> SaveOutcome:
        """One attempt, with the lock held."""
        await self.open()
        try:
            saving = await self._preflight(self._operation("save"))
        except Skip as skip:
            return Skipped(skip.reason, skip.detail)
        drive = self._begin(self._table(then), saving, save_steps.BUDGETS)
        await self._go(drive, STAYING)
        if drive.run.machine.state == STAYING:
            self._held = Held(drive)
            if drive.run.cancelled:  # the caller is gone: nobody would let them go
                await self.let_go()
        return await self._outcome(drive, saving)

    def _table(self, then: Then) -> Table:
        if then == "stay_paused":  # whatever `release_at` says: nobody is released before
            return SAVE_STAY_PAUSED
        return SAVE if self.config.release_at == "publish" else SAVE_RELEASE_AT_CUT

    async def _preflight(self, operation: Operation) -> Saving:
        """Every reason to leave the attempt out, before anybody is told anything (S7)."""
        if self._held is not None:
            if not self._held.over:
                raise Skip(SkipReason.STAYING_PAUSED, self._held.drive.operation.label)
            await self.let_go()  # it ended by itself, with a hold that was lost
        await self._leftovers.settle()
        if self._held_off:
            optimizer = self._held_off[-1] == "optimizer_commit"
            reason = SkipReason.OPTIMIZER_COMMIT if optimizer else SkipReason.HELD_OFF
            raise Skip(reason, self._held_off[-1])
        anchor = self._trainer_anchor()
        if self._anchor is not None and anchor is None:
            raise Skip(SkipReason.NO_TRAINER_ANCHOR)
        operation.fence = await self.store.fence()
        operation.label = f"save-{operation.fence.incarnation}-{operation.fence.sequence}"
        saving = Saving(self._setting, operation, anchor, self._last_saved)
        await saving.preflight()
        return saving

    async def _outcome(self, drive: Drive, saving: Saving) -> SaveOutcome:
        published = saving.publication is not None and saving.publication.published
        if self._held is None:
            self._leftovers.released(saving.releasing)
        if published:
            self._last_saved = drive.operation.fence
        outcome = verdict.of_save(drive, saving)
        if saving.publication is not None and saving.publication.durable:
            await self._prune()
        return outcome

    async def _prune(self) -> None:
        kept = None if self._kept_anchors is None else frozenset(self._kept_anchors())
        if kept is not None and (wrong := [step for step in kept if type(step) is not int]):
            raise ValueError(f"kept_anchors must give trainer steps (ints), not {wrong[0]!r}")
        try:
            await self.store.prune(kept, self.config.keep_latest)
        except OSError as error:  # old snapshots stay: not a reason to call the new one a failure
            log.warning("pruning failed, old snapshots are kept: %s", error)

    def _trainer_anchor(self) -> Anchor | None:
        anchor = None if self._anchor is None else self._anchor()
        if anchor is not None and not isinstance(anchor, Anchor):
            raise ValueError(f"anchor must give an Anchor(step, fingerprint) or None: {anchor!r}")
        return anchor

    # -- restore -------------------------------------------------------------------------------

    async def _restore(self, choices: Choices, until: Until | None) -> Restored | RestoreToken:
        await self.open()
        restoring = Restoring(self._setting, self._operation("restore"), choices)
        table = RESTORE if until is None else RESTORE_HANDING_OVER
        drive = self._begin(table, restoring, restore_steps.BUDGETS)
        await self._go(drive, until)
        if until is None or drive.run.machine.over:
            return verdict.of_restore(drive, restoring)
        return await self._hand_over(drive, restoring)

    async def _hand_over(self, drive: Drive, restoring: Restoring) -> RestoreToken:
        token = restoring.token(drive.left_s("restore_timeout_s"))
        self._held = Held(drive)
        if drive.run.cancelled:
            await self._leave()
            raise asyncio.CancelledError
        self._handed_over = True
        try:
            await self._opening.close()
        except asyncio.CancelledError:  # nobody gets the token: keep nobody held for it
            await self._leave()
            raise
        return token

    async def _go_on(self, token: RestoreToken) -> Restored:
        token.check({one.name: one.format_version for one in self.participants})
        await self._opening.close()
        # Before anybody is told: a token that is used twice must not disturb its first user.
        snapshot = await self._opening.take_over(token.fence, token.snapshot)
        restoring = Restoring(self._setting, self._operation("restore"))
        restoring.go_on_from(token, snapshot)
        left = {"restore_timeout_s": token.left_s}
        drive = self._begin(RESTORE_TAKING_OVER, restoring, restore_steps.BUDGETS, left)
        await self._go(drive)
        return verdict.of_restore(drive, restoring)

    async def _make_way(self) -> None:
        """A restore ends what this process handed over; paused rollouts it does not touch."""
        if self._held is not None and not self._handed_over and not self._held.over:
            raise ValueError("rollouts stay paused since the last snapshot: call let_go() first")
        await self.let_go()
        self._handed_over = False

    # -- driving -------------------------------------------------------------------------------

    def _operation(self, kind: str) -> Operation:
        trace = Trace(kind, asyncio.get_running_loop().time)
        operation = Operation(kind, self.participants, trace)
        operation.lease_s = self.config.lease_s
        return operation

    def _begin(
        self,
        table: Table,
        performing: Performing,
        budgets: Mapping[str, str],
        left_s: Mapping[str, float] | None = None,
    ) -> Drive:
        def seconds(budget: str) -> float:
            return (left_s or {}).get(budget, getattr(self.config, budget))

        return Drive(table, performing, budgets, seconds, self._leftovers.take)

    async def _go(self, drive: Drive, until: str | None = None) -> None:
        self._drive, self.last_trace = drive, drive.operation.trace
        try:
            await drive.go(until)
        except BaseException:
            self._drive = None
            raise

    async def _leave(self) -> None:
        if self._held is not None:
            await self._held.leave()
            self._held = None

"""The controller as a participant: the first to stop, the last to open (S5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from attrs import asdict

from fsm.outcome import Skip, SkipReason, SnapshotRejected
from fsm.participant import Attempt, Facts, Participant, Restore
from fsm.storing import Fence, PartWriter, SavedPart
from participants.controller.ledger import references
from participants.controller.state import Found, Records, RlState, Watched

INDEX = "index"  # {"records": {name: how many}, "counts": {...}}


class Controller(Participant):
    """The participant `controller` over any `RlState`.

    calls: the participants that it sends work to. ack_limit_s: how long a pause may wait for
    ACKs; what is not flushed then is saved as owed.
    Facts of the cut: records and counts; _settled: rollouts that are finished here.
    Facts of the restore: see `Loaded`.
    """

    name = "controller"
    restore_step = "load_controller"

    def __init__(
        self,
        rl: RlState,
        calls: Iterable[str] = ("gym", "data_plane"),
        *,
        ack_limit_s: float = 2.0,
    ) -> None:
        self.rl, self.calls, self.ack_limit_s = rl, frozenset(calls), ack_limit_s
        self._saved: tuple[Fence, object] | None = None  # the last cut, and what it had seen
        self._before: Records | None = None  # the bookkeeping that a restore replaced

    # -- save ----------------------------------------------------------------------------------

    async def preflight(self, attempt: Attempt) -> None:
        """Nothing changed: since a snapshot that was published, not only attempted."""
        if not isinstance(self.rl, Watched):
            return
        if self.rl.committing:
            raise Skip(SkipReason.OPTIMIZER_COMMIT)
        seen = self.rl.changes()
        if seen is not None and attempt.last_saved and self._saved == (attempt.last_saved, seen):
            raise Skip(SkipReason.NOTHING_CHANGED)

    async def pause(self, attempt: Attempt) -> None:
        self.rl.stop_dispatch()
        await self.rl.flush_acks(min(self.ack_limit_s, attempt.remaining_s()))

    async def cut(self, attempt: Attempt) -> Facts:
        cut = self.rl.state()
        seen = self.rl.changes() if isinstance(self.rl, Watched) else None
        index = {"records": {n: len(r) for n, r in cut.records.items()}, "counts": dict(cut.counts)}
        async with attempt.part() as part:
            await attempt.in_thread(partial(_write, part, cut.records, index))
        self._saved = (attempt.fence, seen)
        return {**index, "_settled": list(cut.settled)}

    async def resume(self, attempt: Attempt | Restore) -> None:
        """Gym has confirmed, or is named: those servers get nothing until they have. After a
        restore this is what makes the pumps send unfinished rollouts as run n+1."""
        silent = attempt.unreleased.values()
        self.rl.open_dispatch(frozenset(name for names in silent for name in names))

    # -- restore -------------------------------------------------------------------------------

    async def fence(self, restore: Restore) -> None:
        """The bookkeeping is kept for a rollback. A start from nothing has no further step."""
        self.rl.stop_dispatch()
        self._saved = None
        self._before = self.rl.state().records
        if restore.snapshot is None:
            await self.rl.load(None, Found(incarnation=restore.fence.incarnation))

    async def restore(self, restore: Restore) -> Facts:
        snapshot = restore.snapshot
        assert snapshot is not None, "restore is not called in a start from nothing"
        found = Found(
            incarnation=restore.fence.incarnation,
            anchor_step=None if snapshot.anchor is None else snapshot.anchor.step,
            gym=restore.facts.get("gym", {}),
            data_plane=restore.facts.get("data_plane", {}),
        )
        try:
            records = await restore.in_thread(partial(_read, restore.saved()))
            loaded = await self.rl.load(records, found)
        except ValueError as error:
            raise SnapshotRejected(snapshot.id, self.name, str(error)) from error
        return asdict(loaded)

    async def rollback(self, restore: Restore) -> None:  # noqa: ARG002
        """Dispatch stays closed: the trainer decides how to go on after a failed restore (R2)."""
        if self._before is not None:
            await self.rl.load(self._before, None)
            self._before = None

    # -- offline -------------------------------------------------------------------------------

    @classmethod
    def inspect(cls, saved: SavedPart) -> Mapping[str, Any]:
        """Where every prompt was at the cut. Raises SnapshotRejected for missing records.

        The references are those of our own ledger; another `RlState` may keep none.
        """
        try:
            records = _read(saved)
        except ValueError as error:
            raise SnapshotRejected(str(saved.path), cls.name, str(error)) from error
        index: Mapping[str, Any] = saved.document(INDEX)
        if "ledger" not in records or "totals" not in records:
            return index
        return {**index, **references(records["ledger"])}


def _write(part: PartWriter, records: Records, index: Mapping[str, Any]) -> None:
    for name, lines in records.items():
        write = part.records(name)
        for line in lines:
            write(line)
    part.document(INDEX, index)


def _read(saved: SavedPart) -> dict[str, list[Any]]:
    """Every record that the index names. Raises ValueError when one is missing."""
    index = saved.document(INDEX)
    records = {name: list(saved.records(name)) for name in index["records"]}
    for name, count in index["records"].items():
        if len(records[name]) != count:
            raise ValueError(f"{name}.jsonl holds {len(records[name])} of {count} records")
    return records

"""What quiesce needs of a data plane, and the participant that saves any of them.

`memory_data_plane.MemoryDataPlane` is the twin in memory, `barrier.AsyncBarrier` the barrier,
`transfer_queue` the real thing. Training rows live in partition `train` (key: the rollout, so
that a repeat overwrites), token-capture rows in `capture` (key: `<capture key>/<model call>`,
written once, never changed).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

from attrs import frozen

from fsm.outcome import Refused, SnapshotRejected
from fsm.participant import Attempt, Facts, Participant, Restore
from fsm.storing import Fence, PartWriter, SavedPart
from fsm.strict import BadInput, read

TRAIN, CAPTURE = "train", "capture"
TRAINING_ROW, CAPTURE_ROW = "training row", "capture row"  # in references between parts
BATCH_ROWS = 512  # rows per call: bounds memory, and a dead line's damage
MAX_NAMES = 100  # in facts and messages
INSPECTED = "(the one inspected)"  # a part does not know its snapshot's id

# A row: column name to a list of numbers, a number, or a text. Plain data, so that a policy
# server needs no tensor library to capture a call.
Row = Mapping[str, Any]
Tag = Mapping[str, Any]
T = TypeVar("T")

_log = logging.getLogger("quiesce.data_plane")
_MOVED = (
    "rows came or went while they were saved: a writer did not drain, or changes rows outside "
    "the barrier"
)


class CaptureSink(Protocol):
    """Where a policy server puts token-capture rows. The row is there when `put` returns."""

    async def put(self, key: str, row: Row) -> None: ...


class Barrier(Protocol):
    """Many mutations, or one cut. Cuts do not nest."""

    def mutation(self, kind: str) -> AbstractAsyncContextManager[None]: ...
    def cut(self) -> AbstractAsyncContextManager[None]: ...
    @property
    def mutations(self) -> int:
        """How many mutations began since the start: has anything changed?"""


class DataPlane(CaptureSink, Protocol):
    """Rows by partition and key. A row is there only with its tag: the tag is the commit mark.

    Raises KeyError for a missing key (naming partition and key), ValueError for a row that is
    not one (naming key and column), OSError or TimeoutError for I/O. Clearing a key that is not
    there is no error.
    """

    async def put_rows(self, partition: str, rows: Mapping[str, Row], tag: Tag) -> None: ...
    async def get_rows(self, partition: str, keys: Iterable[str]) -> dict[str, dict[str, Any]]: ...
    async def keys(self, partition: str) -> dict[str, dict[str, Any]]:
        """Committed keys and their tags."""

    async def half_born(self, partition: str) -> list[str]:
        """Keys without the commit mark: a writer died in between."""

    async def clear(self, partition: str, keys: Iterable[str]) -> None: ...


def check_row(key: str, row: Row) -> None:
    """Refuse what is not a row, before anything of it is written. Raises ValueError."""
    if not isinstance(key, str) or not key:
        raise ValueError(f"a row's key must be a text that is not empty, not {key!r}")
    if not row:
        raise ValueError(f"row {key!r} has no column; put at least one")
    for column, value in row.items():
        if not isinstance(column, str) or not _is_value(value):
            raise ValueError(
                f"row {key!r}, column {column!r}: expected a list of numbers, a number or a text, "
                f"got {type(value).__name__}"
            )


def _is_value(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return type(value) in (int, float, bool, str)
    kinds = set(map(type, value))
    if kinds <= {int, float, bool}:
        return True
    # Lists of lists (top-k log-probabilities) must be rectangular: tensors are.
    return kinds <= {list, tuple} and len(set(map(len, value))) == 1 and all(map(_is_value, value))


def row_missing(partition: str, key: str, wanted_by: str) -> Refused:
    """The refusal of a snapshot or a restore that would lose a row."""
    return Refused("row_missing", f"{wanted_by} names row {key!r}, which is not in {partition!r}")


@frozen
class Listing:
    """What a data plane holds, by partition: tags by key, and keys without the commit mark."""

    tags: Mapping[str, Mapping[str, Tag]]
    half_born: Mapping[str, tuple[str, ...]]

    @property
    def train(self) -> Mapping[str, Tag]:
        return self.tags.get(TRAIN, {})

    @property
    def capture(self) -> Mapping[str, Tag]:
        return self.tags.get(CAPTURE, {})

    def __len__(self) -> int:
        """Rows of all partitions, half-born ones included."""
        return sum(map(len, (*self.tags.values(), *self.half_born.values())))

    def counts(self) -> dict[str, int]:
        return {"train_rows": len(self.train), "capture_rows": len(self.capture)}

    def half_born_names(self) -> list[str]:
        """`partition/key`, at most MAX_NAMES."""
        names = [f"{name}/{key}" for name, keys in self.half_born.items() for key in keys]
        return sorted(names)[:MAX_NAMES]


@frozen
class _Record:
    """One row in the part. tag and row are JSON texts of their own: a log-probability may be
    -Infinity, for which strict JSON has no form."""

    key: str
    tag: str
    row: str


class DataPlanePart(Participant):
    """The participant `data_plane`: writes the rows of any DataPlane as JSONL, puts them back.

    A subclass that has a better way to keep rows overrides `_write`, `_load` and `_list`.
    Facts of the cut: train_rows, capture_rows, half_born (at most 100 `partition/key`).
    Facts of the restore: train_rows, capture_rows, _train ({key: tag}), _capture ([key]).
    """

    name = "data_plane"
    restore_step = "load_data_plane"

    def __init__(self, plane: DataPlane) -> None:
        self.plane = plane
        self._loading: Fence | None = None  # the restore that began to fill the plane

    async def cut(self, attempt: Attempt) -> Facts:
        """Every row that an unfinished rollout names has to be there, or its history is lost (S3).
        The rows of one that the ledger has sealed are cleared before Gym forgets its result."""
        held = await self._list()
        sealed = frozenset(attempt.facts.get("controller", {}).get("_settled", ()))
        for rollout, rows in attempt.facts.get("gym", {}).get("_rows", {}).items():
            for key in rows:
                if key not in held.capture and rollout not in sealed:
                    raise row_missing(CAPTURE, key, f"rollout {rollout!r}")
        if half_born := held.half_born_names():
            _log.warning("rows without commit mark in the cut: %s", ", ".join(half_born))
        async with attempt.part() as part:
            await self._write(attempt, part, held)
            if await self._list() != held:
                raise Refused("moved_during_cut", _MOVED)
        return {**held.counts(), "half_born": half_born}

    async def restore(self, restore: Restore) -> Facts:
        """Only into an empty plane: rows of another time would be mixed in."""
        held = await self._list()
        strays = [*held.capture, *held.half_born.get(CAPTURE, ())]
        if present := len(held) - len(strays):
            raise Refused(
                "not_empty", f"the data plane holds {present} rows of another time; start it anew"
            )
        if strays:
            # Policy servers that lived on put rows of their old runs into a plane that is new.
            # Gym is fenced by now: there will be no more, and those runs are over (R4).
            _log.info("clearing %d token-capture rows of runs that end here", len(strays))
            await self._clear(CAPTURE, strays)
        self._loading = restore.fence
        await self._load(restore)
        held = await self._list()
        return {**held.counts(), "_train": dict(held.train), "_capture": list(held.capture)}

    async def take_over(self, restore: Restore) -> None:
        self._loading = restore.fence

    async def reconcile(self, restore: Restore) -> None:
        """Keep exactly the rows that the controller's join keeps; half-born ones go."""
        join = restore.facts["controller"]
        held = await self._list()
        kept = {TRAIN: frozenset(join["keep_train"]), CAPTURE: frozenset(join["keep_capture"])}
        for partition, present in ((TRAIN, held.train), (CAPTURE, held.capture)):
            if lost := sorted(kept[partition] - present.keys()):
                raise row_missing(partition, lost[0], "the restored ledger")
        for partition, present in ((TRAIN, held.train), (CAPTURE, held.capture)):
            leftover = [key for key in present if key not in kept[partition]]
            await self._clear(partition, [*leftover, *held.half_born.get(partition, ())])

    async def rollback(self, restore: Restore) -> None:
        """Empty what this restore loaded. A plane that it refused is not touched."""
        if self._loading != restore.fence:
            return
        held = await self._list()
        for of_partition in (held.tags, held.half_born):
            for partition, keys in of_partition.items():
                await self._clear(partition, keys)
        self._loading = None

    @classmethod
    def inspect(cls, saved: SavedPart) -> Mapping[str, Any]:
        """Row counts, every record read and checked."""
        train, capture = (
            [record.key for record in _records(saved, partition, INSPECTED)]
            for partition in (TRAIN, CAPTURE)
        )
        counts = {"train_rows": len(train), "capture_rows": len(capture)}
        return counts | {"_has": has_rows(train, capture)}

    # -- how rows are kept ---------------------------------------------------------------------

    async def _write(self, attempt: Attempt, part: PartWriter, held: Listing) -> None:
        for partition, tags in ((TRAIN, held.train), (CAPTURE, held.capture)):
            write = part.records(partition)
            for keys in batches(tags):
                rows = await self.plane.get_rows(partition, keys)
                await attempt.in_thread(partial(_write_records, write, rows, tags))

    async def _load(self, restore: Restore) -> None:
        saved = restore.saved()
        for partition in (TRAIN, CAPTURE):
            records = _records(saved, partition, snapshot_id(restore))
            while by_tag := await restore.in_thread(partial(_take, records)):
                for tag, rows in by_tag.items():
                    await self.plane.put_rows(partition, rows, json.loads(tag))

    async def _list(self) -> Listing:
        both = (TRAIN, CAPTURE)
        return Listing(
            tags={name: await self.plane.keys(name) for name in both},
            half_born={name: tuple(await self.plane.half_born(name)) for name in both},
        )

    async def _clear(self, partition: str, keys: Iterable[str]) -> None:
        for batch in batches(keys):
            await self.plane.clear(partition, batch)


def batches(keys: Iterable[str]) -> Iterator[list[str]]:
    """At most BATCH_ROWS keys at a time."""
    rest = iter(keys)
    while batch := list(islice(rest, BATCH_ROWS)):
        yield batch


def snapshot_id(restore: Restore) -> str:
    return restore.snapshot.id if restore.snapshot else "(none)"


def has_rows(train: Iterable[str], capture: Iterable[str]) -> dict[str, list[str]]:
    """What a data plane's part has, in the words of `quiesce verify`."""
    return {TRAINING_ROW: list(train), CAPTURE_ROW: list(capture)}


def _write_records(write: Any, rows: Mapping[str, Row], tags: Mapping[str, Tag]) -> None:
    for key, row in rows.items():
        write({"key": key, "tag": json.dumps(dict(tags[key])), "row": json.dumps(dict(row))})


def _take(records: Iterator[_Record]) -> dict[str, dict[str, Row]]:
    """The next rows, by tag: what one `put_rows` can put."""
    by_tag: dict[str, dict[str, Row]] = {}
    for record in islice(records, BATCH_ROWS):
        by_tag.setdefault(record.tag, {})[record.key] = json.loads(record.row)
    return by_tag


def _records(saved: SavedPart, partition: str, snapshot: str) -> Iterator[_Record]:
    for number, data in enumerate(saved.records(partition), 1):
        yield read_saved(_Record, data, f"{partition}.jsonl, line {number}", snapshot)


def read_saved(kind: type[T], data: Any, what: str, snapshot: str) -> T:
    """Strict reading of a part's file. Raises SnapshotRejected naming every bad key."""
    try:
        return read(kind, data, what)
    except BadInput as error:
        raise SnapshotRejected(snapshot, what, "; ".join(error.problems)) from None

"""A Gym server's part of a snapshot: packed JSONL files below the server's own root (F2, F5)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from attrs import frozen

from fsm.outcome import Refused, SnapshotRejected
from fsm.storing import FileEntry
from participants.gym import wire
from storage.part import PartFolder, SavedFolder

T = TypeVar("T")
Read = Callable[[str], Iterator[Any]]  # the records of a file, by its name without .jsonl


@frozen
class Export:
    """What a part hands out at commit (H4). `records` may be lazy, but over data that no longer
    changes: they are encoded in another thread while the server goes on."""

    records: Mapping[str, Iterable[Any]]
    report: wire.Report


class Part(Protocol):
    """What one kind of server keeps. All methods are synchronous and run under the gate."""

    kind: wire.Kind
    name: str

    def begin(self) -> None:
        """The gate has just closed."""

    def freeze(self) -> None:
        """Nobody calls us any more on behalf of a turn: let nothing begin (H7)."""

    def blockers(self) -> list[str]:
        """Names of what still moves."""

    def give_up(self) -> None:
        """Leave out what still moves: it starts over if this snapshot is restored."""

    def export(self, commit: wire.Commit) -> Export:
        """One copy of everything (H4). Raises `Refused`."""

    def check(self, read: Read) -> Any:
        """A saved part as `stage` takes it. Touches nothing: it runs in a thread. Reads every
        file to its end (only then its digest is known), and raises ValueError for what is wrong."""

    def stage(self, checked: Any) -> wire.Report:
        """Keep it aside (R1)."""

    def activate(self, incarnation: int) -> None:
        """Close every run of an older incarnation; replace what is here with what is staged."""

    def drop(self) -> None:
        """Forget what is staged."""

    def discard(self, rollouts: tuple[str, ...]) -> None:
        """Take these rollouts out of what is staged."""

    def live_runs(self) -> int: ...


def place_of(kind: str, name: str) -> str:
    """Where a server's files are in a snapshot. Raises ValueError for a name that is no folder."""
    return f"gym/{kind}/{name}"


def write_part(
    root: Path, folder: str, place: str, records: Mapping[str, Iterable[Any]], stop: threading.Event
) -> tuple[FileEntry, ...]:
    """Write and fsync every file. Runs in a thread.

    stop: set when the hold has ended; the part is left unfinished then and `Refused` raised.
    """
    try:
        target = PartFolder(root, folder, place)
    except ValueError as error:
        raise Refused(wire.BAD_REQUEST, str(error)) from None
    with target as part:
        for name, rows in records.items():
            write = part.records(name)
            for row in rows:
                if stop.is_set():
                    raise Refused(wire.STALE_FENCE, "the hold ended while the part was written")
                write(row)
    return part.files


def read_part(
    root: Path, snapshot: str, place: str, files: tuple[FileEntry, ...], check: Callable[[Read], T]
) -> T:
    """`check` of a part whose digests are verified while it is read. Runs in a thread.

    snapshot "" is an empty part (a start from nothing). Raises Refused(invalid_checkpoint_state),
    naming the file and the reason.
    """
    if not snapshot:
        return check(lambda _: iter(()))
    try:
        saved = SavedFolder(root, snapshot, place, files)
    except ValueError as error:
        raise Refused(wire.BAD_REQUEST, str(error)) from None
    try:
        return check(saved.records)
    except (SnapshotRejected, ValueError) as error:
        raise Refused(wire.BAD_STATE, str(error)[:2000]) from error

"""What the engine needs of a place that keeps snapshots. `storage.FolderStore` is one.

The engine decides *when*; a store decides *how*, and owns rules F1 to F6 (specs/folder.md).
Methods are coroutines: a store does its disk work off the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from attrs import frozen

from fsm.outcome import Anchor


@frozen(order=True)
class Fence:
    """Which attempt a message belongs to. Greater (incarnation, sequence) is newer (H1)."""

    root: str
    incarnation: int
    sequence: int


@frozen
class FileEntry:
    """One file of a snapshot: path below the snapshot's folder, size, SHA-256 in hex."""

    path: str
    size_bytes: int
    sha256: str


@frozen
class Publication:
    """What became of the rename. `published` False: the claim was won, it will never appear."""

    published: bool
    durable: bool = False


class PartWriter(Protocol):
    """One participant's folder while it is written; files are hashed as they are written,
    fsynced on leaving the context. An error inside leaves a part that will not be sealed."""

    @property
    def path(self) -> Path: ...
    def records(self, name: str) -> Callable[[Any], None]:
        """A function that appends one JSON-able record to `<name>.jsonl`."""

    def document(self, name: str, value: Any) -> None:
        """Write one JSON-able value as `<name>.json`."""

    def adopt(self) -> None:
        """Digest and fsync files that somebody else wrote below `path`."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Draft(Protocol):
    """One unpublished snapshot folder."""

    @property
    def id(self) -> str: ...
    @property
    def fence(self) -> Fence: ...
    @property
    def name(self) -> str:
        """The unpublished folder's name below the root: what a Gym server is told to write into."""

    def part(self, folder: str) -> PartWriter: ...
    def note(self, files: tuple[FileEntry, ...]) -> None:
        """Enter files that a server wrote itself, with the digests it computed (F2)."""


class SavedPart(Protocol):
    """One participant's folder in a verified snapshot; reads check digests again (F2)."""

    @property
    def path(self) -> Path: ...
    def records(self, name: str) -> Iterator[Any]: ...
    def document(self, name: str) -> Any: ...
    def files(self) -> tuple[FileEntry, ...]: ...


class SavedSnapshot(Protocol):
    """A published snapshot that verified."""

    @property
    def id(self) -> str: ...
    @property
    def fence(self) -> Fence: ...
    @property
    def anchor(self) -> Anchor | None: ...
    @property
    def facts(self) -> Mapping[str, Mapping[str, Any]]: ...
    @property
    def formats(self) -> Mapping[str, int]: ...
    def part(self, folder: str) -> SavedPart: ...


class Store(Protocol):
    """Begin, seal, publish, discard; newest; open and close.

    Errors are `OSError` for the disk, `SnapshotRejected` for a snapshot that may not be used.
    """

    @property
    def incarnation(self) -> int: ...
    async def open(self) -> None:
        """Take the root (one writer), raise the incarnation, sweep what nobody published (F6)."""

    async def close(self) -> None: ...
    async def fence(self) -> Fence:
        """The fence of a new operation: the next sequence of this incarnation."""

    async def begin(self, fence: Fence) -> Draft:
        """Make the unpublished folder. OSError: no room, not writable."""

    async def seal(self, draft: Draft, body: Mapping[str, Any]) -> None:
        """Manifest last; every file and directory fsynced.

        body: exactly the keys `topology` (what must be equal at restore), `config`, `anchor`
        (an Anchor or None), `formats` (participant: format version) and `facts` (participant:
        its facts); all JSON-able. The store adds ids, files, digests and counts.
        """

    async def publish(self, draft: Draft) -> Publication:
        """One rename. Never raises for an unknown outcome: it looks until it knows (S2)."""

    async def discard(self, draft: Draft) -> None:
        """Claim the folder (rename to trash), then delete it. Safe to repeat."""

    async def newest(
        self, topology: Mapping[str, Any], formats: Mapping[str, int], *, if_bad: str
    ) -> SavedSnapshot | None:
        """The newest eligible snapshot, verified whole before anything is read from it (F3).

        if_bad: "raise", or "older" to quarantine a rejected one and try the one before (R2).
        """

    async def take_over(self, fence: Fence, snapshot: str | None) -> SavedSnapshot | None:
        """Instead of `open`: go on in the incarnation of `fence`, which began a restore of
        `snapshot` in another process and has let the root go (R8).

        Raises BlockingIOError while somebody has the root, ValueError when another controller
        began since, or that restore is over. The snapshot was verified by the one who began.
        """

    async def restored(self, snapshot: SavedSnapshot | None) -> None:
        """Record durably which snapshot this incarnation goes on from (F6)."""

    async def prune(
        self, kept_anchors: frozenset[int] | None = None, keep_latest: int | None = None
    ) -> None:
        """Retention: only after a newer snapshot is durable (F4).

        kept_anchors: trainer steps of which the newest snapshot is kept; None: of none.
        keep_latest: how many are kept in any case; None: as many as the store was made with.
        """

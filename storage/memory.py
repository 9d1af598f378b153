"""MemoryStore: the same rules as FolderStore without a disk, and with faults on demand.

It uses no threads, so it works on a virtual-time loop. What a restart would find is in
`MemoryDisk`: `MemoryStore(old.disk)` is the next incarnation on the same root.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from errno import EAGAIN, ENOENT
from typing import Any

from attrs import define, field

from fsm.outcome import SnapshotRejected
from fsm.storing import Draft, Fence, Publication, SavedSnapshot
from storage import names
from storage.choice import first_whole, surplus
from storage.lineage import Record, check_take_over, eligible
from storage.manifest import decode, encode
from storage.memory_faults import Faults
from storage.memory_parts import Files, MemoryDraft, MemorySaved, entry_of
from storage.reader import check_fit


@define
class MemoryDisk:
    """What outlives a process. `snapshots`, `drafts`, `quarantine`: {folder: {path: content}}."""

    root: str = "memory"
    incarnation: int = 0
    holder: MemoryStore | None = None
    records: list[Record] = field(factory=list)
    drafts: dict[str, Files] = field(factory=dict)
    snapshots: dict[str, Files] = field(factory=dict)
    quarantine: dict[str, Files] = field(factory=dict)

    def flip(self, snapshot: str, path: str) -> None:
        """Damage one file of a published snapshot: one bit in its middle."""
        content = bytearray(self.snapshots[snapshot][path])
        content[len(content) // 2] ^= 1
        self.snapshots[snapshot][path] = bytes(content)


class MemoryStore:
    """The `Store` of fsm/storing.py in memory. `faults` makes it fail (memory_faults.py)."""

    def __init__(self, disk: MemoryDisk | None = None, *, keep_latest: int = 2) -> None:
        self.disk = disk or MemoryDisk()
        self.faults = Faults()
        self.incarnation = 0
        self._keep_latest = keep_latest
        self._sequence = 0
        self._parent: str | None = None
        self._goes_on = False
        self._durable: str | None = None
        self._publishing: set[asyncio.Task[Publication]] = set()

    # -- open and close ------------------------------------------------------------------------

    async def open(self) -> None:
        self.faults.check("open")
        if self.disk.holder is not None:
            raise BlockingIOError(EAGAIN, "in use by another MemoryStore", self.disk.root)
        self.disk.holder = self
        self.disk.incarnation += 1
        self.incarnation = self.disk.incarnation
        self.disk.drafts.clear()
        self._sequence, self._parent = 0, None
        self._goes_on, self._durable = False, next(iter(self._chain()), None)

    async def take_over(self, fence: Fence, snapshot: str | None) -> SavedSnapshot | None:
        self.faults.check("take_over")
        if self.disk.holder is not None:
            raise BlockingIOError(EAGAIN, "in use by another MemoryStore", self.disk.root)
        done = [record.at for record in self.disk.records]
        done += [names.order_of(published) for published in self.disk.snapshots]
        check_take_over(fence, self.disk.root, self.disk.incarnation, done)
        self.disk.holder, self.incarnation = self, fence.incarnation
        self._sequence, self._parent = fence.sequence, None
        self._goes_on, self._durable = False, next(iter(self._chain()), None)
        return None if snapshot is None else self._whole(snapshot)

    async def close(self) -> None:
        for task in self._publishing:
            task.cancel()
        self.crash()

    def crash(self) -> None:
        """As if the process had died: the lock is free, unpublished folders stay."""
        if self.disk.holder is self:
            self.disk.holder = None

    async def fence(self) -> Fence:
        self._sequence += 1
        return Fence(self.disk.root, self.incarnation, self._sequence)

    # -- save ----------------------------------------------------------------------------------

    async def begin(self, fence: Fence) -> Draft:
        self.faults.check("begin")
        if (fence.root, fence.incarnation) != (self.disk.root, self.incarnation):
            raise ValueError(
                f"{fence} is not of this incarnation ({self.incarnation}) of this root"
            )
        if not self._goes_on:
            if chain := self._chain():
                raise ValueError(
                    f"the root holds {chain[0]}: call Engine.restore() before the "
                    f"first save (or, on the store, restored(None) to start from nothing)"
                )
            self._record(None, sequence=0)
        draft = MemoryDraft(fence, self.faults)
        self.disk.drafts[draft.name] = draft.content
        return draft

    async def seal(self, draft: Draft, body: Mapping[str, Any]) -> None:
        own = _own(draft)
        own.check_whole()
        try:
            self.faults.check("seal")
            if own.name not in self.disk.drafts:
                raise FileNotFoundError(ENOENT, "the unpublished folder is gone", own.name)
            own.check_found({path: len(content) for path, content in own.content.items()})
            own.content[names.MANIFEST] = encode(own.manifest(body, self._parent))
        except BaseException as error:
            own.fail(f"sealing ended with {error!r}")
            raise

    async def publish(self, draft: Draft) -> Publication:
        own = _own(draft)
        own.check_whole()
        if names.MANIFEST not in own.content:
            raise ValueError(f"{own.id} is not sealed")
        if own.publishing is None:
            own.publishing = asyncio.ensure_future(self._publish(own))
            self._publishing.add(own.publishing)
            own.publishing.add_done_callback(self._publishing.discard)
        return await asyncio.shield(own.publishing)

    async def _publish(self, draft: MemoryDraft) -> Publication:
        fault = self.faults.take_publish()
        if fault.renamed_early:
            self._rename(draft)
        await fault.wait()
        if fault.published and self.incarnation == self.disk.incarnation:
            self._rename(draft)
        self.disk.drafts.pop(draft.name, None)
        published = draft.id in self.disk.snapshots
        if published and fault.durable:
            self._durable = draft.id
        return Publication(published, published and fault.durable)

    def _rename(self, draft: MemoryDraft) -> None:
        if self.disk.drafts.pop(draft.name, None) is not None:
            self.disk.snapshots[draft.id] = draft.content
            self._parent = draft.id

    async def discard(self, draft: Draft) -> None:
        self.faults.check("discard")
        self.disk.drafts.pop(_own(draft).name, None)

    # -- restore and retention -----------------------------------------------------------------

    async def newest(
        self, topology: Mapping[str, Any], formats: Mapping[str, int], *, if_bad: str
    ) -> SavedSnapshot | None:
        self.faults.check("newest")

        def verified(snapshot: str) -> MemorySaved:
            saved = self._whole(snapshot)
            check_fit(saved.manifest, self.disk.root, topology, formats)
            return saved

        saved, rejected = first_whole(self._chain(), verified, if_bad)
        for error in rejected:
            self.disk.quarantine[error.snapshot] = self.disk.snapshots.pop(error.snapshot)
        return saved

    async def restored(self, snapshot: SavedSnapshot | None) -> None:
        self.faults.check("restored")
        self._sequence += 1
        self._record(snapshot.id if snapshot else None, self._sequence)

    async def prune(
        self, kept_anchors: frozenset[int] | None = None, keep_latest: int | None = None
    ) -> None:
        self.faults.check("prune")
        chain, anchors = self._chain(), kept_anchors or frozenset()
        keep = keep_latest or self._keep_latest
        for old in surplus(chain, self._durable, keep, anchors, self._anchor_step):
            del self.disk.snapshots[old]

    def _record(self, snapshot: str | None, sequence: int) -> None:
        self.disk.records.append(Record((self.incarnation, sequence), snapshot))
        self._parent, self._goes_on = snapshot, True

    def _chain(self) -> list[str]:
        return eligible(self.disk.snapshots, self.disk.records)

    def _anchor_step(self, snapshot: str) -> int | None:
        anchor = self._whole(snapshot).anchor
        return anchor.step if anchor else None

    def _whole(self, snapshot: str) -> MemorySaved:
        content = self.disk.snapshots[snapshot]
        try:
            manifest = decode(content[names.MANIFEST])
        except ValueError as error:
            raise SnapshotRejected(snapshot, names.MANIFEST, str(error)) from error
        for entry in manifest.files:
            if entry_of(entry.path, content.get(entry.path, b"")) != entry:
                raise SnapshotRejected(snapshot, entry.path, "its SHA-256 is not the manifest's")
        return MemorySaved(manifest, content)


def _own(draft: Draft) -> MemoryDraft:
    if not isinstance(draft, MemoryDraft):
        raise TypeError(f"{draft!r} is not a draft of a MemoryStore")
    return draft

"""FolderStore: snapshots as folders below one root (specs/folder.md).

    tmp_000003-000012_<nonce>  --publish-->  snapshot_000003-000012
    either  --claim-->  trash_...  -->  deleted

Each coroutine does its disk work in a thread, one at a time. A caller that is cancelled leaves
the thread to finish; `close` waits for it before it lets the root go.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fsm.outcome import SnapshotRejected
from fsm.storing import Draft, Fence, Publication, SavedSnapshot
from storage import durable, names
from storage.choice import first_whole, surplus
from storage.draft import FolderDraft
from storage.manifest import encode
from storage.publish import Publisher
from storage.reader import Saved, check_files, check_fit, read_manifest, verify_snapshot
from storage.root import Root

log = logging.getLogger("quiesce.storage")
T = TypeVar("T")


class FolderStore:
    """The `Store` of fsm/storing.py on a file system.

    root: the folder that holds the snapshots; made if missing, its parent must exist.
    keep_latest: how many durable snapshots retention keeps, at least 1, where `prune` is not
    told; an engine tells it what its configuration says.
    key: with it every manifest is signed (HMAC-SHA256), and one that is not is refused: a
    snapshot may hold pickles, so it is code, and the key must not lie in the root (F3).

    Errors are OSError naming step and path, and `SnapshotRejected` naming file and reason.
    """

    def __init__(self, root: Path | str, *, keep_latest: int = 2, key: bytes | None = None) -> None:
        if keep_latest < 1:
            raise ValueError(f"keep_latest must be at least 1, not {keep_latest!r}")
        self._root = Root(Path(root).absolute())
        self._keep_latest, self._key = keep_latest, key
        self._sequence = 0
        self._parent: str | None = None
        self._goes_on = False  # has it been recorded what this incarnation goes on from?
        self._durable: str | None = None  # newest snapshot known to be whole and durable
        self._at_open: list[str] = []
        self._disk = threading.Lock()
        self._threads: set[asyncio.Task[Any]] = set()
        self._publishing: set[asyncio.Task[Publication]] = set()

    @property
    def root(self) -> Path:
        return self._root.path

    @property
    def incarnation(self) -> int:
        return self._root.incarnation

    # -- open and close ------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the root, raise the incarnation, sweep. Raises BlockingIOError naming the holder."""
        await self._off_loop(self._open)

    async def close(self) -> None:
        """Let the root go, after every thread has ended. Safe to repeat.

        A publish whose outcome is still unknown is cancelled; the next start decides it.
        """
        for task in self._publishing:
            task.cancel()
        if running := self._threads | self._publishing:
            await asyncio.wait(running)
        self._root.release()

    def _open(self) -> None:
        self._root.take()
        self._begin_after(0)

    async def take_over(self, fence: Fence, snapshot: str | None) -> SavedSnapshot | None:
        """Instead of `open`: go on with a restore that another process began (R8, F6.6)."""
        return await self._off_loop(self._take_over, fence, snapshot)

    def _take_over(self, fence: Fence, snapshot: str | None) -> Saved | None:
        self._root.take_over(fence)
        self._begin_after(fence.sequence)
        if snapshot is None:
            return None
        folder = self.root / names.check_folder(snapshot)
        return Saved(read_manifest(folder, self._key), self.root)

    def _begin_after(self, sequence: int) -> None:
        # The root was fsynced after these names were there: they are durable.
        self._at_open = self._root.eligible()
        self._sequence, self._parent = sequence, None
        self._goes_on, self._durable = False, None

    async def fence(self) -> Fence:
        self._check_open()
        self._sequence += 1
        return Fence(self._root.uuid, self.incarnation, self._sequence)

    # -- save ----------------------------------------------------------------------------------

    async def begin(self, fence: Fence) -> Draft:
        """Make the unpublished folder.

        Raises OSError; ValueError for a foreign fence, or if nobody said by `restored` what this
        incarnation goes on from although there are snapshots: a cold start is never silent (R2).
        """
        self._check_open()
        if (fence.root, fence.incarnation) != (self._root.uuid, self.incarnation):
            raise ValueError(
                f"{fence} is not of this incarnation ({self.incarnation}) of this root"
            )
        return await self._off_loop(self._begin, fence)

    def _begin(self, fence: Fence) -> FolderDraft:
        if not self._goes_on:
            if self._at_open:
                raise ValueError(
                    f"{self.root} holds {self._at_open[0]}: call Engine.restore() before the "
                    f"first save (or, on the store, restored(None) to start from nothing)"
                )
            self._record(None, sequence=0)
        draft = FolderDraft(self.root, fence)
        durable.make_directory(draft.path)
        durable.point("begun")
        return draft

    async def seal(self, draft: Draft, body: Mapping[str, Any]) -> None:
        """Manifest last, then every directory, bottom-up; writers have fsynced their files.

        Raises OSError, also if a file is on the disk that nobody entered; the draft can only be
        discarded then. Raises BadInput for a body with other keys.
        """
        await self._off_loop(self._seal, _own(draft), body)

    def _seal(self, draft: FolderDraft, body: Mapping[str, Any]) -> None:
        draft.check_whole()
        try:
            draft.check_found(durable.files_below(draft.path))
            data = encode(draft.manifest(body, self._parent), self._key)
            durable.write_file(draft.path / names.MANIFEST, data)
            durable.point("manifest_written")
            durable.fsync_tree(draft.path)
        except BaseException as error:
            draft.fail(f"sealing ended with {error!r}")
            raise
        draft.digest = hashlib.sha256(data).hexdigest()
        durable.point("sealed")

    async def publish(self, draft: Draft) -> Publication:
        """One rename. Looks until the outcome is known, also if the caller is cancelled (S2).

        Again for the same draft: the same answer.
        """
        own = _own(draft)
        own.check_whole()
        if own.digest is None:
            raise ValueError(f"{own.id} is not sealed")
        if own.publishing is None:
            own.publishing = asyncio.ensure_future(self._publish(own))
            self._publishing.add(own.publishing)
            own.publishing.add_done_callback(self._publishing.discard)
        return await asyncio.shield(own.publishing)

    async def _publish(self, draft: FolderDraft) -> Publication:
        publication = await Publisher(self._root, self._off_loop).publish(draft)
        if publication.published:
            self._parent = draft.id
        if publication.durable:
            self._durable = draft.id
        return publication

    async def discard(self, draft: Draft) -> None:
        """Claim the folder, then delete it. Safe to repeat, and after publish: that moved it."""
        await self._off_loop(self._root.claim, _own(draft).name)

    # -- restore -------------------------------------------------------------------------------

    async def newest(
        self, topology: Mapping[str, Any], formats: Mapping[str, int], *, if_bad: str
    ) -> SavedSnapshot | None:
        """The newest eligible snapshot, verified whole; None if there is none.

        if_bad="older" goes back past rejected ones, and renames them to `quarantine_...` once an
        older one has verified. If none does, the newest one's rejection is raised and nothing
        is renamed: a wrong configuration must not put every snapshot aside.
        """
        self._check_open()
        return await self._off_loop(self._newest, topology, formats, if_bad)

    def _newest(
        self, topology: Mapping[str, Any], formats: Mapping[str, int], if_bad: str
    ) -> Saved | None:
        chain = self._root.eligible()
        if ignored := len(self._root.snapshots()) - len(chain):
            log.warning(
                "%s: %d snapshots are not on the chain of what was restored", self.root, ignored
            )

        def verified(snapshot: str) -> Saved:
            return self._verified(snapshot, topology, formats)

        saved, rejected = first_whole(chain, verified, if_bad)
        self._quarantine(rejected)
        return saved

    def _verified(
        self, snapshot: str, topology: Mapping[str, Any], formats: Mapping[str, int]
    ) -> Saved:
        """Cheap checks first: another job's snapshot is refused without reading its bytes."""
        manifest = read_manifest(self.root / snapshot, self._key)
        check_fit(manifest, self._root.uuid, topology, formats)
        check_files(self.root / snapshot, manifest)
        return Saved(manifest, self.root)

    def _quarantine(self, rejected: list[SnapshotRejected]) -> None:
        for error in rejected:
            log.warning("%s; put aside as quarantine_%s", error, error.snapshot)
            aside = self.root / f"quarantine_{error.snapshot}"
            durable.rename_noreplace(self.root / error.snapshot, aside)
        if rejected:
            durable.fsync_directory(self.root)

    async def restored(self, snapshot: SavedSnapshot | None) -> None:
        """Record durably what this incarnation goes on from (None: a start from nothing)."""
        self._check_open()
        self._sequence += 1
        await self._off_loop(self._record, snapshot.id if snapshot else None, self._sequence)

    def _record(self, snapshot: str | None, sequence: int) -> None:
        self._root.record(sequence, snapshot)
        self._parent, self._goes_on = snapshot, True

    # -- retention -----------------------------------------------------------------------------

    async def prune(
        self, kept_anchors: frozenset[int] | None = None, keep_latest: int | None = None
    ) -> None:
        """Delete what retention does not keep. Does nothing until a newer snapshot is durable (F4).

        Kept are the newest `keep_latest`, counted from the newest durable one back, and the
        newest snapshot of each trainer step in `kept_anchors`. Snapshots that are not on the
        chain (F6) and folders with unknown names are left alone.
        """
        self._check_open()
        keep = keep_latest or self._keep_latest
        await self._off_loop(self._prune, kept_anchors or frozenset(), keep)

    def _prune(self, kept_anchors: frozenset[int], keep: int) -> None:
        newest = self._durable or self._whole_at_open()
        chain = self._root.eligible()
        for snapshot in surplus(chain, newest, keep, kept_anchors, self._anchor_step):
            log.info("pruning %s", snapshot)
            self._root.claim(snapshot, durably=True)

    def _whole_at_open(self) -> str | None:
        """Before this incarnation has published: the newest one, if all of it verifies."""
        if self._at_open:
            verify_snapshot(self.root / self._at_open[0], self._key)
            self._durable = self._at_open[0]
        return self._durable

    def _anchor_step(self, snapshot: str) -> int | None:
        try:
            anchor = read_manifest(self.root / snapshot, self._key).anchor
        except SnapshotRejected as error:
            log.warning("%s", error)
            return None
        return anchor.step if anchor else None

    # -- threads -------------------------------------------------------------------------------

    async def _off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what touches the disk in a thread; it ends even if the caller is cancelled."""

        def one_at_a_time() -> T:
            with self._disk:
                return function(*arguments)

        task = asyncio.ensure_future(asyncio.to_thread(one_at_a_time))
        self._threads.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._threads.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.debug("%r", error)  # its caller has it too, unless it was cancelled

    def _check_open(self) -> None:
        if not self._root.taken:
            raise ValueError(f"the store of {self.root} is not open: call open() first")


def _own(draft: Draft) -> FolderDraft:
    if not isinstance(draft, FolderDraft):
        raise TypeError(f"{draft!r} is not a draft of a FolderStore")
    return draft

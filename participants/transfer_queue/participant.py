"""The participant `data_plane` for TransferQueue: its own checkpoint, in our folder.

Its checkpoint is pickles without digests or fsync; its load checks the unit count and nothing
else, and is not transactional. So: saved into our unpublished folder, digested and fsynced by us,
verified whole by the store before anything is unpickled (F3), loaded only into an empty
TransferQueue that is like the one saved; and after a failed load only a fresh one will do
(specs/adr/0006).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import transfer_queue as tq
from attrs import asdict

from fsm.outcome import Refused
from fsm.participant import Attempt, Restore
from fsm.storing import PartWriter, SavedPart
from fsm.strict import write
from participants.data_plane import (
    DataPlanePart,
    Listing,
    snapshot_id,
)
from participants.transfer_queue.contents import (
    CHECKPOINT,
    DOCUMENT,
    Topology,
    contents_of,
    inspect,
    inventory_digest,
    read_contents,
)
from participants.transfer_queue.plane import TransferQueuePlane


class TransferQueue(DataPlanePart):
    """Saves and loads the TransferQueue behind `plane`, all partitions and read cursors of it.

    With storage units on several hosts the snapshot root must be a file system that all of them
    see at the same path.
    """

    plane: TransferQueuePlane

    def __init__(self, plane: TransferQueuePlane) -> None:
        super().__init__(plane)
        self._spoilt = False  # a load began and did not come to its end

    async def describe(self) -> Mapping[str, Any]:
        return asdict(self.plane.topology)

    async def _list(self) -> Listing:
        return await self.plane.listing()

    async def _write(self, attempt: Attempt, part: PartWriter, held: Listing) -> None:
        folder = part.path.absolute() / CHECKPOINT  # its actors have working folders of their own
        await attempt.in_thread(partial(_save, folder))
        part.document(DOCUMENT, write(contents_of(self.plane.topology, held)))
        await attempt.in_thread(part.adopt)

    async def _load(self, restore: Restore) -> None:
        saved = restore.saved()
        contents = read_contents(saved, snapshot_id(restore))
        self._must_fit(contents.topology)
        self._spoilt = True
        try:
            await restore.in_thread(partial(tq.load_checkpoint, saved.path.absolute() / CHECKPOINT))
        except Exception as error:
            raise _fresh_start(f"loading failed part way: {error}") from error
        if inventory_digest(await self._list()) != contents.inventory_sha256:
            raise _fresh_start(f"after loading, keys or tags differ from those of {saved.path}")
        self._spoilt = False

    async def rollback(self, restore: Restore) -> None:
        """Empty what was loaded. After a load that failed or still runs nothing is certain."""
        if self._spoilt:
            raise _fresh_start("an earlier load did not come to its end")
        await super().rollback(restore)

    def _must_fit(self, saved: Topology) -> None:
        if self._spoilt:
            raise _fresh_start("an earlier load did not come to its end")
        ours, theirs = asdict(self.plane.topology), asdict(saved)
        if differ := [
            f"{k} {theirs[k]!r} saved, {ours[k]!r} here" for k in ours if ours[k] != theirs[k]
        ]:
            raise Refused("other_topology", f"TransferQueue cannot load it: {'; '.join(differ)}")

    @classmethod
    def inspect(cls, saved: SavedPart) -> Mapping[str, Any]:
        """Row counts and topology, from our document alone."""
        return inspect(saved)


def _save(folder: Path) -> None:
    if not folder.parent.is_dir():  # TransferQueue would make it anew
        raise FileNotFoundError(f"{folder.parent} is gone: this save comes after its attempt ended")
    try:
        tq.save_checkpoint(folder)
    except RuntimeError as error:  # what it raises for a full disk and for a dead unit alike
        raise OSError(f"TransferQueue could not save into {folder}: {error}") from error


def _fresh_start(why: str) -> Refused:
    return Refused(
        "fresh_start_needed",
        f"{why}; close TransferQueue, start it anew, and restore again (the snapshot is untouched)",
    )

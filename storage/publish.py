"""Publish: one rename, and finding out what became of it (S2, F1).

A rename can report an error and have happened. So no answer is believed: the disk is. Published
is decided by our manifest being under the final name; not published, only by the folder having
left its unpublished name for the trash, after which no late rename can find it.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from attrs import frozen

from fsm.storing import Publication
from storage import durable, names
from storage.draft import FolderDraft
from storage.manifest import LIMIT_BYTES
from storage.root import Root

log = logging.getLogger("quiesce.storage")

LOOK_AGAIN_S = 1.0
# Nothing is there, or a file, a link, something that is no manifest: not ours in any case.
_SOMETHING_ELSE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG}


@frozen
class Publisher:
    """`off_loop(function, *arguments)` runs a leaf in a thread."""

    root: Root
    off_loop: Callable[..., Awaitable[Any]]

    async def publish(self, draft: FolderDraft) -> Publication:
        """Never raises for the disk: it looks until it knows, with a pause between looks."""
        await self.off_loop(self._rename, draft)
        published = await self._until_known(draft)
        is_durable = published and await self.off_loop(self._make_durable, draft)
        return Publication(published, is_durable)

    async def _until_known(self, draft: FolderDraft) -> bool:
        while True:
            published: bool | None = await self.off_loop(self._outcome, draft)
            if published is not None:
                return published
            await asyncio.sleep(LOOK_AGAIN_S)

    def _rename(self, draft: FolderDraft) -> None:
        """Not if a newer controller has taken over: its lock may not reach this host (F6)."""
        try:
            newest = self.root.newest_incarnation()
            if newest > self.root.incarnation:
                log.error("%s: incarnation %d took over; not publishing", draft.id, newest)
                return
            durable.rename_noreplace(draft.path, self.root.path / draft.id)
            durable.point("renamed")
        except OSError as error:
            log.warning("%s: looking what became of the rename: %s", draft.id, error)

    def _outcome(self, draft: FolderDraft) -> bool | None:
        """True: published. False: it never will be. None: unknown, look again."""
        try:
            if self._is_there(draft):
                return True
            if self.root.claim(draft.name):
                return False
            # Somebody moved it before us: the rename after all, or the sweep of a newer start.
            return self._is_there(draft)
        except OSError as error:
            log.warning("%s: not known yet whether it is published: %s", draft.id, error)
            return None

    def _is_there(self, draft: FolderDraft) -> bool:
        """Is our manifest under the final name? Raises OSError if that cannot be seen."""
        try:
            durable.close(durable.open_below(self.root.path, (draft.id,)))
            data = durable.read_file(self.root.path / draft.id / names.MANIFEST, LIMIT_BYTES)
        except OSError as error:
            if error.errno in _SOMETHING_ELSE:
                return False
            raise
        return hashlib.sha256(data).hexdigest() == draft.digest

    def _make_durable(self, draft: FolderDraft) -> bool:
        """One fsync of the parent, never a second one (F1)."""
        try:
            durable.fsync_directory(self.root.path)
        except OSError as error:
            log.warning("%s is published, but not known to be durable: %s", draft.id, error)
            return False
        durable.point("parent_synced")
        return True

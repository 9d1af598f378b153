"""A snapshot root: its lock, its identity, its incarnations, its trash (F4, F6).

    root.json                                   who this root is: a uuid, written once
    lock                                        one writer per root; says who holds it
    lineage/incarnation_000003                  one per controller start, by exclusive create
    lineage/restored_000003-000001_000002-000004   what it goes on from ("nothing": a cold start)

The files in `lineage` are empty: a name cannot be torn.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from fsm.storing import Fence
from fsm.strict import read
from storage import durable, names
from storage.jsontext import strict_loads
from storage.lineage import Record, check_take_over, eligible

log = logging.getLogger("quiesce.storage")

_INCARNATION = re.compile("incarnation_([0-9]{6,12})")
_RESTORED = re.compile("restored_([0-9]{6,12})-([0-9]{6,12})_([0-9]{6,12}-[0-9]{6,12}|nothing)")
_LIMIT_BYTES = 4096


@frozen
class _Identity:
    schema_version: int
    root: str


class Root:
    """One root, taken by at most one writer at a time. Every method works on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uuid, self.incarnation = "", 0
        self._lineage = path / "lineage"
        self._lock_fd = -1

    def take(self) -> None:
        """Make the root if it is missing (not its parents: a volume that is not mounted must not
        be replaced by a folder), take the lock, raise the incarnation, sweep.

        Raises BlockingIOError naming the holder, OSError naming the step and the path.
        """
        self._own(self._begin_incarnation)

    def take_over(self, fence: Fence) -> None:
        """Take the lock and go on in the incarnation of `fence`, after its sequence.

        Raises as `take`; ValueError when another controller began, or something was recorded or
        published since.
        """
        self._own(lambda: self._go_on_in(fence))

    def _own(self, then: Callable[[], None]) -> None:
        try:
            if not durable.exists(self.path):
                durable.make_directory(self.path)
                durable.fsync_directory(self.path.parent)
            self._lock()
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot use the snapshot root ({error.strerror}); it must be writable, "
                f"its parent must exist, and nobody else may be using it",
                str(self.path),
            ) from error
        try:
            self._identify()
            then()
        except BaseException:
            self.release()
            raise

    def _begin_incarnation(self) -> None:
        self._raise_incarnation()
        self._sweep()
        self._try_rename()
        durable.fsync_directory(self.path)

    def _go_on_in(self, fence: Fence) -> None:
        done = [record.at for record in self.records()]
        done += [names.order_of(snapshot) for snapshot in self.snapshots()]
        check_take_over(fence, self.uuid, self.newest_incarnation(), done)
        self.incarnation = fence.incarnation

    def release(self) -> None:
        if self._lock_fd >= 0:
            durable.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def taken(self) -> bool:
        return self._lock_fd >= 0

    def snapshots(self) -> list[str]:
        return [name for name in durable.names_in(self.path) if names.is_snapshot(name)]

    def eligible(self) -> list[str]:
        """Ids on the chain of what was restored, newest first (F6)."""
        return eligible(self.snapshots(), self.records())

    def records(self) -> list[Record]:
        found = []
        for name in durable.names_in(self._lineage):
            if match := _RESTORED.fullmatch(name):
                restored = None if match[3] == "nothing" else f"snapshot_{match[3]}"
                found.append(Record((int(match[1]), int(match[2])), restored))
        return found

    def record(self, sequence: int, restored: str | None) -> None:
        """Say durably what the history of this incarnation is, from `sequence` on."""
        what = restored.removeprefix("snapshot_") if restored else "nothing"
        name = f"restored_{self.incarnation:06}-{sequence:06}_{what}"
        durable.write_file(self._lineage / name, b"")
        durable.fsync_directory(self._lineage)

    def newest_incarnation(self) -> int:
        found = map(_INCARNATION.fullmatch, durable.names_in(self._lineage))
        return max((int(match[1]) for match in found if match), default=0)

    def claim(self, name: str, *, durably: bool = False) -> bool:
        """Rename a folder to trash, then delete it. False: somebody else has it already (S2).

        durably: fsync the rename before anything is deleted, so that no crash leaves half a
        folder under its old name. What cannot be deleted now is swept at the next start.
        """
        trash = self.path / names.trash_name(name)
        try:
            durable.rename_noreplace(self.path / name, trash)
        except FileNotFoundError:
            return False
        durable.point("claimed")
        if durably:
            durable.fsync_directory(self.path)
            durable.point("pruned_to_trash")
        self._delete(trash)
        return True

    def _delete(self, trash: Path) -> None:
        try:
            durable.remove_tree(trash)
        except OSError as error:
            log.warning("%s stays until the next start: %s", trash, error)

    def _lock(self) -> None:
        path = self.path / "lock"
        try:
            self._lock_fd = durable.lock_file(path)
        except BlockingIOError as error:
            holder = durable.read_file(path, _LIMIT_BYTES).decode(errors="replace").strip()
            raise BlockingIOError(
                errno.EAGAIN, f"in use by {holder or 'another process'}"
            ) from error
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"pid {os.getpid()} on {socket.gethostname()} since {since}\n"
        durable.replace_content(self._lock_fd, holder.encode(), path)

    def _identify(self) -> None:
        path, new = self.path / "root.json", self.path / "root.json.new"
        if not durable.exists(path):
            if durable.exists(new):
                durable.remove_file(new)
            durable.write_file(
                new, json.dumps({"schema_version": 1, "root": uuid.uuid4().hex}).encode()
            )
            durable.rename_noreplace(new, path)
        self.uuid = read_identity(self.path)

    def _raise_incarnation(self) -> None:
        if not durable.exists(self._lineage):
            durable.make_directory(self._lineage)
        known = (names.order_of(snapshot)[0] for snapshot in self.snapshots())
        self.incarnation = 1 + max(self.newest_incarnation(), *known, 0)
        durable.write_file(self._lineage / f"incarnation_{self.incarnation:06}", b"")
        durable.fsync_directory(self._lineage)

    def _try_rename(self) -> None:
        """Publishing is one rename of a folder: say at once where that cannot be done (F1)."""
        name = names.draft_name(Fence(self.uuid, self.incarnation, 0))
        tried, trash = self.path / name, self.path / names.trash_name(name)
        durable.make_directory(tried)
        try:
            durable.rename_noreplace(tried, trash)
        except OSError as error:
            durable.remove_tree(tried)
            raise OSError(
                error.errno,
                f"folders cannot be renamed here ({error.strerror}), and publishing is one rename: "
                f"put the snapshot root on a local or POSIX file system",
                str(self.path),
            ) from error
        self._delete(trash)

    def _sweep(self) -> None:
        """Folders that nobody published go, in the only way that a late rename cannot undo: by
        claiming them. Unknown folders stay (F4)."""
        for name in durable.names_in(self.path):
            if names.is_draft(name):
                log.info("sweeping %s: never published", name)
                self.claim(name)
            elif names.is_trash(name):
                self._delete(self.path / name)


def read_identity(root: Path) -> str:
    """The root's uuid. Raises OSError, or ValueError for a damaged `root.json`."""
    data = strict_loads(durable.read_file(root / "root.json", _LIMIT_BYTES))
    return read(_Identity, data, str(root / "root.json")).root

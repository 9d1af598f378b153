"""One unpublished snapshot: what was entered into it, and whether it may still be sealed."""

from __future__ import annotations

import asyncio
import datetime
import errno
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsm.storing import Fence, FileEntry, Publication
from storage import names
from storage.fingerprint import fingerprint
from storage.manifest import SCHEMA_VERSION, Manifest, body_of
from storage.part import PartFolder


class Entries:
    """The files of a draft, and the reason why it must not be sealed, if there is one."""

    def __init__(self, fence: Fence) -> None:
        self.fence = fence
        self.failed: str | None = None
        self._files: dict[str, FileEntry] = {}

    @property
    def id(self) -> str:
        return names.snapshot_name(self.fence)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return tuple(self._files[path] for path in sorted(self._files))

    def note(self, files: tuple[FileEntry, ...]) -> None:
        """Enter files with their writers' digests. The same entry again is fine; another one for
        the same path is a ValueError: two writers would share a file."""
        for entry in files:
            if self._files.setdefault(entry.path, entry) != entry:
                raise ValueError(f"{self.id}: two different files are entered as {entry.path!r}")

    def fail(self, why: str) -> None:
        """Never seal this one. A failed fsync cannot be repeated, so nothing ever heals it (F1)."""
        self.failed = self.failed or why

    def check_whole(self) -> None:
        """Raises OSError if something went wrong in it before."""
        if self.failed is not None:
            raise OSError(errno.EIO, f"this snapshot cannot be sealed: {self.failed}", self.id)

    def check_found(self, found: Mapping[str, int]) -> None:
        """Files on the disk and files entered must be the same: a restore would refuse others."""
        entered = {entry.path: entry.size_bytes for entry in self.files}
        for path in sorted(found.keys() | entered.keys()):
            if found.get(path) != entered.get(path):
                on_disk = f"{found[path]} bytes" if path in found else "missing"
                said = f"{entered[path]} bytes" if path in entered else "not entered by its writer"
                why = f"on disk: {on_disk}; entered: {said} (use adopt or note)"
                raise OSError(errno.EIO, f"{why}, so the snapshot cannot be sealed", path)

    def manifest(self, body: Mapping[str, Any], parent: str | None) -> Manifest:
        """Raises `BadInput` for a body with other keys than `Store.seal` names."""
        given = body_of(body)
        return Manifest(
            schema_version=SCHEMA_VERSION,
            id=self.id,
            fence=self.fence,
            parent=parent,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            fingerprint=fingerprint(given.topology),
            topology=given.topology,
            config=given.config,
            anchor=given.anchor,
            formats=given.formats,
            facts=given.facts,
            files=self.files,
            counts=counts_of(self.files),
        )


def counts_of(files: Iterable[FileEntry]) -> dict[str, int]:
    sizes = [entry.size_bytes for entry in files]
    return {"files": len(sizes), "bytes": sum(sizes)}


class FolderDraft(Entries):
    """An unpublished folder below a root.

    digest: of its manifest's bytes, once sealed. publishing: finds out what became of the rename.
    """

    def __init__(self, root: Path, fence: Fence) -> None:
        super().__init__(fence)
        self.root, self.name = root, names.draft_name(fence)
        self.digest: str | None = None
        self.publishing: asyncio.Task[Publication] | None = None

    @property
    def path(self) -> Path:
        return self.root / self.name

    def part(self, folder: str) -> FolderPart:
        return FolderPart(self, PartFolder(self.root, self.name, folder))


class FolderPart:
    """`PartFolder` as the store's PartWriter: opened and fsynced off the event loop.

    Records are written in the calling thread, a buffer at a time: write large parts from
    `attempt.in_thread`.
    """

    def __init__(self, draft: FolderDraft, folder: PartFolder) -> None:
        self._draft, self._folder = draft, folder

    @property
    def path(self) -> Path:
        return self._folder.path

    def records(self, name: str) -> Callable[[Any], None]:
        return self._folder.records(name)

    def document(self, name: str, value: Any) -> None:
        self._folder.document(name, value)

    def adopt(self) -> None:
        self._folder.adopt()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._folder.open)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._folder.drop()
            self._draft.fail(f"writing {self.path.name} ended with {error!r}")
            return
        try:
            self._draft.note(await asyncio.to_thread(self._folder.finish))
        except BaseException as problem:
            self._draft.fail(f"closing {self.path.name} ended with {problem!r}")
            raise

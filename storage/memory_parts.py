"""One snapshot in memory: while it is written, and when it is read."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from attrs import frozen

from fsm.outcome import SnapshotRejected
from fsm.storing import Fence, FileEntry, Publication
from storage import names
from storage.draft import Entries
from storage.jsontext import line
from storage.manifest import Verified
from storage.memory_faults import Faults

Files = dict[str, bytes]


class MemoryDraft(Entries):
    """An unpublished snapshot. Its folder has a name, so that servers can be told one."""

    def __init__(self, fence: Fence, faults: Faults) -> None:
        super().__init__(fence)
        self.name = names.draft_name(fence)
        self.content: Files = {}
        self.publishing: asyncio.Task[Publication] | None = None
        self._faults = faults

    def part(self, folder: str) -> MemoryPart:
        return MemoryPart(folder, self, self._faults)

    def put(self, path: str, content: bytes) -> FileEntry:
        """A file as a server would write it: not yet entered; `note` the entry returned."""
        self.content[path] = content
        return entry_of(path, content)


class MemoryPart:
    """A PartWriter in memory."""

    def __init__(self, folder: str, draft: MemoryDraft, faults: Faults) -> None:
        names.check_parts(folder)
        self._folder, self._draft, self._faults = folder, draft, faults
        self._open: dict[str, bytearray] = {}

    @property
    def path(self) -> Path:
        raise io.UnsupportedOperation(
            f"part {self._folder!r} is in memory and has no path: a participant whose part is "
            f"written by somebody else needs a FolderStore"
        )

    def records(self, name: str) -> Callable[[Any], None]:
        buffer = self._create(f"{name}.jsonl")

        def append(record: Any) -> None:
            buffer.extend(line(record))

        return append

    def document(self, name: str, value: Any) -> None:
        data = line(value)
        self._create(f"{name}.json").extend(data)

    def adopt(self) -> None:
        """Nobody else can write here: nothing to adopt."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._draft.fail(f"writing {self._folder} ended with {error!r}")
            return
        try:
            for path, buffer in self._open.items():
                self._faults.check("write")
                self._draft.note((self._draft.put(path, bytes(buffer)),))
        except BaseException as problem:
            self._draft.fail(f"closing {self._folder} ended with {problem!r}")
            raise

    def _create(self, name: str) -> bytearray:
        path = f"{self._folder}/{name}"
        if path in self._open or path in self._draft.content:
            raise FileExistsError(path)
        return self._open.setdefault(path, bytearray())


@frozen
class MemorySaved(Verified):
    """A published snapshot that verified, in memory."""

    content: Files

    def part(self, folder: str) -> MemorySavedPart:
        return MemorySavedPart(self, folder)


@frozen
class MemorySavedPart:
    snapshot: MemorySaved
    folder: str

    @property
    def path(self) -> Path:
        raise io.UnsupportedOperation(f"part {self.folder!r} is in memory and has no path")

    def files(self) -> tuple[FileEntry, ...]:
        entries = self.snapshot.manifest.files
        return tuple(entry for entry in entries if entry.path.startswith(f"{self.folder}/"))

    def records(self, name: str) -> Iterator[Any]:
        yield from map(json.loads, self._content(f"{name}.jsonl").splitlines())

    def document(self, name: str) -> Any:
        return json.loads(self._content(f"{name}.json"))

    def _content(self, name: str) -> bytes:
        path = f"{self.folder}/{name}"
        if path not in self.snapshot.content:
            raise SnapshotRejected(self.snapshot.id, path, "the manifest names no such file")
        return self.snapshot.content[path]


def entry_of(path: str, content: bytes) -> FileEntry:
    return FileEntry(path, len(content), hashlib.sha256(content).hexdigest())

"""One participant's folder in a snapshot: written with digests, read with digests (F2, F5).

Synchronous, so that a Gym server can use it from its own thread; the store's own `PartWriter`
is built on it. Nobody names a path: a root from the configuration, the name of a snapshot
folder, and the part's own fixed place in it.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from fsm.outcome import SnapshotRejected
from fsm.storing import FileEntry
from storage import durable, names
from storage.jsontext import line, strict_loads

_BUFFER_BYTES = 1 << 20
# Errors that say something about the file; the others (too many open files...) are the process's.
_ABOUT_THE_FILE = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.EIO,
}  # fmt: skip


class NewFile:
    """A new file, hashed while it is written. It counts only when `finish` has returned."""

    def __init__(self, directory_fd: int, name: str, path: str) -> None:
        self._fd = durable.create_file(name, directory_fd)
        self._path, self._size_bytes = path, 0
        self._hash, self._buffer = hashlib.sha256(), bytearray()

    def write(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def finish(self) -> FileEntry:
        """fsync and close. Raises OSError; the file must not be used then (F1)."""
        self._flush()
        durable.point("file_written")
        fd, self._fd = self._fd, -1
        durable.fsync_and_close(fd, self._path)
        durable.point("sealed_file")
        return FileEntry(self._path, self._size_bytes, self._hash.hexdigest())

    def drop(self) -> None:
        if self._fd >= 0:
            durable.close(self._fd)
            self._fd = -1

    def _flush(self) -> None:
        durable.write_all(self._fd, self._buffer, self._path)
        self._hash.update(self._buffer)
        self._size_bytes += len(self._buffer)
        self._buffer.clear()


class PartFolder:
    """Writes one part: `with PartFolder(root, folder, "gym/agent/agent0") as part: ...`.

    folder: name of the unpublished folder, which must exist: a commit that comes too late must
    not bring a discarded folder back. part: fixed place inside, made if missing. Leaving the
    context fsyncs files, then directories up to the snapshot's folder; `part.files` then has
    the entries, with paths relative to the snapshot's folder. An error inside leaves files that
    nobody entered. Raises ValueError for bad names, OSError for the disk.
    """

    def __init__(self, root: Path | str, folder: str, part: str) -> None:
        self._root, self._part = Path(root), part
        self._parts = (names.check_folder(folder), *names.check_parts(part))
        self._fd = -1
        self._open_files: dict[str, NewFile] = {}
        self._entries: dict[str, FileEntry] = {}

    @property
    def path(self) -> Path:
        """For writers that need a path of their own; `adopt` enters what they wrote."""
        return self._root.joinpath(*self._parts)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return tuple(self._entries[path] for path in sorted(self._entries))

    def open(self) -> None:
        self._fd = durable.open_below(self._root, self._parts, make_from=1)

    def records(self, name: str) -> Callable[[Any], None]:
        """A function that appends one record to the new file `<name>.jsonl`.

        It raises ValueError or TypeError for what JSON cannot hold, OSError for the disk.
        """
        file = self._create(f"{name}.jsonl")
        return lambda record: file.write(line(record))

    def document(self, name: str, value: Any) -> None:
        """Write one JSON-able value as the new file `<name>.json`."""
        data = line(value)
        self._create(f"{name}.json").write(data)

    def adopt(self) -> None:
        """Digest and fsync files that somebody else wrote below `path`. Refuses links."""
        for name in durable.files_below(self.path):
            path = f"{self._part}/{name}"
            if path not in self._open_files and path not in self._entries:
                self._entries[path] = self._digested(path, self.path / name)

    def finish(self) -> tuple[FileEntry, ...]:
        """fsync what is open, then the directories; returns the entries."""
        try:
            for path in sorted(self._open_files):
                self._entries[path] = self._open_files[path].finish()
            self._open_files.clear()
            durable.fsync_tree(self.path)
            for depth in range(len(self._parts) - 1, 0, -1):
                durable.fsync_directory(self._root.joinpath(*self._parts[:depth]))
        finally:
            self.drop()
        return self.files

    def drop(self) -> None:
        """Let go of descriptors without making anything durable. Safe to repeat."""
        for file in self._open_files.values():
            file.drop()
        self._open_files.clear()
        if self._fd >= 0:
            durable.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.drop()

    def _create(self, name: str) -> NewFile:
        if self._fd < 0:
            raise ValueError(f"part {self._part!r} is not open: use it as a context manager")
        if len(names.check_parts(name)) != 1:
            raise ValueError(f"{name!r} must be a file name, not a path")
        path = f"{self._part}/{name}"
        self._open_files[path] = file = NewFile(self._fd, name, path)
        return file

    @staticmethod
    def _digested(path: str, file: Path) -> FileEntry:
        digest, size_bytes = hashlib.sha256(), 0
        for chunk in durable.chunks_of(str(file)):
            digest.update(chunk)
            size_bytes += len(chunk)
        durable.fsync_file(file)
        return FileEntry(path, size_bytes, digest.hexdigest())


class SavedFolder:
    """Reads one part of a published snapshot, and checks digests as it reads.

    files: what the manifest says (entries outside the part are ignored). A file that does not
    match raises `SnapshotRejected` when its end is reached: stage what you read, and activate
    nothing before you have read all of it (R1).
    """

    def __init__(
        self, root: Path | str, snapshot: str, part: str, files: Iterable[FileEntry]
    ) -> None:
        if not names.is_snapshot(snapshot):
            raise ValueError(f"{snapshot!r} is not a snapshot id; ask for an id, not a path")
        self._root, self._snapshot, self._part = Path(root), snapshot, part
        self._parts = (snapshot, *names.check_parts(part))
        self._entries = {e.path: e for e in files if e.path.startswith(f"{part}/")}

    @property
    def path(self) -> Path:
        return self._root.joinpath(*self._parts)

    def files(self) -> tuple[FileEntry, ...]:
        return tuple(self._entries[path] for path in sorted(self._entries))

    def records(self, name: str) -> Iterator[Any]:
        """The records of `<name>.jsonl`, one by one."""
        entry = self._entry(f"{name}.jsonl")
        for number, text in enumerate(_lines(self._content(entry)), start=1):
            try:
                yield json.loads(text)  # our own writing: the digest vouches for its form
            except (ValueError, RecursionError) as error:
                raise SnapshotRejected(
                    self._snapshot, f"{entry.path}:{number}", str(error)
                ) from error

    def document(self, name: str) -> Any:
        """The value of `<name>.json`."""
        entry = self._entry(f"{name}.json")
        data = b"".join(self._content(entry))
        try:
            return strict_loads(data)
        except ValueError as error:
            raise SnapshotRejected(self._snapshot, entry.path, str(error)) from error

    def _entry(self, name: str) -> FileEntry:
        names.check_parts(name)
        path = f"{self._part}/{name}"
        if path not in self._entries:
            raise SnapshotRejected(self._snapshot, path, "the manifest names no such file")
        return self._entries[path]

    def _content(self, entry: FileEntry) -> Iterator[bytes]:
        return checked(self._root, self._snapshot, entry)


def checked(root: Path, snapshot: str, entry: FileEntry) -> Iterator[bytes]:
    """The content of one file; `SnapshotRejected` at its end if size or digest differ."""
    digest, size_bytes = hashlib.sha256(), 0
    for chunk in _content(root, snapshot, entry.path):
        digest.update(chunk)
        size_bytes += len(chunk)
        yield chunk
    if size_bytes != entry.size_bytes:
        why = f"{size_bytes} bytes; the manifest says {entry.size_bytes}"
        raise SnapshotRejected(snapshot, entry.path, why)
    if digest.hexdigest() != entry.sha256:
        raise SnapshotRejected(snapshot, entry.path, "its SHA-256 is not the manifest's")


def _content(root: Path, snapshot: str, path: str) -> Iterator[bytes]:
    *folders, name = path.split("/")
    try:
        fd = durable.open_below(root, (snapshot, *folders))
        try:
            yield from durable.chunks_of(name, fd)
        finally:
            durable.close(fd)
    except OSError as error:
        reject(snapshot, path, error)


def reject(snapshot: str, path: str, error: OSError) -> NoReturn:
    """Raise `SnapshotRejected` if the error is about the file, else the error itself."""
    if error.errno in _ABOUT_THE_FILE:
        raise SnapshotRejected(snapshot, path, str(error)) from error
    raise error


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest += first
        if others:
            yield rest
            *whole, rest = others
            yield from whole
    if rest:
        yield rest

"""The leaves that touch the disk: every file operation of this package is one of these.

Each does one thing and names its step and path when it fails. They decide nothing; the order in
which they run is the caller's (F1). Nothing here retries: after a failed fsync the kernel may
report success for data that is gone, so a second answer means nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("quiesce.storage")

_RENAME_NOREPLACE, _AT_FDCWD = 1, -100
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO in the place of a file must be refused, not waited for.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_libc = ctypes.CDLL(None, use_errno=True)


def point(name: str) -> None:
    """A labelled place for crash tests: with QUIESCE_CRASH_AT=name this process kills itself."""
    if os.environ.get("QUIESCE_CRASH_AT") == name:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def step(what: str, path: object) -> Iterator[None]:
    """Give an OSError raised inside the name of its step and its path; the class stays."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, f"{what}: {why}", str(path)) from error


# -- directories -------------------------------------------------------------------------------


def make_directory(path: Path) -> None:
    """Make one new directory, readable by its owner only. Its parent must exist."""
    with step("make directory", path):
        os.mkdir(path, 0o700)


def names_in(path: Path) -> list[str]:
    with step("list directory", path):
        return sorted(os.listdir(path))


def fsync_directory(path: Path) -> None:
    """Make the entries of a directory durable. Raises OSError; never call it again then (F1)."""
    with step("fsync directory", path), _opened(os.open(path, _DIRECTORY)) as fd:
        os.fsync(fd)


def fsync_tree(path: Path) -> None:
    """fsync every directory below `path`, children first, then `path` itself."""
    for _, directories in _walk(path):
        for directory in directories:
            fsync_directory(directory)


def files_below(path: Path) -> dict[str, int]:
    """Every file below `path`, as {relative path: size in bytes}.

    Raises OSError for a link or anything else that is neither a file nor a directory.
    """
    found: dict[str, int] = {}
    for files, _ in _walk(path):
        for file, size_bytes in files:
            found[file.relative_to(path).as_posix()] = size_bytes
    return found


def _walk(path: Path) -> Iterator[tuple[list[tuple[Path, int]], list[Path]]]:
    """For each directory, deepest first: its files with sizes, and itself as a list of one."""
    files: list[tuple[Path, int]] = []
    for name in names_in(path):
        child = path / name
        with step("look at", child):
            status = os.lstat(child)
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(child)
        elif stat.S_ISREG(status.st_mode):
            files.append((child, status.st_size))
        else:
            raise OSError(errno.EINVAL, "neither a file nor a directory", str(child))
    yield files, [path]


def remove_tree(path: Path) -> None:
    """Delete a folder. Only what was renamed to trash first may be deleted (F4)."""
    with step("delete", path):
        shutil.rmtree(path)


def open_below(root: Path, parts: tuple[str, ...], *, make_from: int | None = None) -> int:
    """A descriptor of the directory `root/parts...`, opened without following a link below root.

    One component after another, each relative to the descriptor before it (F5): portable, and
    as tight as openat2(RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS) as long as no part is ".." or has
    a "/" in it, which `names.check_parts` refuses. `root` itself is the operator's and may be a
    link. make_from: make missing components from this index on. The caller closes the descriptor.
    """
    with step("open directory", root):
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for index, part in enumerate(parts):
        with _opened(fd), step("open directory", root.joinpath(*parts[: index + 1])):
            if make_from is not None and index >= make_from:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
            fd = os.open(part, _DIRECTORY, dir_fd=fd)
    return fd


# -- files -------------------------------------------------------------------------------------


def create_file(path: Path | str, directory_fd: int | None = None) -> int:
    """A descriptor of a new file, readable by its owner only. Raises FileExistsError."""
    with step("create file", path):
        return os.open(path, _NEW, 0o600, dir_fd=directory_fd)


def write_all(fd: int, data: bytes | bytearray, path: object) -> None:
    """Write everything, however short the single writes are."""
    rest = memoryview(data)
    with step("write", path):
        while rest:
            rest = rest[os.write(fd, rest) :]


def fsync_and_close(fd: int, path: object) -> None:
    """Make a file's data durable and close it; closed also when the fsync fails."""
    with step("fsync file", path):
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def close(fd: int) -> None:
    """Close a descriptor whose data no longer counts."""
    with contextlib.suppress(OSError):
        os.close(fd)


def fsync_file(path: Path) -> None:
    """fsync a file that somebody else wrote."""
    with step("open file", path):
        fd = os.open(path, _READ)
    fsync_and_close(fd, path)


def write_file(path: Path, data: bytes) -> None:
    """A new file with this content, fsynced. Raises FileExistsError."""
    fd = create_file(path)
    try:
        write_all(fd, data, path)
    except BaseException:
        close(fd)
        raise
    fsync_and_close(fd, path)


def chunks_of(name: str, directory_fd: int | None = None) -> Iterator[bytes]:
    """The content of a file, piece by piece. Refuses links and what is not a file."""
    with step("read", name):
        fd = os.open(name, _READ, dir_fd=directory_fd)
        with _opened(fd):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a file")
            while chunk := os.read(fd, 1 << 20):
                yield chunk


def read_file(path: Path, limit_bytes: int) -> bytes:
    """The content of a small file. Raises OSError(EFBIG) above `limit_bytes`."""
    data = bytearray()
    for chunk in chunks_of(str(path)):
        data += chunk
        if len(data) > limit_bytes:
            raise OSError(errno.EFBIG, f"longer than {limit_bytes} bytes", str(path))
    return bytes(data)


def remove_file(path: Path) -> None:
    with step("delete", path):
        os.unlink(path)


def exists(path: Path) -> bool:
    """Is there anything by this name, even a dangling link? Raises OSError when it is unknown."""
    with step("look at", path):
        try:
            os.lstat(path)
        except FileNotFoundError:
            return False
    return True


# -- renaming and locking ----------------------------------------------------------------------


def rename_noreplace(source: Path, target: Path) -> None:
    """Rename, never over something. Raises FileExistsError (or OSError ENOTEMPTY).

    Where the file system does not know RENAME_NOREPLACE (NFS, some FUSE), the fallback is to
    look first and rename then, with a warning: nobody else makes that name, since a root has
    one writer and ids are never used twice (F6).
    """
    with step("rename", f"{source} -> {target}"):
        code = _renameat2(os.fspath(source), os.fspath(target))
        if code in _UNSUPPORTED:
            log.warning("%s: no RENAME_NOREPLACE here; looking first instead", target.parent)
            if exists(target):
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
            os.rename(source, target)
        elif code:
            raise OSError(code, os.strerror(code))


def _renameat2(source: str, target: str) -> int:
    """0, or the errno: Python has no renameat2."""
    done: int = _libc.renameat2(
        _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE
    )
    return ctypes.get_errno() if done else 0


def replace_content(fd: int, data: bytes, path: object) -> None:
    """Overwrite a note for people (not durable; nobody relies on it)."""
    with step("write", path):
        os.ftruncate(fd, 0)
        os.pwrite(fd, data, 0)


def lock_file(path: Path) -> int:
    """Take the exclusive lock on a file, made if missing. Raises BlockingIOError if it is taken."""
    with step("lock", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
    return fd


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)

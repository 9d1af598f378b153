"""A disk that fails on demand: a shim over the operating system as storage/durable.py sees it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from storage import durable

# fmt: off
COUNTED = frozenset({
    "open", "read", "write", "pwrite", "ftruncate", "fsync", "close",
    "mkdir", "listdir", "lstat", "fstat", "rename", "unlink",
})
# fmt: on


class FaultyDisk:
    """Counts file operations; the `fail_at`-th one fails, with `lasting - 1` that follow it.

    A failing close closes (as Linux does) and a failing rename may have happened (`lying`).
    `synced` has, per path, what each fsync answered.
    """

    def __init__(self, fail_at: int, code: int, lasting: int = 1, *, lying: bool = False) -> None:
        self.fail_at, self.code, self.lasting, self.lying = fail_at, code, lasting, lying
        self.count = 0
        self.failed: list[str] = []
        self.synced: list[tuple[str, bool]] = []

    @property
    def reached(self) -> bool:
        return bool(self.failed)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        renameat2 = durable._renameat2

        def rename(source: str, target: str) -> int:
            fails = self._fails("renameat2")
            code = renameat2(source, target) if not fails or self.lying else 0
            return self.code if fails else code

        def rmtree(path: Path) -> None:
            if self._fails("rmtree"):
                raise self._error()
            shutil.rmtree(path)

        patch.setattr(durable, "os", _Os(self))
        patch.setattr(durable, "_renameat2", rename)
        patch.setattr(durable, "shutil", _Shutil(rmtree))

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        fails = self._fails(name)
        if name == "fsync":
            path = os.readlink(f"/proc/self/fd/{arguments[0]}")
            self.synced.append((path, not fails))
        if name == "close" and fails:
            os.close(*arguments)
        if fails:
            raise self._error()
        return getattr(os, name)(*arguments, **options)

    def _fails(self, name: str) -> bool:
        self.count += 1
        if not self.fail_at <= self.count < self.fail_at + self.lasting:
            return False
        self.failed.append(name)
        return True

    def _error(self) -> OSError:
        return OSError(self.code, errno.errorcode[self.code])


class _Os:
    def __init__(self, disk: FaultyDisk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        if name not in COUNTED:
            return getattr(os, name)
        return lambda *arguments, **options: self._disk.call(name, *arguments, **options)


class _Shutil:
    def __init__(self, rmtree: Any) -> None:
        self.rmtree = rmtree

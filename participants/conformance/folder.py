"""What is on the disk: durable when answered, whole, and left alone (specs/folder.md)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fsm.outcome import SnapshotRejected
from participants.conformance import rules
from participants.conformance.bench import Bench, Benches, run
from participants.conformance.plugin import Plugin
from storage.reader import Saved, read_manifest, verify_snapshot


class FolderRules(Plugin):
    def test_the_part_is_on_the_disk_when_it_is_answered(self) -> None:
        async def main(benches: Benches) -> None:
            bench, unsynced = await benches.start(), list[str]()
            await bench.work(1)
            with _fsyncs() as synced:

                async def look() -> None:
                    (draft,) = self.root.glob("tmp_*")
                    part = draft / bench.one.name
                    below = [part, *part.rglob("*")] if part.is_dir() else []
                    unsynced.extend(str(p.relative_to(draft)) for p in below if not synced.has(p))

                bench.relay.after[_writes(bench)] = look
                await bench.saved()
            rules.FSYNC.must(not unsynced, ", ".join(unsynced))

        run(self, main, on_disk=True)

    def test_the_manifest_describes_its_files(self) -> None:
        async def main(benches: Benches) -> None:
            snapshot = await self._snapshot(await benches.start())
            try:
                manifest = verify_snapshot(snapshot)
            except SnapshotRejected as error:
                rules.DIGESTS.must(False, error)
                raise
            prefix = f"{self._name}/"
            inside = [one.path for one in manifest.files if one.path.startswith(prefix)]
            rules.INSIDE.must(bool(inside), [one.path for one in manifest.files])

        run(self, main, on_disk=True)

    def test_a_restore_leaves_the_snapshot_untouched(self) -> None:
        async def main(benches: Benches) -> None:
            snapshot = await self._snapshot(await benches.start())
            before = _content(snapshot)
            for _ in range(2):
                bench = await benches.replace()
                await bench.restored()
                await bench.work(2)
                changed = sorted(dict(before.items() ^ _content(snapshot).items()))
                rules.UNTOUCHED.must(not changed, ", ".join(changed))

        run(self, main, on_disk=True)

    def test_inspect_understands_the_part(self) -> None:
        async def main(benches: Benches) -> None:
            bench = await benches.start()
            snapshot = await self._snapshot(bench)
            before = _content(snapshot)
            part = Saved(read_manifest(snapshot), snapshot.parent).part(self._name)
            try:
                said = type(bench.one).inspect(part)
                json.dumps({key: said[key] for key in said if not key.startswith("_")})
            except Exception as error:  # noqa: BLE001  whatever it is, it must not come
                rules.INSPECTED.must(False, repr(error))
            rules.UNTOUCHED.must(_content(snapshot) == before, "after `inspect`")

        run(self, main, on_disk=True)

    async def _snapshot(self, bench: Bench) -> Path:
        self._name: str = bench.one.name
        await bench.work(1)
        return self.root / (await bench.saved()).snapshot


def _writes(bench: Bench) -> str:
    hook = bench.relay.writes_in
    if not bench.relay.has(hook):
        pytest.skip("it writes nothing: it has neither `commit` nor `cut`")
    return hook


def _content(folder: Path) -> dict[str, str]:
    """Each file below the folder with its SHA-256."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


class _Synced:
    """What was fsynced by this process, as it was then. Writers elsewhere answer for themselves."""

    def __init__(self) -> None:
        self._states: set[tuple[int, ...]] = set()

    def add(self, fd: Any) -> None:
        self._states.add(_state(os.fstat(fd)))

    def has(self, path: Path) -> bool:
        return _state(path.stat()) in self._states


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def _fsyncs() -> Iterator[_Synced]:
    synced, fsync = _Synced(), os.fsync

    def noted(fd: Any) -> None:
        fsync(fd)
        synced.add(fd)

    with patch.object(os, "fsync", noted):
        yield synced

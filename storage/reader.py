"""Looking at snapshots without changing anything and without the lock: for restore, for the
command line. A snapshot is verified whole before anything in it is used (F3)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from fsm.outcome import Anchor, SnapshotRejected
from storage import durable, names
from storage.fingerprint import difference, fingerprint
from storage.manifest import LIMIT_BYTES, Manifest, Verified, decode
from storage.part import SavedFolder, checked, reject


@frozen
class Summary:
    """One line of a list of snapshots. problem: why its manifest cannot be read, or None.

    Only the manifest was looked at: `verify_snapshot` says whether the files are right.
    """

    id: str
    created_at: str | None = None
    anchor: Anchor | None = None
    parent: str | None = None
    files: int = 0
    size_bytes: int = 0
    problem: str | None = None


@frozen
class Saved(Verified):
    """A published snapshot that verified, in a folder below `root`."""

    root: Path

    def part(self, folder: str) -> SavedFolder:
        return SavedFolder(self.root, self.id, folder, self.manifest.files)


def list_snapshots(root: Path | str, key: bytes | None = None) -> list[Summary]:
    """Every published snapshot below `root`, oldest first. Raises OSError."""
    path = Path(root)
    found = sorted(filter(names.is_snapshot, durable.names_in(path)), key=names.order_of)
    return [_summary(path / name, key) for name in found]


def read_manifest(path: Path | str, key: bytes | None = None) -> Manifest:
    """The manifest of the snapshot in folder `path`; its files are not looked at.

    Raises `SnapshotRejected`, or OSError when the process itself is in trouble.
    """
    folder = Path(path)
    try:
        fd = durable.open_below(folder.parent, (folder.name,))
        durable.close(fd)
        data = durable.read_file(folder / names.MANIFEST, LIMIT_BYTES)
        manifest = decode(data, key)
    except OSError as error:
        reject(folder.name, names.MANIFEST, error)
    except (ValueError, RecursionError) as error:
        raise SnapshotRejected(folder.name, names.MANIFEST, str(error)) from error
    if manifest.id != folder.name or manifest.id != names.snapshot_name(manifest.fence):
        raise SnapshotRejected(folder.name, names.MANIFEST, f"it is that of {manifest.id!r}")
    return manifest


def verify_snapshot(path: Path | str, key: bytes | None = None) -> Manifest:
    """Check the manifest, the set of files, every size and every digest. Reads all bytes.

    Raises `SnapshotRejected` naming the first file that is wrong, and why.
    """
    manifest = read_manifest(path, key)
    check_files(Path(path), manifest)
    return manifest


def check_fit(
    manifest: Manifest, root: str, topology: Mapping[str, Any], formats: Mapping[str, int]
) -> None:
    """Does the snapshot belong to this root, this topology, these participants?

    Raises `SnapshotRejected`, for versions with both numbers.
    """
    if manifest.fence.root != root:
        why = f"it was written in root {manifest.fence.root}, this is root {root}"
        raise SnapshotRejected(manifest.id, names.MANIFEST, why)
    for name in sorted(manifest.formats.keys() | formats.keys()):
        saved, now = manifest.formats.get(name), formats.get(name)
        if saved != now:
            raise SnapshotRejected(manifest.id, f"participant {name!r}", _versions(saved, now))
    if manifest.fingerprint != fingerprint(topology):
        why = difference(manifest.topology, topology) or "the fingerprint is not the topology's own"
        raise SnapshotRejected(manifest.id, "topology", why)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Set of files, sizes, digests. Opens only what it found itself, never what is named (F5)."""
    expected = {entry.path: entry for entry in manifest.files}
    try:
        found = durable.files_below(folder)
    except OSError as error:
        reject(manifest.id, str(error.filename or folder), error)
    found.pop(names.MANIFEST, None)
    for path in sorted(expected.keys() | found.keys()):
        if path not in found:
            raise SnapshotRejected(manifest.id, path, "missing")
        if path not in expected:
            raise SnapshotRejected(manifest.id, path, "not in the manifest")
        if found[path] != expected[path].size_bytes:
            why = f"{found[path]} bytes; the manifest says {expected[path].size_bytes}"
            raise SnapshotRejected(manifest.id, path, why)
    for entry in manifest.files:
        for _ in checked(folder.parent, manifest.id, entry):
            pass


def _versions(saved: int | None, now: int | None) -> str:
    if saved is None:
        return f"not in the snapshot; this program has it, with format version {now}"
    if now is None:
        return f"in the snapshot with format version {saved}; this program has no such participant"
    return f"format version {saved} in the snapshot; this program reads version {now}"


def _summary(folder: Path, key: bytes | None) -> Summary:
    try:
        manifest = read_manifest(folder, key)
    except SnapshotRejected as error:
        return Summary(folder.name, problem=f"{error.what}: {error.why}")
    return Summary(
        manifest.id,
        manifest.created_at,
        manifest.anchor,
        manifest.parent,
        len(manifest.files),
        sum(entry.size_bytes for entry in manifest.files),
    )

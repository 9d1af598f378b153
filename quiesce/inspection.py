"""Looking into a snapshot without running anything: what `quiesce show` and `verify` say.

Each participant's `inspect` understands its own files. Three of its keys tie the parts together:
`_has` {kind: names} says what is there, `_needs` {kind: {name: owner}} what must be. Every needed
name must be among what the parts have. Where a part says which owners are `_live`, the names of
others do not matter any more: a restore drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import asdict

from fsm.outcome import SnapshotRejected
from fsm.participant import Participant
from fsm.storing import SavedPart
from participants.controller.participant import Controller
from participants.data_plane import DataPlanePart
from participants.gym.participant import Gym
from participants.transfer_queue.contents import inspect as transfer_queue_part
from storage.manifest import Manifest
from storage.reader import Saved, read_manifest, verify_snapshot

GROUP = "quiesce.participants"  # entry points by which plugins announce themselves
# By the name of their part; the data plane's says in its files which of the two wrote it.
OURS: dict[str, type[Participant]] = {"gym": Gym, "controller": Controller}
Inspect = Callable[[SavedPart], Mapping[str, Any]]
MISSING_SHOWN = 10


def show(snapshot: Path) -> dict[str, Any]:
    """The manifest without its file list, and what each participant says of its part."""
    manifest = read_manifest(snapshot)
    head = asdict(manifest)
    head["files"] = len(manifest.files)
    head["size_bytes"] = sum(one.size_bytes for one in manifest.files)
    parts = {name: _public(part) for name, part in _inspected(snapshot, manifest)}
    return {**head, "parts": parts}


def verify(snapshot: Path) -> dict[str, Any]:
    """Digests first, then references. Raises `SnapshotRejected` naming the file or the name."""
    manifest = verify_snapshot(snapshot)
    parts = dict(_inspected(snapshot, manifest))
    return {
        "id": manifest.id,
        "files": len(manifest.files),
        "size_bytes": sum(one.size_bytes for one in manifest.files),
        "references": references(manifest.id, parts),
    }


def references(snapshot: str, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """How many names of each kind are needed. Raises `SnapshotRejected` for one that is missing."""
    has: dict[str, set[str]] = {}
    for part in parts.values():
        for kind, names in part.get("_has", {}).items():
            has.setdefault(kind, set()).update(names)
    said = [set(part["_live"]) for part in parts.values() if "_live" in part]
    live = set[str]().union(*said) if said else None
    counts: dict[str, int] = {}
    for who, part in parts.items():
        for kind, owners in part.get("_needs", {}).items():
            needed = {name for name, owner in owners.items() if live is None or owner in live}
            if missing := sorted(needed - has.get(kind, set())):
                named = ", ".join(missing[:MISSING_SHOWN])
                more = f" and {len(missing) - MISSING_SHOWN} more" if len(missing) > 10 else ""
                raise SnapshotRejected(snapshot, who, f"names {kind} {named}{more}: not there")
            counts[kind] = counts.get(kind, 0) + len(needed)
    return counts


def lines(shown: Mapping[str, Any]) -> Iterator[str]:
    """`show` for people."""
    fence, anchor = shown["fence"], shown["anchor"]
    yield f"{shown['id']}  written {shown['created_at']}"
    yield f"  by incarnation {fence['incarnation']} of root {fence['root']}"
    yield f"  went on from {shown['parent'] or 'nothing'}"
    yield f"  trainer checkpoint: {'none' if anchor is None else 'step ' + str(anchor['step'])}"
    yield f"  {shown['files']} files, {shown['size_bytes']} bytes"
    for name, part in shown["parts"].items():
        yield f"{name} (format {shown['formats'].get(name)})"
        for key, value in part.items():
            yield from _indented(key, value)


def status_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """`status.json` for people: what goes on, since when, waiting for whom, and what is next."""
    now, last = status["now"], status["last"]
    if now is None:
        yield "nothing is going on"
    else:
        yield f"{now['label']}: {now['state']} ({now['step']}) for {now['since_s']:.1f} s"
        for name, awaited in now["waiting"].items():
            yield f"  waiting for {name}" + (f": {', '.join(awaited)}" if awaited else "")
        if now["left_s"] is not None:
            yield f"  at the deadline, in {now['left_s']:.1f} s: {now['then']}"
    if last is not None:
        told = {k: v for k, v in last.items() if k not in ("phases", "outcome") and v}
        yield f"last: {last['outcome']} {told or ''}".rstrip()


def _inspected(snapshot: Path, manifest: Manifest) -> Iterator[tuple[str, Mapping[str, Any]]]:
    saved = Saved(manifest, snapshot.absolute().parent)
    for name in manifest.formats:
        part = saved.part(name)
        inspect = inspector(name, {entry.path for entry in part.files()})
        if inspect is None:
            yield name, {"files": len(part.files()), "note": "no plugin here understands it"}
        else:
            yield name, _told_of(manifest.id, inspect, part)


def _told_of(snapshot: str, inspect: Inspect, part: SavedPart) -> Mapping[str, Any]:
    """A part does not know which snapshot it belongs to; the person who asked wants to."""
    try:
        return inspect(part)
    except SnapshotRejected as error:
        raise SnapshotRejected(snapshot, error.what, error.why) from error


def inspector(name: str, files: set[str]) -> Inspect | None:
    """What understands a part: ours, or that of a plugin which announces itself by the name."""
    if name == "data_plane":
        from_queue = any(path.endswith("/transfer_queue.json") for path in files)
        return transfer_queue_part if from_queue else DataPlanePart.inspect
    if name in OURS:
        return OURS[name].inspect
    for entry in metadata.entry_points(group=GROUP, name=name):
        plugin: type[Participant] = entry.load()
        return plugin.inspect
    return None


def _public(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if not key.startswith("_")}


def _indented(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"  {key}: {value}"
        return
    yield f"  {key}: {len(value)}"
    for name, one in value.items():
        said = (
            ", ".join(f"{k} {v}" for k, v in one.items() if v is not None)
            if isinstance(one, Mapping)
            else one
        )
        yield f"    {name}: {said}"

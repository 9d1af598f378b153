"""What Gym's folder in a snapshot holds, read without any server (`quiesce show`, `verify`).

A rollout that a server could not save has a continuation and no session, or no rows: it starts
over. One whose parts contradict each other must not exist: that snapshot is refused (R2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from fsm import strict
from fsm.outcome import SnapshotRejected
from fsm.storing import SavedPart
from participants.data_plane import CAPTURE_ROW
from participants.gym import wire

CONTINUATIONS, FINISHED = "continuations.jsonl", "finished.jsonl"  # of agents
SESSIONS = "sessions.jsonl"  # of resource servers: has rollout_id, revision
ROWS = "rows.jsonl"  # of policy servers: has rollout_id, rows


@frozen
class _Found:
    """All servers' files, by rollout."""

    continuations: dict[str, tuple[str, wire.Continuation]] = field(factory=dict)
    finished: dict[str, str] = field(factory=dict)
    revisions: dict[tuple[str, str], int] = field(factory=dict)  # (server, rollout)
    rows: dict[str, list[str]] = field(factory=dict)


def part(saved: SavedPart) -> Mapping[str, Any]:
    """{"rollouts": {rollout: where it stands}, "finished": {rollout: server}, "sessions": count}.

    Raises `SnapshotRejected` for a line of the wrong shape, a session at another revision than
    its continuation depends on, or rows without the last call.
    """
    found = _read(saved)
    rollouts = {name: _standing(found, *where) for name, where in found.continuations.items()}
    return {
        "rollouts": rollouts,
        "finished": found.finished,
        "sessions": len(found.revisions),
        "_needs": {
            CAPTURE_ROW: {row: name for name in rollouts for row in found.rows.get(name, ())}
        },
    }


def _read(saved: SavedPart) -> _Found:
    found = _Found()
    for server, file, record in _records(saved):
        if file == CONTINUATIONS:
            line = _continuation(server, record)
            found.continuations[line.rollout_id] = (server, line)
        elif file == FINISHED:
            found.finished[record["rollout_id"]] = server
        elif file == SESSIONS:
            found.revisions[server, record["rollout_id"]] = record["revision"]
        elif file == ROWS:
            found.rows.setdefault(record["rollout_id"], []).extend(record["rows"])
    return found


def _records(saved: SavedPart) -> Iterator[tuple[str, str, Any]]:
    for entry in saved.files():
        _, kind, server, file = entry.path.split("/", 3)
        if file in (CONTINUATIONS, FINISHED, SESSIONS, ROWS):
            for record in saved.records(f"{kind}/{server}/{file.removesuffix('.jsonl')}"):
                yield server, file, record


def _continuation(server: str, record: Any) -> wire.Continuation:
    what = f"gym/agent/{server}/{CONTINUATIONS}"
    try:
        return strict.read(wire.Continuation, record, what)
    except strict.BadInput as bad:
        raise SnapshotRejected("(this one)", what, "; ".join(bad.problems)) from None


def _standing(found: _Found, server: str, line: wire.Continuation) -> dict[str, Any]:
    last = line.last_committed_model_call_id
    lacks = [name for name in line.resource_state_revisions if not _session(found, name, line)]
    if last is not None and not _has_row(found, line.rollout_id, last):
        lacks.append("token rows")
    return {
        "server": server,
        "run": line.attempt_index,
        "last_call": last,
        "rows": len(found.rows.get(line.rollout_id, ())),
        "starts_over": f"not saved: {', '.join(lacks)}" if lacks else None,
    }


def _session(found: _Found, server: str, line: wire.Continuation) -> bool:
    needed, saved = (
        line.resource_state_revisions[server],
        found.revisions.get((server, line.rollout_id)),
    )
    if saved is not None and saved != needed:
        what = f"gym/resource/{server}/{SESSIONS}"
        why = f"{line.rollout_id} is at revision {saved}, its continuation depends on {needed}"
        raise SnapshotRejected("(this one)", what, why)
    return saved is not None


def _has_row(found: _Found, rollout: str, call: str) -> bool:
    rows = found.rows.get(rollout)
    if rows and not any(key.endswith(f"/{call}") for key in rows):
        raise SnapshotRejected("(this one)", f"rows of {rollout}", f"none is of its last, {call}")
    return bool(rows)

"""What the person on call sees: `status()`, a live `status.json`, a log line while waiting, and
`attempts.jsonl`, the history of outcomes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from attrs import asdict

from fsm.drive import Activity
from fsm.engine import SnapshotEngine
from fsm.outcome import Aborted, Restored, Saved, SaveOutcome, Skipped
from fsm.token import RestoreToken

Outcome = SaveOutcome | Restored | RestoreToken

log = logging.getLogger("quiesce")

LOOK_EVERY_S = 1.0
SAY_EVERY_S = 10.0
STATUS, HISTORY = "status.json", "attempts.jsonl"
# Steps that nobody but the trainer ends.
WAITS_FOR_YOU = {
    "stay": ", everyone is paused until Engine.let_go()",
    "hand_over": ", until the process with the token has taken over, then Engine.let_go()",
}


class Watch:
    """Watches one engine. Files are written where the store has a folder (`root`)."""

    def __init__(self, engine: SnapshotEngine) -> None:
        self._engine = engine
        root = getattr(engine.store, "root", None)
        self._root = Path(root) if root is not None else None
        self._last: dict[str, Any] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._inside = False

    def status(self) -> dict[str, object]:
        activity = self._engine.activity()
        now = None if activity is None else asdict(activity)
        who = {"pid": os.getpid(), "host": socket.gethostname()}
        return {**who, "now": now, "last": self._last, "written_at": time.time()}

    def ended(self, outcome: Outcome) -> None:
        """Enter an outcome into the history, and leave the final status behind."""
        self._last = described(outcome)
        if self._root is not None and self._root.is_dir():
            line = json.dumps(self._last | {"at": time.time()})
            try:
                _append(self._root / HISTORY, line.encode() + b"\n")
            except OSError as error:  # an attempt that failed for a full disk is still data (S9)
                log.warning("cannot write %s: %s; the outcome was %s", HISTORY, error, line)
        self._write()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look on, inside and for as long as something is kept up in the background."""
        self._inside = True
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        try:
            yield
        finally:
            self._inside = False
            if self._engine.activity() is None:
                self._looking.cancel()
                await asyncio.wait({self._looking})
                self._looking = None

    async def _look(self) -> None:
        said_s = 0.0
        while True:
            self._write()
            await asyncio.sleep(LOOK_EVERY_S)
            activity = self._engine.activity()
            if activity is None and not self._inside:
                break
            if activity is None or activity.since_s < SAY_EVERY_S:
                said_s = 0.0
            elif activity.since_s - said_s >= SAY_EVERY_S:
                said_s = activity.since_s
                log.warning("%s", sentence(activity))
        self._write()
        self._looking = None

    def _write(self) -> None:
        """Best effort and never fsynced: a status that cannot be written must not stop a save."""
        if self._root is None or not self._root.is_dir() or self._engine.handed_over:
            return  # the root is the other process's now, and so is its status
        unfinished = self._root / f".{STATUS}.{os.getpid()}"
        try:
            unfinished.write_text(json.dumps(self.status()), encoding="utf-8")
            unfinished.replace(self._root / STATUS)
        except OSError as error:
            log.debug("cannot write %s: %s", STATUS, error)


def _append(path: Path, line: bytes) -> None:
    """The whole line or nothing of it, so that those that follow can be read."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        written = file.write(line)
        if written != len(line):
            file.truncate(before)
            raise OSError(f"only {written} of {len(line)} bytes were written; is the disk full?")


def writer(status: Mapping[str, Any]) -> str:
    """Who wrote a status, when, and whether that process still lives."""
    ago_s = max(0.0, time.time() - status["written_at"])
    gone = status["host"] == socket.gethostname() and not _lives(status["pid"])
    state = ", which is gone: holds end with their leases" if gone else ""
    return f"written {ago_s:.0f} s ago by process {status['pid']} on {status['host']}{state}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sentence(activity: Activity) -> str:
    """`save-1-7: still in 'drain' after 12 s, waiting for gym (p2_g1); in 288 s: aborting`."""
    waiting = ", ".join(
        f"{name} ({', '.join(names)})" if names else name
        for name, names in activity.waiting.items()
    )
    until = "" if activity.left_s is None else f"; in {activity.left_s:.0f} s: {activity.then}"
    whom = f", waiting for {waiting}" if waiting else WAITS_FOR_YOU.get(activity.step or "", "")
    return (
        f"{activity.label}: still in {activity.step!r} after {activity.since_s:.0f} s{whom}{until}"
    )


def described(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON-able data, for files and for `--json`."""
    said: dict[str, Any] = {"outcome": type(outcome).__name__.lower()}
    if isinstance(outcome, RestoreToken):
        return {"outcome": "handed_over", "snapshot": outcome.snapshot, "label": outcome.label}
    if isinstance(outcome, Skipped):
        return said | {"reason": outcome.reason.name.lower(), "detail": outcome.detail}
    said |= {"phases": {step: round(seconds, 6) for step, seconds in outcome.phases.items()}}
    if isinstance(outcome, Restored):
        anchor = None if outcome.anchor is None else asdict(outcome.anchor)
        return said | {"snapshot": outcome.snapshot, "anchor": anchor}
    unreleased = {name: sorted(names) for name, names in outcome.unreleased.items()}
    if isinstance(outcome, Aborted):
        cause = outcome.cause
        return said | {
            "reason": cause.reason.name.lower(),
            "step": cause.step,
            "participant": cause.participant,
            "code": cause.code,
            "detail": cause.detail,
            "unreleased": unreleased,
        }
    said |= {"snapshot": outcome.snapshot, "unreleased": unreleased}
    if isinstance(outcome, Saved):
        said |= {"durable": outcome.durable, "pause_s": round(outcome.pause_s, 6)}
    return said

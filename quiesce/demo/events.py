"""The trainer's event stream: one JSON object a line, written here, followed by the display.

Kinds and their fields, all plain data:

| event | fields |
|---|---|
| rollout | rollout, run, state (running, parked, finished, trained, dropped), turn if known |
| phase | phase: a state of the engine's table |
| snapshot | outcome: saved, skipped, aborted or unresolved; snapshot, pause_s, phases, reason |
| process | process, did: started, killed or exited; took_s |
| restored | snapshot, took_s, continued, answered, started_over: how many rollouts |
| step | step, rows: how many |
| note | text |
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events, each in one write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **data: Any) -> None:
        os.write(self._file, json.dumps({"event": event, **data}).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class Follow:
    """Reads an event log that somebody else is writing. A file that is not there yet is empty."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        """The events since the last call; a line that is not whole yet waits for its end."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._read += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.splitlines()]

"""What happened when, as data: rows that fired, hooks that ran, how long each took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import field, frozen


@frozen
class Event:
    """One thing that happened at `at_s` (seconds of the engine's clock).

    kind: `row` (a row fired: state, event, target), `call` (a hook of a participant ended:
    step, participant, outcome, took_s), `dropped` (a late or repeated event), `note`.
    """

    at_s: float
    kind: str
    what: str
    data: dict[str, Any] = field(factory=dict)


@frozen
class Trace:
    """The history of one attempt. `listener` sees each event as it comes (logs, metrics)."""

    table: str
    clock: Callable[[], float]
    events: list[Event] = field(factory=list)
    listener: Callable[[Event], None] | None = None

    def add(self, kind: str, what: str, **data: Any) -> None:
        event = Event(self.clock(), kind, what, data)
        self.events.append(event)
        if self.listener is not None:
            self.listener(event)

    def rows(self) -> list[str]:
        return [event.what for event in self.events if event.kind == "row"]

    def phases(self) -> dict[str, float]:
        """Seconds spent in each step, in order of the first time it ran."""
        seconds: dict[str, float] = {}
        for event in self.events:
            if event.kind == "row" and event.data.get("step"):
                step = event.data["step"]
                seconds[step] = seconds.get(step, 0.0) + event.data["took_s"]
        return seconds

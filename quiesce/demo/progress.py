"""What is known of a running demo: its event stream (quiesce.demo.events), summed up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from attrs import define, field, frozen


@frozen
class Rollout:
    name: str
    run: int
    turn: int
    state: str


@frozen
class Snapshot:
    """One attempt. phases: seconds by step; pause_s: what the rollouts waited."""

    outcome: str
    snapshot: str
    pause_s: float
    phases: Mapping[str, float]
    reason: str


@define
class Progress:
    """Fed with events in order; the display and the tables read it."""

    rollouts: dict[str, Rollout] = field(factory=dict)
    snapshots: list[Snapshot] = field(factory=list)
    phase: str = "idle"
    starts_s: dict[str, list[float]] = field(factory=dict)  # process: seconds of each start
    restores_s: list[float] = field(factory=list)
    crashes: list[str] = field(factory=list)  # names of the processes that were killed
    step: int = 0

    def apply(self, event: Mapping[str, Any]) -> str | None:
        """Take in one event; returns it as a line for people, or None when it is too small for
        one. Raises ValueError for a kind of event that nobody defined."""
        kind = event.get("event")
        if kind not in _HANDLERS:
            raise ValueError(f"no such event: {kind!r} (known: {', '.join(_HANDLERS)})")
        return _HANDLERS[kind](self, event)

    def counts(self) -> dict[str, int]:
        """How many rollouts are in each state."""
        return dict(Counter(rollout.state for rollout in self.rollouts.values()))


def _rollout(progress: Progress, event: Mapping[str, Any]) -> None:
    name = event["rollout"]
    known = progress.rollouts.get(name)
    turn = event.get("turn", known.turn if known is not None else 0)
    progress.rollouts[name] = Rollout(name, event["run"], turn, event["state"])


def _phase(progress: Progress, event: Mapping[str, Any]) -> None:
    progress.phase = event["phase"]


def _snapshot(progress: Progress, event: Mapping[str, Any]) -> str:
    made = Snapshot(
        event["outcome"],
        event.get("snapshot", ""),
        event.get("pause_s", 0.0),
        event.get("phases", {}),
        event.get("reason", ""),
    )
    progress.snapshots.append(made)
    if made.outcome == "saved":
        return f"{made.snapshot} saved, rollouts paused for {made.pause_s:.2f} s"
    return f"snapshot {made.outcome}: {made.reason}"


def _process(progress: Progress, event: Mapping[str, Any]) -> str:
    name, did, took_s = event["process"], event["did"], event.get("took_s")
    if did == "killed":
        progress.crashes.append(name)
    if did == "started" and took_s is not None:
        progress.starts_s.setdefault(name, []).append(took_s)
        return f"{name} started in {took_s:.1f} s"
    return f"{name} {did}"


def _restored(progress: Progress, event: Mapping[str, Any]) -> str:
    progress.restores_s.append(event["took_s"])
    return (
        f"restored {event['snapshot']} in {event['took_s']:.2f} s: {event['continued']} rollouts "
        f"continue, {event.get('answered', 0)} had finished, {event['started_over']} start over"
    )


def _step(progress: Progress, event: Mapping[str, Any]) -> str:
    progress.step = event["step"]
    states = ", ".join(f"{count} {state}" for state, count in sorted(progress.counts().items()))
    return f"train step {event['step']} on {event['rows']} rows; rollouts: {states or 'none yet'}"


def _note(_: Progress, event: Mapping[str, Any]) -> str:
    return str(event["text"])


_HANDLERS = {
    "rollout": _rollout,
    "phase": _phase,
    "snapshot": _snapshot,
    "process": _process,
    "restored": _restored,
    "step": _step,
    "note": _note,
}

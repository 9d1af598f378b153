"""The join: what becomes of every rollout at a restore. One pure function.

The ledger in the cut is the authority; Gym's part says how far each rollout came:

    ledger      Gym's part              then
    finished    anything                kept; dropped in Gym
    unfinished  finished result *       answered at once, as run n+1
    unfinished  continuation *          continues as run n+1
    unfinished  anything else, nothing  starts over as run n+1
    unknown     anything                discarded on every server

    * of the same run and the same server, with all its capture rows in the data plane
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from participants.controller.ledger import HELD, UNFINISHED, Rollout

# Why a rollout starts over, in words for people. Others come from Gym, as codes of its restarts.
BEGAN_AFTER = "began after the snapshot"
NOT_IN_GYM = "Gym has no part of it"
OTHER_RUN = "Gym's part is of another run"
OTHER_SERVER = "Gym's part is on another server"
CAPTURE_MISSING = "its token-capture rows are missing"
TRAIN_MISSING = "its training row is missing"


@frozen
class Continue:
    """Goes on after model call `call`; None: it had not finished one."""

    call: str | None


@frozen
class AnswerAtOnce:
    """Gym has the finished result."""


@frozen
class StartOver:
    """Begins anew. counted: a history was thrown away."""

    reason: str
    counted: bool = True


@frozen
class Keep:
    """Finished before the snapshot."""


Decision = Continue | AnswerAtOnce | StartOver | Keep


@frozen
class Part:
    """What the Gym servers staged of one rollout. decision: what follows if the run and the
    agent server are those of the ledger."""

    server: str
    attempt_index: int
    decision: Continue | AnswerAtOnce


@frozen
class GymPart:
    """What all Gym servers staged. restarts: rollout to reason, of those that Gym left out.
    rows: the token-capture rows that a rollout's history names."""

    parts: Mapping[str, Part] = field(factory=dict)
    restarts: Mapping[str, str] = field(factory=dict)
    rows: Mapping[str, Sequence[str]] = field(factory=dict)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> GymPart:
        """From the facts of the Gym participant's `restore` (gym/merge.py)."""
        parts = {
            rollout: Part(one["server"], one["attempt_index"], Continue(one["last_call"]))
            for rollout, one in facts.get("_continuations", {}).items()
        }
        # A rollout that has finished does not stand anywhere any more.
        parts |= {
            rollout: Part(one["server"], one["attempt_index"], AnswerAtOnce())
            for rollout, one in facts.get("_finished", {}).items()
        }
        return cls(parts, facts.get("_restarts", {}), facts.get("_rows", {}))

    def rollouts(self) -> set[str]:
        """Everything that some server has staged."""
        return {*self.parts, *self.restarts, *self.rows}


@frozen
class Join:
    """decisions: by rollout of the ledger. rows: capture rows of those that survive, by rollout.
    discard: what every Gym server drops."""

    decisions: dict[str, Decision]
    rows: dict[str, tuple[str, ...]]
    discard: tuple[str, ...]


def join(
    entries: Iterable[Rollout], gym: GymPart, capture: Collection[str], train: Collection[str]
) -> Join:
    """Decide for every rollout. capture, train: keys of the rows that exist.

    Claims of steps that the anchor does not contain must have been rolled back before (R6).
    """
    decisions = {one.rollout_id: _decide(one, gym, capture, train) for one in entries}
    surviving = {n for n, d in decisions.items() if isinstance(d, Continue | AnswerAtOnce)}
    begun = {n for n, d in decisions.items() if isinstance(d, StartOver)}
    return Join(
        decisions,
        rows={name: tuple(gym.rows.get(name, ())) for name in decisions if name in surviving},
        discard=tuple(sorted((gym.rollouts() | begun) - surviving)),
    )


def sentence(one: Rollout, decision: Decision) -> str:
    """The decision about a ledger entry, for people."""
    runs = f"run {one.attempt_index} → run {one.attempt_index + 1}"
    match decision:
        case Continue(None):
            return f"{one.rollout_id}: {runs}, continues before its first call"
        case Continue(call):
            return f"{one.rollout_id}: {runs}, continues after {call}"
        case AnswerAtOnce():
            return f"{one.rollout_id}: {runs}, finished in Gym, answered at once"
        case StartOver(reason):
            return f"{one.rollout_id}: starts over, {reason}"
        case Keep() if one.state == "dropped":
            return f"{one.rollout_id}: dropped, {one.reason}"
    return f"{one.rollout_id}: finished, kept"


def _decide(
    one: Rollout, gym: GymPart, capture: Collection[str], train: Collection[str]
) -> Decision:
    if one.state in HELD and one.row_key not in train:
        return StartOver(TRAIN_MISSING)
    if one.state not in UNFINISHED:
        return Keep()
    if one.rollout_id in gym.restarts:
        return StartOver(gym.restarts[one.rollout_id])
    part = gym.parts.get(one.rollout_id)
    if part is None:
        # Not sent yet at the cut: if it ever began, then after it, and no history is lost.
        unsent = one.state == "reserved" and one.expect == "fresh"
        return StartOver(BEGAN_AFTER, counted=False) if unsent else StartOver(NOT_IN_GYM)
    if part.server != one.server:
        return StartOver(OTHER_SERVER)
    if part.attempt_index != one.attempt_index:
        return StartOver(OTHER_RUN)
    if any(key not in capture for key in gym.rows.get(one.rollout_id, ())):
        return StartOver(CAPTURE_MISSING)
    return part.decision

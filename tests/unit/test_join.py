"""The join over the full product of what it looks at."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest

from participants.controller.join import (
    BEGAN_AFTER,
    CAPTURE_MISSING,
    NOT_IN_GYM,
    OTHER_RUN,
    OTHER_SERVER,
    TRAIN_MISSING,
    AnswerAtOnce,
    Continue,
    GymPart,
    Join,
    Keep,
    Part,
    StartOver,
    join,
    sentence,
)
from participants.controller.ledger import Rollout
from participants.gym import merge, wire

NAME, ROW = "p2_g1", "p2_g1/call-7"
STATES = ("reserved", "expecting", "dispatched", "sealed", "claimed", "trained", "dropped", None)
PARTS = (None, "continuation", "finished")
RUNS = (2, 3, 4)  # Gym's; the ledger has 3
OWNERS = ("agent-0", "agent-1")  # Gym's; the ledger has agent-0


class Case(NamedTuple):
    """state: of the ledger entry, None: unknown there. part, run, owner: of Gym's part. out: Gym
    left the rollout out. capture, train: do its rows exist?"""

    state: str | None
    part: str | None
    run: int
    owner: str
    out: bool
    capture: bool
    train: bool


BOTH = (False, True)
PRODUCT = [
    Case(*values) for values in itertools.product(STATES, PARTS, RUNS, OWNERS, BOTH, BOTH, BOTH)
]


def entry(state: str, **changes: object) -> Rollout:
    expect = "continuation" if state == "expecting" else "fresh"
    state = "reserved" if state == "expecting" else state
    row = NAME if state in ("sealed", "claimed", "trained") else ""
    fields = {"attempt_index": 3, "state": state, "expect": expect, "row_key": row, **changes}
    return Rollout(rollout_id=NAME, group="p2", generation=1, prompt=2, server="agent-0", **fields)


def decide(case: Case) -> Join:
    decision = Continue("call-7") if case.part == "continuation" else AnswerAtOnce()
    gym = GymPart(
        {NAME: Part(case.owner, case.run, decision)} if case.part else {},
        {NAME: "restart_only"} if case.out else {},
        {NAME: [ROW]} if case.part else {},
    )
    entries = [entry(case.state)] if case.state else []
    return join(entries, gym, {ROW} if case.capture else set(), {NAME} if case.train else set())


def expected(case: Case) -> object:
    """The table of the design, read from top to bottom."""
    if case.state in ("trained", "dropped"):
        return Keep()
    if case.state in ("sealed", "claimed"):
        return Keep() if case.train else StartOver(TRAIN_MISSING)
    if case.out:
        return StartOver("restart_only")
    if case.part is None:
        return StartOver(BEGAN_AFTER, False) if case.state == "reserved" else StartOver(NOT_IN_GYM)
    if case.owner != "agent-0":
        return StartOver(OTHER_SERVER)
    if case.run != 3:
        return StartOver(OTHER_RUN)
    if not case.capture:
        return StartOver(CAPTURE_MISSING)
    return Continue("call-7") if case.part == "continuation" else AnswerAtOnce()


@pytest.mark.parametrize("state", STATES)
def test_every_combination(state: str | None) -> None:
    for case in [case for case in PRODUCT if case.state == state]:
        joined = decide(case)
        in_gym = case.part is not None or case.out
        if state is None:
            assert joined == Join({}, {}, (NAME,) if in_gym else ()), case
            continue
        want = expected(case)
        survives = isinstance(want, Continue | AnswerAtOnce)
        dropped = not survives and (in_gym or isinstance(want, StartOver))
        assert joined.decisions == {NAME: want}, case
        assert joined.rows == ({NAME: (ROW,)} if survives else {}), case
        assert joined.discard == ((NAME,) if dropped else ()), case


def test_sentences_for_people() -> None:
    assert sentence(entry("dispatched", attempt_index=0), Continue("call-7")) == (
        "p2_g1: run 0 → run 1, continues after call-7"
    )
    assert sentence(entry("sealed"), Keep()) == "p2_g1: finished, kept"
    assert sentence(entry("reserved"), StartOver(BEGAN_AFTER, False)) == (
        "p2_g1: starts over, began after the snapshot"
    )
    assert sentence(entry("dispatched"), AnswerAtOnce()) == (
        "p2_g1: run 3 → run 4, finished in Gym, answered at once"
    )
    assert sentence(entry("dispatched"), Continue(None)) == (
        "p2_g1: run 3 → run 4, continues before its first call"
    )
    assert sentence(entry("dropped", reason="stale"), Keep()) == "p2_g1: dropped, stale"


def test_facts_as_the_gym_participant_gives_them() -> None:
    line = wire.Continuation(1, "p0_g0", 1, "p0_g0", None, {})
    doubled = wire.Continuation(1, "p0_g2", 0, "p0_g2", "call-1", {})
    agent = wire.Report(
        phase="staged",
        continuations=(line, doubled),
        finished=(wire.Finished("p0_g1", 0, "digest"),),
        rows={"p0_g1": ("p0_g1/call-0",)},
    )
    other = wire.Report(phase="staged", continuations=(doubled,))
    policy = wire.Report(phase="staged", rows={"p0_g3": ("p0_g3/call-0",)})
    reports = {"agent-0": agent, "agent-1": other, "policy": policy}
    gym = GymPart.read(merge.restore_facts(reports, {"p0_g4": "uncertain"}))
    assert gym.parts == {
        "p0_g0": Part("agent-0", 1, Continue(None)),
        "p0_g1": Part("agent-0", 0, AnswerAtOnce()),
    }
    assert dict(gym.restarts) == {"p0_g2": merge.TWO_OWNERS, "p0_g4": "uncertain"}
    assert gym.rollouts() == {f"p0_g{number}" for number in range(5)}
    assert GymPart.read({}) == GymPart()

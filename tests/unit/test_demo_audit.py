"""Each invariant, broken alone, gives a sentence that says what is wrong; a good run none."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from quiesce.demo.audit import Evidence, Figures, Finish, audit
from quiesce.demo.effects import Effect


def session(
    rollout: str, turns: int, run: str = "1.0", after: Effect | None = None
) -> list[Effect]:
    """A seed and its steps, or, after an effect, the steps up to `turns` of a later run."""
    log: list[Effect] = []
    last = after
    for turn in range(last.turn + 1 if last else 0, turns + 1):
        effect = Effect(
            kind="step" if turn else "seed",
            rollout=rollout,
            run=run,
            lineage="0",
            request=f"{rollout}-{run}-{turn}",
            turn=turn,
            parent=last.token if last else "",
            token=f"{rollout}/{run}/{turn}",
        )
        log.append(effect)
        last = effect
    return log


def good() -> Evidence:
    """Two rollouts. p0_g1 was at turn 9 when a crash took it back to turn 6; p0_g0 was done."""
    first = session("p0_g0", 12)
    lost = session("p0_g1", 9)
    again = session("p0_g1", 14, run="2.1", after=lost[6])
    return Evidence(
        drawn=("p0_g0", "p0_g1"),
        finished=(Finish("p0_g0", 12, first[-1].token), Finish("p0_g1", 14, again[-1].token)),
        rows=("p0_g1",),
        trained={1: ("p0_g0",)},
        effects=(*first, *lost, *again),
        folders=("snapshot_1", "incarnations"),
        capture=("p0_g1/call-1",),
        capture_named=("p0_g1/call-1", "p0_g1/call-2"),
    )


def problems(**changes: Any) -> list[str]:
    return list(audit(evolve(good(), **changes)).problems)


def test_a_good_run_has_no_problem_and_counts_what_a_crash_cost() -> None:
    result = audit(good())
    assert result.problems == ()
    assert result.figures == Figures(
        rollouts=2,
        turns_finished=26,
        turns_redone=3,  # turns 7 to 9, lost with the crash
        turns_redone_from_prompt=9,  # and turns 1 to 6, which the restore kept
        effects_applied=29,
        effects_surviving=26,
    )


def test_nothing_at_all_is_no_problem() -> None:
    empty = Evidence(drawn=(), finished=(), rows=(), trained={}, effects=(), folders=())
    assert audit(empty).problems == ()
    assert audit(empty).figures == Figures()


def test_a_rollout_that_started_over_kept_nothing() -> None:
    lost, again = session("p0_g0", 5), session("p0_g0", 12, run="2.1")
    evidence = Evidence(
        drawn=("p0_g0",),
        finished=(Finish("p0_g0", 12, again[-1].token),),
        rows=("p0_g0",),
        trained={},
        effects=(*lost, *again),
        folders=(),
    )
    result = audit(evidence)
    assert result.problems == ()
    assert (result.figures.turns_redone, result.figures.turns_redone_from_prompt) == (5, 5)


def test_a_lost_rollout() -> None:
    assert problems(drawn=("p0_g0", "p0_g1", "p1_g0")) == [
        "rollout p1_g0 is lost: drawn, never finished"
    ]
    assert problems(drawn=("p0_g0", "p0_g1", "p1_g0"), dropped=("p1_g0",)) == []


def test_a_doubled_rollout() -> None:
    finished = good().finished
    assert problems(finished=(*finished, finished[0])) == [
        "rollout p0_g0 is doubled: it ended 2 times"
    ]
    assert "rollout p0_g0 was drawn 2 times" in problems(drawn=("p0_g0", "p0_g0", "p0_g1"))
    assert problems(dropped=("p0_g0",)) == ["rollout p0_g0 is doubled: it ended 2 times"]


def test_a_rollout_that_nobody_drew() -> None:
    assert problems(drawn=("p0_g0",)) == ["rollout p0_g1 finished, but nobody drew it"]


def test_a_missing_row() -> None:
    assert problems(rows=()) == ["training row p0_g1 is missing: its rollout finished"]
    assert problems(trained={}) == ["training row p0_g0 is missing: its rollout finished"]


def test_a_doubled_row() -> None:
    assert problems(rows=("p0_g0", "p0_g1")) == [
        "training row p0_g0 is doubled: in the data plane and in train step 1"
    ]
    assert problems(trained={1: ("p0_g0",), 2: ("p0_g0",)}) == [
        "training row p0_g0 is doubled: in train step 1 and in train step 2"
    ]


def test_stray_rows() -> None:
    assert problems(rows=("p0_g1", "p9_g9")) == [
        "training row p9_g9 is a stray: no ledger names it"
    ]
    assert problems(capture=("p9_g9/call-1",)) == [
        "capture row p9_g9/call-1 is a stray: no journal and no ledger names it"
    ]


def test_a_tool_call_applied_twice() -> None:
    log = session("p0_g0", 12)
    twice = evolve(log[-1], turn=13, parent=log[-1].token, token="twice")
    found = problems(
        effects=(*log, twice, *good().effects[13:]),
        finished=(Finish("p0_g0", 12, "twice"), good().finished[1]),
    )
    assert found == [
        "rollout p0_g0: call p0_g0-1.0-12 was applied 2 times",
        "rollout p0_g0: 13 tool effects survive for 12 turns",
    ]


def test_a_tool_call_that_was_never_applied() -> None:
    log = [effect for effect in good().effects if effect.token != "p0_g0/1.0/5"]
    assert problems(effects=tuple(log)) == [
        "rollout p0_g0: token 'p0_g0/1.0/5' is not in the effect log"
    ]
    assert problems(finished=(Finish("p0_g0", 12, ""), good().finished[1])) == [
        "rollout p0_g0: its final token is not in the effect log"
    ]


def test_a_history_that_skips_or_mixes() -> None:
    log = list(good().effects)
    log[6] = evolve(log[6], parent=log[4].token)
    assert problems(effects=tuple(log)) == [
        "rollout p0_g0: 11 tool effects survive for 12 turns",
        f"rollout p0_g0: its turns are not in order: {[0, 1, 2, 3, 4, *range(6, 13)]}",
    ]
    log = list(good().effects)
    log[3] = evolve(log[3], rollout="p7_g7")
    assert problems(effects=tuple(log)) == [
        "rollout p0_g0: its history contains an effect of p7_g7"
    ]


def test_a_history_without_its_seed() -> None:
    log = list(good().effects)
    log[1] = evolve(log[1], parent="")
    assert problems(effects=tuple(log)) == [
        "rollout p0_g0: its history begins with turn 1, not with a seed"
    ]


def test_a_log_that_runs_in_a_circle_ends_the_walk() -> None:
    log = list(good().effects)
    log[0] = evolve(log[0], parent=log[12].token)
    assert any("p0_g0" in problem for problem in problems(effects=tuple(log)))


@pytest.mark.parametrize(
    ("name", "words"),
    [("tmp_2_ab", "was left unpublished"), ("trash_2_ab", "is trash left behind")],
)
def test_leftovers(name: str, words: str) -> None:
    assert problems(folders=("snapshot_1", name)) == [f"folder {name} {words}"]

"""SAVE: the states of one snapshot attempt (specs/save.md).

Read a line as its arrows: the state, what the rollouts do in it, the step that runs,
then where each event leads. `late` is the deadline of the step.
"""

from __future__ import annotations

from attrs import evolve

from fsm.table import PARKED, PARKING, RUN, STAY, Rules, State, Table

OK, FAILED, LATE, HOLD_LOST = "ok", "failed", "late", "hold_lost"
CANCELLED, CLAIMED = "cancelled", "claimed"
EVENTS = (OK, FAILED, LATE, HOLD_LOST, CANCELLED, CLAIMED)

# Cells that many lines share, here and in RESTORE.
ABORT = {FAILED: "aborting", LATE: "aborting", HOLD_LOST: "aborting", CANCELLED: "aborting"}
# After the cut the parts describe one instant: a hold that ends can no longer spoil them (S4).
_CUT = ABORT | {HOLD_LOST: STAY}
# From the rename on nothing outside may stop the attempt (S2, S6): these are remembered.
SHIELDED = {HOLD_LOST: STAY, CANCELLED: STAY}


def line(name: str, rollouts: str, step: str, **moves: str) -> State:
    """A line as it reads: what the rollouts do, the step that runs, where each event leads."""
    return State(name, moves, step, rollouts)


def end(name: str, events: tuple[str, ...] = EVENTS, rollouts: str = RUN) -> State:
    """A terminal state: every event that still comes is expected, and nothing follows from it."""
    return State(name, dict.fromkeys(events, STAY), rollouts=rollouts, terminal=True)


RULES = Rules(
    abort="aborting",
    no_return="sealed",
    failures=frozenset({FAILED, LATE, HOLD_LOST, CANCELLED}),
    releasing=frozenset({"resume", "abort"}),
    unaided=frozenset({FAILED, LATE, CLAIMED}),
)
STEPS = frozenset(
    "pause prepare drain commit cut seal publish stay resume abort discard".split()  # noqa: SIM905
)

# fmt: off
SAVE = Table("save", "idle", EVENTS, (
    #    state            rollouts  step        ok                      else
    line("idle",          RUN,      "pause",    ok="paused",            **ABORT),
    line("paused",        RUN,      "prepare",  ok="draining",          **ABORT),
    line("draining",      PARKING,  "drain",    ok="drained",           **ABORT),
    line("drained",       PARKED,   "commit",   ok="gym_committed",     **ABORT),
    line("gym_committed", PARKED,   "cut",      ok="rl_cut",            **ABORT),
    line("rl_cut",        PARKED,   "seal",     ok="sealed",            **_CUT),
    # S2: no `failed` here. Only winning the claim says "not published"; late says "unknown".
    line("sealed",        PARKED,   "publish",  ok="published",         claimed="aborting",
                                                late="unresolved",      **SHIELDED),
    line("published",     PARKED,   "resume",   ok="resumed",           failed="release_pending",
                                                late="release_pending", **SHIELDED),
    line("unresolved",    PARKED,   "resume",   ok="publish_unresolved",
         failed="publish_unresolved",           late="publish_unresolved", **SHIELDED),
    line("aborting",      PARKED,   "abort",    ok="aborted",           failed="aborted",
                                                late="aborted",         **SHIELDED),
    end("resumed"),
    end("release_pending"),
    end("publish_unresolved"),
    end("aborted"),
), STEPS, RULES)
# fmt: on


def release_at_cut(save: Table) -> Table:
    """SAVE with its resume before seal (S10): the pause ends with the cut.

    No edge leads from there back to a parked state. A release that did not reach every server
    does not spoil the snapshot, so sealing goes on and the outcome names those servers; a failed
    seal or publish only discards the folder.
    """
    lines = save.states
    discard = {FAILED: "discarding", LATE: "discarding", CANCELLED: "discarding", HOLD_LOST: STAY}
    moved = {
        "rl_cut": evolve(
            lines["rl_cut"],
            step="resume",
            moves={OK: "released", FAILED: "released", LATE: "released", **SHIELDED},
        ),
        "released": State("released", {OK: "sealed", **discard}, "seal"),
        "sealed": evolve(
            lines["sealed"],
            rollouts=RUN,
            moves={OK: "published", CLAIMED: "discarding", LATE: "publish_unresolved", **SHIELDED},
        ),
        "discarding": State(
            "discarding",
            {OK: "discarded", FAILED: "discarded", LATE: "discarded", **SHIELDED},
            "discard",
        ),
        "aborting": lines["aborting"],
        "published": end("published"),
        "publish_unresolved": end("publish_unresolved"),
        "discarded": end("discarded"),
        "aborted": end("aborted"),
    }
    kept = [one for one in save.lines if one.name not in moved][:5]
    # Past the cut a failure discards instead of aborting: rollouts run already.
    rules = evolve(save.rules, no_return="rl_cut")
    return evolve(save, name="save_release_at_cut", lines=(*kept, *moved.values()), rules=rules)


SAVE_RELEASE_AT_CUT = release_at_cut(SAVE)


STAYING = "staying"


def stay_paused(save: Table) -> Table:
    """SAVE with a state between publish and resume, for a job that is about to be stopped (S11).

    Rollouts stay parked and their leases are renewed until somebody lets them go. A hold that
    ends by itself releases the others too. When the process is stopped there (`cancelled`) nobody
    is released: what would run then has no controller, so the leases end the holds.
    """
    sealed = save.states["sealed"]
    go_on = dict.fromkeys((OK, FAILED, LATE, HOLD_LOST), "published")
    staying = State(STAYING, {**go_on, CANCELLED: "left_paused"}, "stay", PARKED)
    lines: list[State] = []
    for one in save.lines:
        both = (evolve(sealed, moves={**sealed.moves, OK: STAYING}), staying)
        lines += both if one is sealed else (one,)
    left_paused = end("left_paused", rollouts=PARKED)
    return evolve(save, name="save_stay_paused", lines=(*lines, left_paused))


SAVE_STAY_PAUSED = stay_paused(SAVE)

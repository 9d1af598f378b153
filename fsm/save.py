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

_ABORT = {FAILED: "aborting", LATE: "aborting", HOLD_LOST: "aborting", CANCELLED: "aborting"}
# After the cut the parts describe one instant: a hold that ends can no longer spoil them (S4).
_CUT = _ABORT | {HOLD_LOST: STAY}
# From the rename on nothing outside may stop the attempt (S2, S6): these are remembered.
_SHIELDED = {HOLD_LOST: STAY, CANCELLED: STAY}
_OVER = dict.fromkeys(EVENTS, STAY)


def _line(name: str, rollouts: str, step: str, **moves: str) -> State:
    return State(name, moves, step, rollouts)


def _end(name: str) -> State:
    return State(name, _OVER, terminal=True)


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
    #     state            rollouts  step        ok                      else
    _line("idle",          RUN,      "pause",    ok="paused",            **_ABORT),
    _line("paused",        RUN,      "prepare",  ok="draining",          **_ABORT),
    _line("draining",      PARKING,  "drain",    ok="drained",           **_ABORT),
    _line("drained",       PARKED,   "commit",   ok="gym_committed",     **_ABORT),
    _line("gym_committed", PARKED,   "cut",      ok="rl_cut",            **_ABORT),
    _line("rl_cut",        PARKED,   "seal",     ok="sealed",            **_CUT),
    # S2: no `failed` here. Only winning the claim says "not published"; late says "unknown".
    _line("sealed",        PARKED,   "publish",  ok="published",         claimed="aborting",
                                                 late="unresolved",      **_SHIELDED),
    _line("published",     PARKED,   "resume",   ok="resumed",           failed="release_pending",
                                                 late="release_pending", **_SHIELDED),
    _line("unresolved",    PARKED,   "resume",   ok="publish_unresolved",
          failed="publish_unresolved",           late="publish_unresolved", **_SHIELDED),
    _line("aborting",      PARKED,   "abort",    ok="aborted",           failed="aborted",
                                                 late="aborted",         **_SHIELDED),
    _end("resumed"),
    _end("release_pending"),
    _end("publish_unresolved"),
    _end("aborted"),
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
            moves={OK: "released", FAILED: "released", LATE: "released", **_SHIELDED},
        ),
        "released": State("released", {OK: "sealed", **discard}, "seal"),
        "sealed": evolve(
            lines["sealed"],
            rollouts=RUN,
            moves={OK: "published", CLAIMED: "discarding", LATE: "publish_unresolved", **_SHIELDED},
        ),
        "discarding": State(
            "discarding",
            {OK: "discarded", FAILED: "discarded", LATE: "discarded", **_SHIELDED},
            "discard",
        ),
        "aborting": lines["aborting"],
        "published": _end("published"),
        "publish_unresolved": _end("publish_unresolved"),
        "discarded": _end("discarded"),
        "aborted": _end("aborted"),
    }
    kept = [line for line in save.lines if line.name not in moved][:5]
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
    for line in save.lines:
        both = (evolve(sealed, moves={**sealed.moves, OK: STAYING}), staying)
        lines += both if line is sealed else (line,)
    left_paused = State("left_paused", _OVER, rollouts=PARKED, terminal=True)
    return evolve(save, name="save_stay_paused", lines=(*lines, left_paused))


SAVE_STAY_PAUSED = stay_paused(SAVE)

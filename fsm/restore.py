"""RESTORE: the states of one restore (specs/restore.md).

Everything is staged and validated on every server before `resume` activates anything (R1);
until then every failure leads to `aborting`, which drops what was staged.
"""

from __future__ import annotations

from fsm.save import CANCELLED, FAILED, HOLD_LOST, LATE, OK
from fsm.table import PARKED, RUN, STAY, Rules, State, Table

EVENTS = (OK, FAILED, LATE, HOLD_LOST, CANCELLED)

_ABORT = {FAILED: "aborting", LATE: "aborting", HOLD_LOST: "aborting", CANCELLED: "aborting"}
_SHIELDED = {HOLD_LOST: STAY, CANCELLED: STAY}
_OVER = dict.fromkeys(EVENTS, STAY)


def _line(name: str, rollouts: str, step: str, **moves: str) -> State:
    return State(name, moves, step, rollouts)


def _end(name: str) -> State:
    return State(name, _OVER, terminal=True)


RULES = Rules(
    abort="aborting",
    no_return="controller_loaded",
    failures=frozenset({FAILED, LATE, HOLD_LOST, CANCELLED}),
    releasing=frozenset({"resume", "rollback"}),
    unaided=frozenset({FAILED, LATE}),
)
STEPS = frozenset(
    {"discover", "fence", "load_data_plane", "restore_gym", "load_controller", "resume", "rollback"}
)

# fmt: off
RESTORE = Table("restore", "idle", EVENTS, (
    #     state                rollouts  step               ok                       else
    _line("idle",              RUN,      "discover",        ok="discovered",         **_ABORT),
    _line("discovered",        RUN,      "fence",           ok="paused",             **_ABORT),
    _line("paused",            PARKED,   "load_data_plane", ok="data_plane_loaded",  **_ABORT),
    _line("data_plane_loaded", PARKED,   "restore_gym",     ok="gym_restored",       **_ABORT),
    _line("gym_restored",      PARKED,   "load_controller", ok="controller_loaded",  **_ABORT),
    _line("controller_loaded", PARKED,   "resume",          ok="resumed",
                                         failed="failed",   late="failed",           **_SHIELDED),
    _line("aborting",          PARKED,   "rollback",        ok="aborted",
                                         failed="failed",   late="failed",           **_SHIELDED),
    _end("resumed"),
    _end("aborted"),
    _end("failed"),
), STEPS, RULES)
# fmt: on

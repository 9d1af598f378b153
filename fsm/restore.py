"""RESTORE: the states of one restore (specs/restore.md).

Everything is staged and validated on every server before `resume` activates anything (R1);
until then every failure leads to `aborting`, which drops what was staged.
"""

from __future__ import annotations

from attrs import evolve

from fsm.save import ABORT, CANCELLED, FAILED, HOLD_LOST, LATE, OK, SHIELDED, end, line
from fsm.table import PARKED, RUN, Rules, State, Table

EVENTS = (OK, FAILED, LATE, HOLD_LOST, CANCELLED)


RULES = Rules(
    abort="aborting",
    no_return="controller_loaded",
    failures=frozenset({FAILED, LATE, HOLD_LOST, CANCELLED}),
    releasing=frozenset({"resume", "rollback"}),
    unaided=frozenset({FAILED, LATE}),
)
STEPS = frozenset(
    {
        "discover",
        "fence",
        "load_data_plane",
        "restore_gym",
        "hand_over",
        "take_over",
        "load_controller",
        "resume",
        "rollback",
    }
)
HANDED_OVER = "gym_restored"  # where a restore may change its process (R8)

# fmt: off
RESTORE = Table("restore", "idle", EVENTS, (
    #    state                rollouts  step               ok                       else
    line("idle",              RUN,      "discover",        ok="discovered",         **ABORT),
    line("discovered",        RUN,      "fence",           ok="paused",             **ABORT),
    line("paused",            PARKED,   "load_data_plane", ok="data_plane_loaded",  **ABORT),
    line("data_plane_loaded", PARKED,   "restore_gym",     ok="gym_restored",       **ABORT),
    line("gym_restored",      PARKED,   "load_controller", ok="controller_loaded",  **ABORT),
    line("controller_loaded", PARKED,   "resume",          ok="resumed",
                                        failed="failed",   late="failed",           **SHIELDED),
    line("aborting",          PARKED,   "rollback",        ok="aborted",
                                        failed="failed",   late="failed",           **SHIELDED),
    end("resumed", EVENTS),
    end("aborted", EVENTS),
    end("failed", EVENTS),
), STEPS, RULES)
# fmt: on


def handing_over(restore: Table) -> Table:
    """RESTORE up to `gym_restored`, where it is handed to another process (R8).

    From there on whoever has the token decides. This process renews until it is told to stop,
    and whatever happens it neither activates nor drops: if nobody takes over, leases end the
    holds, and a hold of a restore that ends drops what is staged (R1).
    """
    order = list(restore.states)
    before = restore.lines[: order.index(HANDED_OVER)]
    handing = State(HANDED_OVER, dict.fromkeys(EVENTS, "handed_over"), "hand_over", PARKED)
    over = end("handed_over", EVENTS, PARKED)
    lines = (*before, handing, restore.states["aborting"], over)
    rules = evolve(restore.rules, no_return=HANDED_OVER)
    name = "restore_handing_over"
    return evolve(
        restore,
        name=name,
        lines=(*lines, end("aborted", EVENTS), end("failed", EVENTS)),
        rules=rules,
    )


def taking_over(restore: Table) -> Table:
    """RESTORE from `gym_restored` on, in the process that has the token (R8)."""
    order = list(restore.states)
    taken = State("handed_over", {OK: HANDED_OVER, **ABORT}, "take_over", PARKED)
    lines = (taken, *restore.lines[order.index(HANDED_OVER) :])
    return evolve(restore, name="restore_taking_over", initial="handed_over", lines=lines)


RESTORE_HANDING_OVER = handing_over(RESTORE)
RESTORE_TAKING_OVER = taking_over(RESTORE)

"""HOLD: what one Gym server is in while somebody saves or restores (specs/hold.md).

The left column is a save (`open → closing → held → committed → open`), the right one a
restore (`open → fencing → fenced → staged → open`). `newer` says that a message with a
higher fence arrived: it ends the older hold first, from any state (H1).
"""

from __future__ import annotations

from fsm.table import PARKED, PARKING, RUN, STAY, Rules, State, Table

PREPARE, QUIET, COMMIT = "prepare", "quiet", "commit"
FENCE, STAGE, ROLLBACK = "fence", "stage", "rollback"
RESUME, LAPSE, NEWER = "resume", "lapse", "newer"
EVENTS = (PREPARE, QUIET, COMMIT, FENCE, STAGE, RESUME, ROLLBACK, LAPSE, NEWER)

OPEN, CLOSING, HELD, COMMITTED = "open", "closing", "held", "committed"
FENCING, FENCED, STAGED = "fencing", "fenced", "staged"

_LET_GO = {LAPSE: OPEN, NEWER: OPEN}
# An abort may overtake its own prepare, so releasing an open server is expected (H1).
_IDLE = {RESUME: STAY, ROLLBACK: STAY, NEWER: STAY}


def _line(name: str, rollouts: str, **moves: str) -> State:
    return State(name, moves, None, rollouts)


# fmt: off
HOLD = Table("hold", OPEN, EVENTS, (
    #     state      rollouts
    _line(OPEN,      RUN,      prepare=CLOSING, fence=FENCING,  **_IDLE),
    _line(CLOSING,   PARKING,  quiet=HELD,      resume=OPEN,    **_LET_GO),
    _line(HELD,      PARKED,   commit=COMMITTED, resume=OPEN,   **_LET_GO),
    _line(COMMITTED, PARKED,                    resume=OPEN,    **_LET_GO),
    _line(FENCING,   PARKING,  quiet=FENCED,    rollback=OPEN,  **_LET_GO),
    _line(FENCED,    PARKED,   stage=STAGED,    rollback=OPEN,  **_LET_GO),
    # R1: only here does resume activate; rollback, lapse and a newer fence drop what is staged.
    _line(STAGED,    PARKED,   resume=OPEN,     rollback=OPEN,  **_LET_GO),
), rules=Rules(unaided=frozenset({LAPSE})))
# fmt: on

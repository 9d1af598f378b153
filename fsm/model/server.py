"""One Gym server in the explorer's world: its HOLD phase, the fence it remembers, the messages
under way to it, and the gate that answers them (participants/gym/servers/gate.py)."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from fsm import hold
from fsm.table import Row, Table

UNKNOWN, OURS, NEWER = 0, 1, 2  # fences, in their order
DOWN = "down"  # its process is gone; not a phase of HOLD
WRITING, TAKE = "writing", "take"  # a commit under way; the fence of a newer controller
ASKED, YES, NO, LOST = "asked", "yes", "no", "lost"


class Broken(Exception):
    """A rule was broken in the middle of a move; the message is the rule."""


class Guard(enum.Enum):
    """What the engine and the gate check besides the tables; a test leaves each of them out."""

    EPOCH = "the answer of an earlier step is dropped"
    OLDER_FENCE = "a message with an older fence is refused (H1)"
    ENDED_FENCE = "a message of a hold that has ended is refused (H1)"
    MUST_STAND = "a commit that is written asks whether its hold still stands (H3)"
    PHASE = "a message that does not fit the phase is refused (H2)"
    ONLY_STAGED = "an activation is confirmed only where something was staged (R1)"
    CHECK_PHASE = "the hold check asks for the phase (S4)"
    CHECK_MOVED = "the hold check asks whether anything moved (S4)"
    CLAIMED = "a folder that somebody claimed is not renamed (S2)"


class Server(NamedTuple):
    """callee: its rank. ended: how the hold of `fence` ended. reply: of what it was asked last.
    still: quiet, and nothing moved since. part: whole in the folder. active: by this restore."""

    callee: bool
    phase: str = hold.OPEN
    fence: int = UNKNOWN
    ended: str = ""
    box: tuple[str, ...] = ()
    reply: str = ""
    told: bool = False
    still: bool = False
    part: bool = False
    active: bool = False

    @property
    def closed(self) -> bool:
        return self.phase not in (hold.OPEN, DOWN)

    def without(self, message: str) -> Server:
        box = list(self.box)
        box.remove(message)
        return self._replace(box=tuple(box))

    def sent(self, message: str) -> Server:
        return self._replace(box=tuple(sorted((*self.box, message))))


class Gate:
    """Answers messages as the gate of a server does. `fired` collects the rows of HOLD."""

    def __init__(self, table: Table, guards: frozenset[Guard], fired: set[Row]) -> None:
        self._rows = {(row.source, row.event): row for row in table.rows()}
        self._guards, self._fired = guards, fired
        self._work: dict[str, Callable[[Server], tuple[Server, bool | None]]] = {
            "prepare": lambda one: self._close(one, hold.PREPARE),
            "fence": lambda one: self._close(one, hold.FENCE),
            TAKE: self._take,
            "drain": self._drain,
            "commit": self._commit,
            "check": self._check,
            "stage": self._stage,
            "resume": lambda one: self._release(one, hold.RESUME),
            "activate": self._activate,
            "rollback": lambda one: self._release(one, hold.ROLLBACK),
        }

    def handle(self, one: Server, message: str) -> tuple[Server, bool | None]:
        """What the server is afterwards, and its answer; None: the answer comes later."""
        if one.phase == DOWN:
            return one, False
        if message == WRITING:
            return self._written(one)
        admitted = self._admit(one, message)
        if admitted is None:
            # To a release this says that the hold is over, which is all that it is for (H1).
            return one, message in ("resume", "rollback")
        return self._work[message](admitted)

    def lapse(self, one: Server) -> Server:
        return self._let_go(one, hold.LAPSE)

    # -- H1 ------------------------------------------------------------------------------------

    def _admit(self, one: Server, message: str) -> Server | None:
        fence = NEWER if message == TAKE else OURS
        if fence > one.fence:
            if one.fence != UNKNOWN:
                one = self._fire(one, hold.NEWER)
            return one._replace(fence=fence, ended="")
        if fence < one.fence and Guard.OLDER_FENCE in self._guards:
            return None
        if one.ended and Guard.ENDED_FENCE in self._guards and not _may_repeat(one, message):
            return None
        return one

    # -- the work ------------------------------------------------------------------------------

    def _close(self, one: Server, event: str) -> tuple[Server, bool]:
        if self._refuses(one, event):
            return one, False
        return self._fire(one, event), True

    def _take(self, one: Server) -> tuple[Server, bool]:
        if (one.phase, hold.FENCE) not in self._rows:
            raise Broken(f"H1: a newer fence is refused by a server that is {one.phase}")
        return self._fire(one, hold.FENCE), True

    def _drain(self, one: Server) -> tuple[Server, bool]:
        if one.phase in (hold.CLOSING, hold.FENCING):
            return self._fire(one, hold.QUIET)._replace(still=True), True
        return one, one.closed and one.phase != hold.STAGED

    def _commit(self, one: Server) -> tuple[Server, bool | None]:
        if self._refuses(one, hold.COMMIT):
            return one, False
        return one.sent(WRITING), None

    def _written(self, one: Server) -> tuple[Server, bool]:
        stands = one.fence == OURS and not one.ended and one.closed
        if Guard.MUST_STAND in self._guards and not stands:
            return one, False
        return self._fire(one, hold.COMMIT)._replace(part=True), True

    def _stage(self, one: Server) -> tuple[Server, bool]:
        if self._refuses(one, hold.STAGE):
            return one, False
        return self._fire(one, hold.STAGE), True

    def _check(self, one: Server) -> tuple[Server, bool]:
        phase = one.phase in (hold.COMMITTED, hold.STAGED) or Guard.CHECK_PHASE not in self._guards
        moved = not one.still and one.closed and Guard.CHECK_MOVED in self._guards
        return one, phase and not moved

    def _activate(self, one: Server) -> tuple[Server, bool]:
        staged = one.phase == hold.STAGED
        if not staged and not one.active and Guard.ONLY_STAGED in self._guards:
            return one, False
        one, ok = self._release(one, hold.RESUME)
        return one._replace(active=one.active or (staged and ok)), ok

    def _release(self, one: Server, event: str) -> tuple[Server, bool]:
        if one.ended:
            return one, True
        if self._refuses(one, event):
            return one, False
        return self._let_go(one, event), True

    # -- HOLD ----------------------------------------------------------------------------------

    def _refuses(self, one: Server, event: str) -> bool:
        return Guard.PHASE in self._guards and (one.phase, event) not in self._rows

    def _let_go(self, one: Server, event: str) -> Server:
        return self._fire(one, event)._replace(ended=event)

    def _fire(self, one: Server, event: str) -> Server:
        row = self._rows.get((one.phase, event))
        if row is None:
            raise Broken(f"HOLD has no row for {event!r} in {one.phase!r}")
        self._fired.add(row)
        return one._replace(phase=row.target, still=one.still and row.target != hold.OPEN)


def _may_repeat(one: Server, message: str) -> bool:
    """A release of what is released is fine, unless it would claim an activation (R1)."""
    if message == "activate":
        return one.ended == hold.RESUME
    return message in ("resume", "rollback")

"""A restore that changes its process (R8): two tables against HOLD, in one world.

The first process runs its table until it gives its token away; after that it is no more than
somebody who renews (`World.first`). The second one is the controller of the world from the moment
it takes the token; until then there is none.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsm.hold import HOLD
from fsm.model import rules
from fsm.model.coordinator import Move, left
from fsm.model.programs import RELEASING, RESTORE_PROGRAMS, Programs
from fsm.model.protocol import ALL_GUARDS, Protocol
from fsm.model.server import OURS, Guard
from fsm.model.world import OFF, ON, OVER, World, hit, over
from fsm.restore import HANDED_OVER, RESTORE_HANDING_OVER, RESTORE_TAKING_OVER
from fsm.save import CANCELLED, FAILED, HOLD_LOST, LATE, OK
from fsm.table import Row, Table

TABLES = (RESTORE_HANDING_OVER, RESTORE_TAKING_OVER)
# The token: under way to its first user, in use; the same once more, in a third process.
GIVEN, TAKEN, GIVEN_AGAIN, TAKEN_AGAIN = "given", "taken", "given again", "taken again"


class HandOver(Protocol):
    """The worlds of a restore that one process begins and another one finishes."""

    def __init__(
        self,
        servers: int,
        faults: int,
        *,
        tables: tuple[Table, Table] = TABLES,
        hold_table: Table = HOLD,
        programs: Programs | None = None,
        guards: frozenset[Guard] = ALL_GUARDS,
    ) -> None:
        super().__init__(
            tables[0], servers, faults, hold_table=hold_table, programs=programs, guards=guards
        )
        self._second = Protocol(
            tables[1], servers, faults, hold_table=hold_table, programs=programs, guards=guards
        )
        self.name = "restore_in_two"
        self._programs = programs or RESTORE_PROGRAMS

    @property
    def rows_fired(self) -> set[tuple[str, Row]]:
        return super().rows_fired | self._second.rows_fired

    # -- what the explorer asks ----------------------------------------------------------------

    def ended(self, world: World) -> bool:
        return world.first != ON and super().ended(world)

    def problem(self, world: World) -> str:
        return self._second.problem(world) if world.first else super().problem(world)

    def _moves(self, world: World) -> Iterator[Move]:
        if not world.first:
            for label, after in super()._moves(world):
                yield label, self._given(after) if after.state == HANDED_OVER else after
            return
        if world.token in (GIVEN, GIVEN_AGAIN):
            yield from self._second.surroundings(world)
            yield from self._token_moves(world)
        else:
            yield from self._second._moves(world)
            yield from self._again(world)
        if world.first == ON:
            yield from self._first_moves(world)

    # -- the token -----------------------------------------------------------------------------

    def _given(self, world: World) -> World:
        """The first process renews from here on; nobody else has begun."""
        return self._waiting(world)._replace(first=ON, token=GIVEN)

    def _waiting(self, world: World) -> World:
        """A token is all that is left of a process: nobody waits for its answers."""
        servers = tuple(left(one) for one in world.servers)
        return world._replace(
            state=self._second.initial,
            servers=servers,
            done=0,
            renewal=OFF,
            incomplete=False,
            cancelled=False,
            stale="",
        )

    def _token_moves(self, world: World) -> Iterator[Move]:
        if world.newer:
            yield "the token is refused: another controller began", over(world)
            return
        token = TAKEN if world.token == GIVEN else TAKEN_AGAIN
        taken = self._second.entered(world._replace(token=token))
        yield "another process takes the token", taken
        if world.faults:
            yield "the token is lost", over(world)

    def _again(self, world: World) -> Iterator[Move]:
        """The record of a restore that is over refuses its token."""
        if world.token != TAKEN or world.state == OVER or not world.faults:
            return
        if rules.RECORD not in world.facts:
            after = self._waiting(hit(world))._replace(token=GIVEN_AGAIN, facts=self._staged())
            yield "the second process crashes, and its token is used again", after

    def _staged(self) -> frozenset[str]:
        """What the first process had done when it gave the token."""
        steps = [step for step in self._coordinator.steps.values() if step not in RELEASING]
        return frozenset(action for step in steps if step for action in self._programs[step])

    # -- the first process ---------------------------------------------------------------------

    def _first_moves(self, world: World) -> Iterator[Move]:
        """It may stop as soon as the second one renews; before that, and in any other way, it is
        a fault that it stops."""
        begun = world.token in (TAKEN, TAKEN_AGAIN) or world.state == OVER
        if begun:
            yield self._first_hears(world, OK, "the first process is told to stop")
        if any(one.fence != OURS or not one.closed for one in world.servers):
            yield self._first_hears(world, HOLD_LOST, "the first process notices a lost hold")
        if world.state == OVER:
            yield self._first_hears(world, LATE, "the first process has waited too long")
        if world.faults:
            after = hit(world)
            yield self._first_hears(after, OK, "the first process is told to stop too early")
            yield self._first_hears(after, LATE, "the deadline of 'hand_over' passes")
            yield self._first_hears(after, CANCELLED, "the first process is closed")
            yield self._first_hears(after, FAILED, "'wait' fails in the first process")
            yield "the first process crashes", after._replace(first=OVER)

    def _first_hears(self, world: World, event: str, why: str) -> Move:
        coordinator = self._coordinator
        row = coordinator.fire(HANDED_OVER, event)
        broken = rules.given_away(row) or coordinator.late_events(rules.OUT_OF_HAND)
        return f"{why} ({coordinator.name}: {row})", world._replace(first=OVER, broken=broken)

"""The coordinator in small: events fire rows of the real table, steps run their programs."""

from __future__ import annotations

from fsm.model import rules
from fsm.model.programs import (
    AT_ONCE,
    RANKS,
    RELEASES,
    RELEASING,
    REPEATED,
    RESTORE_PROGRAMS,
    SAVE_PROGRAMS,
    Programs,
)
from fsm.model.server import ASKED, Guard, Server
from fsm.model.world import OFF, ON, OVER, PUBLISHED, SEALED, TRASH, UNPUBLISHED, World, over
from fsm.save import CLAIMED, FAILED, LATE, OK
from fsm.table import Row, Table

Move = tuple[str, World]


class Coordinator:
    """What the engine does with one table. `fired` collects the rows that fire."""

    def __init__(
        self, table: Table, faults: int, programs: Programs | None, guards: frozenset[Guard]
    ) -> None:
        self.table, self.name, self.terminal = table, table.name, table.terminal
        self.restoring = "restore_gym" in table.steps
        self.fired: set[Row] = set()
        self.steps = {line.name: line.step for line in table.lines}
        self._programs = programs or (RESTORE_PROGRAMS if self.restoring else SAVE_PROGRAMS)
        self._guards, self._faults = guards, faults
        self._rows = {(row.source, row.event): row for row in table.rows()}

    # -- where it stands -----------------------------------------------------------------------

    def action(self, world: World) -> str | None:
        """What the running step does now; None: it has ended, and its answer is in the inbox."""
        step = self.steps[world.state]
        program = self._programs[step] if step else ()
        return program[world.done] if world.done < len(program) else None

    def verb(self, world: World) -> str:
        """Which message, if any, the controller waits to see answered."""
        if world.state == OVER:
            return ""
        return (self.action(world) or "").partition(" ")[0]

    def releasing(self, world: World) -> bool:
        return self.steps[world.state] in RELEASING

    # -- events and actions --------------------------------------------------------------------

    def fire(self, state: str, event: str) -> Row | None:
        row = self._rows.get((state, event))
        if row is not None:
            self.fired.add(row)
        return row

    def event(self, world: World, event: str, why: str) -> Move:
        """Fire the row for `event`: what a story says of it, and the world after it."""
        row = self.fire(world.state, event)
        if row is None:
            wrong = f"{self.name} has no row for {event!r} in {world.state!r}"
            return why, world._replace(broken=wrong)
        world = rules.remember(world, self.steps[world.state], event)
        if row.target == row.source:
            if event in (OK, FAILED, LATE):
                world = world._replace(broken="a step ends or is late, and nothing follows")
            return f"{why} ({self.name}: {row})", world
        return f"{why}\n    {self.name}: {row}", self._follow(self._leave(world, row))

    def _follow(self, world: World) -> World:
        """Begin the step of the new state; after the last one, say what came of it."""
        if world.state not in self.terminal:
            return self.enter(world)
        broken = world.broken or self._wrong_end(world) or self.late_events(world.state)
        return over(world)._replace(broken=broken)

    def _wrong_end(self, world: World) -> str:
        return rules.end(world, restoring=self.restoring, faultless=world.faults == self._faults)

    def late_events(self, end: str) -> str:
        """Whatever comes after the end changes nothing."""
        for event in self.table.events:
            row = self.fire(end, event)
            if row is None or row.target != row.source:
                return f"{event!r} after the end changes {end!r}"
        return ""

    def _leave(self, world: World, row: Row) -> World:
        """The step is over: nobody waits for its answers, and its barrier is let go (S3)."""
        behind = row.event not in (OK, CLAIMED) and self.action(world) == "rename"
        in_inbox = self.action(world) is None and row.event not in (OK, FAILED)
        if behind and world.folder != TRASH:
            world = rules.publishing(world)
        return world._replace(
            state=row.target,
            done=0,
            servers=tuple(left(one) for one in world.servers),
            barrier=False,
            renaming=world.renaming or behind,
            stale=OK if in_inbox and Guard.EPOCH not in self._guards else world.stale,
        )

    def enter(self, world: World) -> World:
        """Do at once what needs no waiting; send the next messages."""
        while (action := self.action(world)) is not None:
            verb, _, whom = action.partition(" ")
            if action in AT_ONCE:
                world = self.perform(world, action)
            elif whom not in RANKS:
                return world
            elif targets := self._targets(world, verb, whom):
                return self._send(world, verb, targets)
            world = world._replace(done=world.done + 1, facts=world.facts | {action})
        return world

    def _send(self, world: World, verb: str, targets: list[int]) -> World:
        servers = list(world.servers)
        for number in targets:
            reply = servers[number].reply or ASKED
            servers[number] = servers[number].sent(verb)._replace(reply=reply)
        world = world._replace(servers=tuple(servers))
        return rules.activating(world) if verb == "activate" else world

    def _targets(self, world: World, verb: str, whom: str) -> list[int]:
        return [
            number
            for number, one in enumerate(world.servers)
            if one.callee in RANKS[whom] and (one.told or verb not in RELEASES)
        ]

    def finish(self, world: World) -> World:
        """The action is done; on to the next."""
        action = self.action(world)
        assert action is not None, "a step that has ended finishes nothing"
        if action in world.facts and action not in REPEATED:
            return world._replace(broken=f"{action!r} was done twice in one attempt")
        return self.enter(world._replace(done=world.done + 1, facts=world.facts | {action}))

    def perform(self, world: World, action: str) -> World:
        """What an action of the controller itself changes."""
        verb, _, whom = action.partition(" ")
        if action == "start renewal" and world.renewal == ON:
            return world._replace(broken="H3: two renewals run at once")
        if verb == "tell":
            servers = (
                one._replace(told=one.told or one.callee == (whom == "callees"))
                for one in world.servers
            )
            return world._replace(servers=tuple(servers))
        if action in ("cut", "load controller"):
            return rules.one_instant(world, staged=self.restoring)
        if action == "claim":
            claimed = world.folder in (UNPUBLISHED, SEALED)
            return rules.claiming(world)._replace(folder=TRASH if claimed else world.folder)
        changes = {
            "start renewal": {"renewal": ON},
            "stop renewal": {"renewal": OFF if world.renewal == ON else world.renewal},
            "stop dispatch": {"dispatch": False},
            "open dispatch": {"dispatch": True},
            "take barrier": {"barrier": True},
            "drop barrier": {"barrier": False},
            "seal": {"folder": SEALED},
        }
        return world._replace(**changes.get(action, {}))  # type: ignore[arg-type]

    def rename(self, world: World, *, left_behind: bool = False) -> World:
        if left_behind:  # asked the rules when it was left behind
            folder = TRASH if world.folder == TRASH else PUBLISHED
            return world._replace(renaming=False, folder=folder)
        return rules.publishing(world)._replace(folder=PUBLISHED)


def left(one: Server) -> Server:
    """A hold check changes nothing on a server, so one that is left behind need not be followed."""
    box = tuple(message for message in one.box if message != "check")
    return one._replace(reply="", box=box)

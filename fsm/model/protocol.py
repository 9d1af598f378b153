"""Everything that can happen next: answers, deadlines, and every fault, at any moment."""

from __future__ import annotations

from collections.abc import Iterator

from fsm import hold
from fsm.hold import HOLD
from fsm.model import rules
from fsm.model.coordinator import Coordinator, Move
from fsm.model.programs import ON_DISK, Programs
from fsm.model.server import (
    ASKED,
    DOWN,
    LOST,
    NO,
    OURS,
    TAKE,
    UNKNOWN,
    WRITING,
    YES,
    Broken,
    Gate,
    Guard,
    Server,
)
from fsm.model.world import (
    NOTICED,
    OFF,
    ON,
    OVER,
    SEALED,
    TRASH,
    UNPUBLISHED,
    World,
    hit,
    over,
    with_server,
)
from fsm.save import CANCELLED, CLAIMED, FAILED, HOLD_LOST, LATE, OK
from fsm.table import Row, Table

ALL_GUARDS = frozenset(Guard)


class Protocol:
    """The worlds of one table against HOLD, with so many servers and faults.

    Half of the servers are callers (agents), half callees (policy servers).
    """

    def __init__(
        self,
        table: Table,
        servers: int,
        faults: int,
        *,
        hold_table: Table = HOLD,
        programs: Programs | None = None,
        guards: frozenset[Guard] = ALL_GUARDS,
    ) -> None:
        self.name, self.participants, self.faults = table.name, servers, faults
        self._guards = guards
        callers = servers - servers // 2
        self._names = [f"agent-{number + 1}" for number in range(callers)]
        self._names += [f"policy-{number + 1}" for number in range(servers - callers)]
        self._coordinator = Coordinator(table, faults, programs, guards)
        self._hold_fired: set[Row] = set()
        self._gate = Gate(hold_table, guards, self._hold_fired)

    @property
    def rows_fired(self) -> set[tuple[str, Row]]:
        """Table and row, of both tables, that fired while the worlds were walked."""
        own = {(self._coordinator.name, row) for row in self._coordinator.fired}
        return own | {(HOLD.name, row) for row in self._hold_fired}

    @property
    def initial(self) -> str:
        return self._coordinator.table.initial

    # -- what the explorer asks ----------------------------------------------------------------

    def start(self) -> World:
        restoring = self._coordinator.restoring
        servers = tuple(Server(callee=name.startswith("policy")) for name in self._names)
        folder = "" if restoring else UNPUBLISHED
        world = World(self.initial, servers, folder, self.faults, dispatch=not restoring)
        return self.entered(world)

    def entered(self, world: World) -> World:
        """The step of the world's state has begun."""
        return self._coordinator.enter(world)

    def canonical(self, world: World) -> World:
        """Servers of one rank are alike: worlds that differ in their order are one world. What no
        move and no rule asks about any more is forgotten."""
        servers = world.servers
        if rules.WENT_WRONG in world.facts and not world.token:  # a token may be used again
            servers = tuple(one._replace(part=False, still=False) for one in servers)
        ordered = tuple(sorted(servers))
        return world if ordered == world.servers else world._replace(servers=ordered)

    def ended(self, world: World) -> bool:
        return world.state == OVER and not any(one.box or one.closed for one in world.servers)

    def problem(self, world: World) -> str:
        """The rule that this world breaks, or nothing."""
        return world.broken or rules.problem(world, self._coordinator.steps.get(world.state))

    def moves(self, world: World) -> Iterator[Move]:
        """After the end servers have nothing to do with each other: each is followed alone."""
        for label, after in self._moves(world):
            if after.state != OVER or len(after.servers) == 1:
                yield label, after
                continue
            for number, one in enumerate(after.servers):
                followed = f"{label}\n    from here on: {self._name(after, number)} alone"
                yield followed, after._replace(servers=(one,))

    def _moves(self, world: World) -> Iterator[Move]:
        yield from self.surroundings(world)
        if world.state != OVER:
            yield from self._step_moves(world)
            yield from self._outside_moves(world)

    def surroundings(self, world: World) -> Iterator[Move]:
        """What goes on by itself, whether there is a controller or not."""
        for number, one in enumerate(world.servers):
            if number == 0 or world.servers[number - 1] != one:
                yield from self._server_moves(world, number)
        if world.renaming:
            yield (
                "the rename that was left behind ends",
                self._coordinator.rename(world, left_behind=True),
            )
        if not world.newer and (world.state == OVER or world.faults):
            yield "a newer controller takes over", self._take_over(world)

    # -- servers -------------------------------------------------------------------------------

    def _server_moves(self, world: World, number: int) -> Iterator[Move]:
        name, one = self._name(world, number), world.servers[number]
        for message in sorted(set(one.box)):
            yield from self._handled(world, number, message)
        if one.phase == DOWN:
            again = one._replace(phase=hold.OPEN)
            yield f"{name} is started again", with_server(world, number, again)
            return
        kept = self._kept(world, one)
        if one.closed and not kept:
            yield f"the lease of {name} ends", self._lapse(world, number)
        if not world.faults:
            return
        faulty = hit(world)
        if one.closed and kept:
            yield f"the lease of {name} ends", self._lapse(faulty, number)
        if one.still and (one.part or WRITING in one.box):
            moved = one._replace(still=False)
            yield f"something moves on {name}", with_server(faulty, number, moved)
        yield f"{name} crashes", with_server(faulty, number, _crashed(one))

    def _lapse(self, world: World, number: int) -> World:
        try:
            return with_server(world, number, self._gate.lapse(world.servers[number]))
        except Broken as broken:
            return world._replace(broken=str(broken))

    def _kept(self, world: World, one: Server) -> bool:
        """A lease that ends while its controller renews or releases is a fault; later it is how
        a server helps itself (H3)."""
        if world.first == ON and one.fence == OURS:
            return True  # by the first process, until it is over itself (R8)
        if world.state == OVER or one.fence != OURS:
            return False
        return world.renewal == ON or (self._coordinator.releasing(world) and not world.hurt)

    def _handled(self, world: World, number: int, message: str) -> Iterator[Move]:
        """A message arrives at a server: what it does, and what becomes of its answer."""
        name, one = self._name(world, number), world.servers[number].without(message)
        try:
            after, ok = self._gate.handle(one, message)
        except Broken as broken:
            yield f"{name} handles {message}", world._replace(broken=str(broken))
            return
        verb = "commit" if message == WRITING else message
        asked = one.reply == ASKED and self._coordinator.verb(world) == verb
        reply = one.reply if ok is None or not asked else YES if ok else NO
        told = f"begins to {verb}" if ok is None else f"answers {verb}: {'yes' if ok else 'no'}"
        yield f"{name} {told}", with_server(world, number, after._replace(reply=reply))
        if not asked or ok is None:
            return
        if one.phase == DOWN:
            silent = one._replace(reply=LOST)
            yield f"{name} does not answer {verb}", with_server(world, number, silent)
        if world.faults:
            yield from self._mishandled(world, number, (one, after), verb)

    def _mishandled(
        self, world: World, number: int, around: tuple[Server, Server], verb: str
    ) -> Iterator[Move]:
        """around: the server before and after it has done what it was asked."""
        name = self._name(world, number)
        refusing, silent = hit(world, hurt=self._coordinator.releasing(world)), hit(world)
        before, after = (one._replace(reply=NO) for one in around)
        yield f"{name} refuses {verb}", with_server(refusing, number, before)
        yield f"{name} does {verb}, then fails", with_server(refusing, number, after)
        before, after = (one._replace(reply=LOST) for one in around)
        yield f"{name} does {verb}; its answer is lost", with_server(silent, number, after)
        yield f"{verb} to {name} is lost", with_server(silent, number, before)

    # -- the controller's step -----------------------------------------------------------------

    def _step_moves(self, world: World) -> Iterator[Move]:
        action = self._coordinator.action(world)
        if action is None:
            event = FAILED if world.incomplete and self._coordinator.releasing(world) else OK
            yield self._coordinator.event(world, event, "the step ends")
        elif any(one.reply for one in world.servers):
            yield from self._answers(world)
        else:
            yield from self._work(world, action)
        yield from self._deadline(world, action)

    def _answers(self, world: World) -> Iterator[Move]:
        """An answer under way tells the controller nothing before it is the last, or a no."""
        verb, releasing = self._coordinator.verb(world), self._coordinator.releasing(world)
        replies = {one.reply for one in world.servers} - {""}
        if replies == {YES} or (releasing and ASKED not in replies):
            servers = tuple(one._replace(reply="") for one in world.servers)
            heard = world._replace(servers=servers, incomplete=world.incomplete or replies != {YES})
            yield f"everyone has answered {verb}", self._coordinator.finish(heard)
        elif NO in replies and not releasing:
            event = HOLD_LOST if verb == "check" else FAILED
            yield self._coordinator.event(world, event, f"the controller hears a no to {verb}")

    def _work(self, world: World, action: str) -> Iterator[Move]:
        if action == "rename":
            yield from self._renames(world)
            return
        if action == "seal" and world.folder == TRASH:
            yield self._coordinator.event(world, FAILED, "the folder to seal is gone")
            return
        yield f"done: {action}", self._coordinator.finish(self._coordinator.perform(world, action))
        if action == "claim" and world.bad_disk:
            yield f"{action} fails; the next start sweeps", self._coordinator.finish(world)
        if world.bad_disk and action in ON_DISK:
            yield self._coordinator.event(world, FAILED, f"the disk fails in {action!r}")
        elif world.faults:
            after = hit(world, hurt=False)._replace(bad_disk=action in ON_DISK)
            yield self._coordinator.event(after, FAILED, f"{action!r} fails")

    def _renames(self, world: World) -> Iterator[Move]:
        """S2: not published is said only by a won claim, ours or a newer controller's."""
        if world.folder == TRASH and Guard.CLAIMED in self._guards:
            yield self._coordinator.event(world, CLAIMED, "the folder was claimed")
            return
        yield "the folder is renamed", self._coordinator.finish(self._coordinator.rename(world))
        if world.bad_disk or world.faults:
            after = world if world.bad_disk else hit(world, hurt=False)._replace(bad_disk=True)
            after = after._replace(folder=TRASH)
            yield self._coordinator.event(
                after, CLAIMED, "the rename fails and the folder is claimed"
            )

    def _deadline(self, world: World, action: str | None) -> Iterator[Move]:
        """Free where something is known to hang, and in publish, whose clock is the hold's."""
        hangs = any(one.reply == LOST for one in world.servers)
        hangs |= (action in ON_DISK and world.bad_disk) or self._coordinator.steps[
            world.state
        ] == "publish"
        step = self._coordinator.steps[world.state]
        if hangs or world.faults:
            after = world if hangs else hit(world)
            yield self._coordinator.event(after, LATE, f"the deadline of {step!r} passes")

    # -- from outside --------------------------------------------------------------------------

    def _outside_moves(self, world: World) -> Iterator[Move]:
        if world.renewal == ON and any(self._lost(world, one) for one in world.servers):
            yield "the renewal notices a lost hold", world._replace(renewal=NOTICED)
        if world.renewal == NOTICED:
            after = world._replace(renewal=OFF)
            yield self._coordinator.event(after, HOLD_LOST, "the controller hears of a lost hold")
        if world.stale:
            after = world._replace(stale="")
            yield self._coordinator.event(
                after, world.stale, "the late answer of an earlier step arrives"
            )
        if world.cancelled or world.faults:
            after = world if world.cancelled else hit(world, hurt=False)._replace(cancelled=True)
            yield self._coordinator.event(after, CANCELLED, "somebody cancels")
        if world.faults:
            yield "the controller crashes", self._crash(world)

    def _lost(self, world: World, one: Server) -> bool:
        """Only a confirmed hold has a lease to lose."""
        rank = "callees" if one.callee else "callers"
        if not world.facts & {f"prepare {rank}", f"fence {rank}"}:
            return False
        moved = one.part and not one.still
        return one.fence != OURS or bool(one.ended) or not one.closed or moved

    def _crash(self, world: World) -> World:
        return over(world._replace(faults=world.faults - 1))

    def _take_over(self, world: World) -> World:
        """Its start claims what is unpublished (F6); then it fences every server."""
        after = world if world.state == OVER else hit(world)
        folder = TRASH if world.folder in (UNPUBLISHED, SEALED) else world.folder
        servers = tuple(one.sent(TAKE) for one in world.servers)
        return after._replace(newer=True, folder=folder, servers=servers)

    def _name(self, world: World, number: int) -> str:
        return self._names[number] if len(world.servers) > 1 else "the server"


def _crashed(one: Server) -> Server:
    """Memory and running handlers are gone; a part on disk stays."""
    box = tuple(message for message in one.box if message != WRITING)
    reply = LOST if one.reply == ASKED and WRITING in one.box else one.reply
    return one._replace(phase=DOWN, fence=UNKNOWN, ended="", still=False, box=box, reply=reply)

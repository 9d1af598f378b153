"""What is saved, in small: one rollout of two model calls with a tool call between them, its
journal, token rows, ledger entry, acknowledgement and training row, across saves, crashes and
restores. Nothing may be lost, and nothing may happen twice.

The other model proves that a published snapshot describes one instant; here it is one move.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

CALLS = ("call-1", "tool", "call-2")
TOOL = "tool"
NO_ROW, BUFFERED, USED, CLEARED = "", "buffered", "used", "cleared"
ALL_DOWN, TRAINER_DOWN, UP = "all down", "trainer down", "up"


class Care(enum.Enum):
    """What keeps data whole; a test leaves each of them out."""

    PARKED = "a rollout whose tool call is under way is not saved (H5)"
    REQUEST_ID = "a repeated tool call gets the recorded answer"
    NAMED_CALL = "a repeated model call gets the recorded answer"
    ROW_FIRST = "the token row is written before the reply goes out"
    ONE_MUTATION = "training row, seal and owed acknowledgement are one mutation"
    ACK_AFTER_SEAL = "a result is acknowledged only once it is sealed"
    REPLACED = "activation replaces a session with its recorded answers (R4)"
    STALE_RUN = "a call of a closed run is refused (R3)"
    ANCHOR = "a row used by a step that the anchor lacks comes back as buffered (R6)"


class Data(NamedTuple):
    """Everything that a snapshot holds. Tokens are (call, sample): each upstream call samples anew.

    journal: outcomes the agent recorded. result: finished, kept until acknowledged. replies and
    rows: of the policy server and in the data plane. effects, tool_answered: of the session."""

    journal: tuple[tuple[str, int], ...] = ()
    result: bool = False
    replies: frozenset[tuple[str, int]] = frozenset()
    rows: frozenset[tuple[str, int]] = frozenset()
    effects: int = 0
    tool_answered: bool = False
    sealed: bool = False
    owed: bool = False
    row: str = NO_ROW
    trained: int = 0


class World(NamedTuple):
    """asked: the call under way; answer: its reply, under way too. late: a tool call of a closed
    run that may still arrive. checkpoint: what the trainer's durable weights have trained on."""

    data: Data
    faults: int
    up: str = UP
    saved: Data | None = None
    asked: str = ""
    answer: tuple[str, int] | None = None
    samples: int = 0
    checkpoint: int = 0
    late: bool = False


Move = tuple[str, World]
ALL_CARE = frozenset(Care)


class Rollout:
    """The worlds of one rollout; a fault is a crash or a lost reply."""

    name, participants = "one rollout", 1

    def __init__(self, faults: int, care: frozenset[Care] = ALL_CARE) -> None:
        self.faults, self._care = faults, care

    def start(self) -> World:
        return World(Data(), self.faults)

    def canonical(self, world: World) -> World:
        return world

    def ended(self, world: World) -> bool:
        data = world.data
        done = data.sealed and not data.owed and not data.result
        return world.up == UP and done and world.checkpoint == data.trained == 1 and not world.late

    def problem(self, world: World) -> str:
        data = world.data
        if data.effects > 1:
            return "the tool's effect happened twice"
        if len(data.replies) > len({call for call, _ in data.replies}):
            return "a model call was sampled twice"
        if (TOOL, 0) in data.journal and not data.effects:
            return "the tool's effect is lost"
        if data.effects and (TOOL, 0) not in data.journal and not _knows(world):
            return "a tool's effect that nobody knows of"
        return "" if world.up != UP else _trainer_problem(data)

    def moves(self, world: World) -> Iterator[Move]:
        if world.up != ALL_DOWN:
            yield from self._agent(world)
        if world.up == UP:
            yield from self._controller(world)
            yield from self._trainer(world)
            yield from self._save(world)
        else:
            yield "restore", self._restore(world)
        if world.late:
            yield "a tool call of the closed run arrives", self._late(world)
        if world.faults and world.up != ALL_DOWN:
            yield "everything crashes", _crash(world, ALL_DOWN)
        if world.faults and world.up == UP:
            yield "the trainer crashes, servers live on", _crash(world, TRAINER_DOWN)

    # -- Gym -----------------------------------------------------------------------------------

    def _agent(self, world: World) -> Iterator[Move]:
        data = world.data
        done = len(data.journal)
        if world.answer is not None:
            journal = (*data.journal, world.answer)
            kept = data._replace(journal=journal, result=len(journal) == len(CALLS))
            yield (
                f"the agent records {world.asked}",
                world._replace(data=kept, asked="", answer=None),
            )
            if world.faults:
                yield (
                    f"the reply of {world.asked} is lost, the client asks again",
                    world._replace(answer=None, faults=world.faults - 1),
                )
        elif world.asked == TOOL:
            yield "the tool runs", self._tool(world)._replace(answer=(TOOL, 0))
        elif world.asked:
            yield f"the policy server answers {world.asked}", self._model(world)
        elif done < len(CALLS):
            yield f"the agent asks {CALLS[done]}", world._replace(asked=CALLS[done])

    def _tool(self, world: World) -> World:
        data = world.data
        if data.tool_answered and Care.REQUEST_ID in self._care:
            return world
        return world._replace(data=data._replace(effects=data.effects + 1, tool_answered=True))

    def _model(self, world: World) -> World:
        known = [reply for reply in world.data.replies if reply[0] == world.asked]
        if known and Care.NAMED_CALL in self._care:
            return world._replace(answer=known[0])
        reply, data = (world.asked, world.samples), world.data
        rows = data.rows | {reply} if Care.ROW_FIRST in self._care else data.rows
        data = data._replace(replies=data.replies | {reply}, rows=rows)
        return world._replace(data=data, answer=reply, samples=world.samples + 1)

    # -- controller and trainer ----------------------------------------------------------------

    def _controller(self, world: World) -> Iterator[Move]:
        data = world.data
        if data.result and not data.sealed:
            sealed = data._replace(sealed=True, owed=True, row=BUFFERED, rows=frozenset())
            if Care.ONE_MUTATION not in self._care:
                sealed = sealed._replace(row=NO_ROW)
            yield "the controller seals the result", world._replace(data=sealed)
            if Care.ACK_AFTER_SEAL not in self._care:
                yield "the result is acknowledged", world._replace(data=data._replace(result=False))
        if data.owed and data.result:
            yield (
                "the agent drops the acknowledged result",
                world._replace(data=data._replace(result=False)),
            )
        elif data.owed:
            yield "the acknowledgement is confirmed", world._replace(data=data._replace(owed=False))

    def _trainer(self, world: World) -> Iterator[Move]:
        data = world.data
        if data.row == BUFFERED:
            used = data._replace(row=USED, trained=data.trained + 1)
            yield "a step trains on the row", world._replace(data=used)
        if data.row == USED:
            cleared = data._replace(row=CLEARED)
            yield (
                "the weights are checkpointed",
                world._replace(data=cleared, checkpoint=data.trained),
            )

    # -- save, crash, restore ------------------------------------------------------------------

    def _save(self, world: World) -> Iterator[Move]:
        """A reply of a model call that has not been recorded is not part of it: it is asked again,
        by the same name. The weights are those of the last checkpoint."""
        if world.asked == TOOL and Care.PARKED in self._care:
            return
        saved = world.data._replace(trained=world.checkpoint)
        yield "a snapshot is published", world._replace(saved=saved)

    def _restore(self, world: World) -> World:
        """Run n+1, from the snapshot or from nothing, into servers that may have lived on."""
        data = world.saved or Data()
        if data.row == USED and not data.trained and Care.ANCHOR in self._care:
            data = data._replace(row=BUFFERED)
        if world.up == TRAINER_DOWN and Care.REPLACED not in self._care:
            data = data._replace(tool_answered=world.data.tool_answered)
        return World(
            data,
            world.faults,
            saved=world.saved,
            samples=world.samples,
            checkpoint=data.trained,
            late=world.late or (world.asked == TOOL and world.answer is None),
        )

    def _late(self, world: World) -> World:
        world = world._replace(late=False)
        return world if Care.STALE_RUN in self._care else self._tool(world)


def _knows(world: World) -> bool:
    """Somebody waits for the outcome, or is dead and will be replaced."""
    return world.asked == TOOL or world.up == ALL_DOWN


def _crash(world: World, up: str) -> World:
    """Memory and what is under way to it are gone; snapshots and checkpoints stay."""
    down = world._replace(up=up, faults=world.faults - 1)
    if up == TRAINER_DOWN:
        return down
    return down._replace(data=Data(), asked="", answer=None, late=False)


def _trainer_problem(data: Data) -> str:
    turns = [turn for turn in data.journal if turn[0] != TOOL]
    if not data.sealed and not data.rows.issuperset(turns):
        return "a recorded turn has no token row"
    if not data.sealed and len(data.journal) == len(CALLS) and not data.result:
        return "a finished result was dropped before it was sealed"
    if data.sealed == (data.row == NO_ROW):
        return "a rollout is sealed without its training row, or has one unsealed"
    if data.trained != (data.row in (USED, CLEARED)):
        return "the training row was lost, or trained on twice"
    return ""

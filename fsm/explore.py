"""The breadth-first explorer behind `quiesce check`: every world that can be reached from the
start of a model, so that what it reports as absent *is* absent, within the bounds it names.

It proves three things of a model: no world breaks a rule; from every world an end is reached;
and nobody is left held where nothing can happen any more. A counterexample is a shortest story.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from attrs import define, field, frozen

from fsm.hold import HOLD
from fsm.model import hand_over
from fsm.model.hand_over import HandOver
from fsm.model.protocol import Protocol as Servers
from fsm.model.rollout import Rollout
from fsm.restore import RESTORE
from fsm.save import SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED
from fsm.table import Row

W = TypeVar("W")
TABLES = (SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED, RESTORE)  # each in one process
EVERY_TABLE = (*TABLES, *hand_over.TABLES, HOLD)
SIZES = ((4, 1), (2, 2))  # servers, faults
ROLLOUT_FAULTS = 3

_NO_RENEWAL_YET = "renewals begin in a later step; S1 asks for the row in every state"
# Rows that nothing can fire, and why they are there all the same.
NEVER_FIRED = {
    f"{table.name}: idle --hold_lost--> aborting": _NO_RENEWAL_YET
    for table in EVERY_TABLE
    if table.initial == "idle"
}


class Model(Protocol[W]):
    """Worlds, and what can happen in them. Worlds are hashable values."""

    name: str
    participants: int
    faults: int

    def start(self) -> W: ...
    def moves(self, world: W) -> Iterator[tuple[str, W]]:
        """Everything that can happen next: what a story says of it, and the world after it."""

    def canonical(self, world: W) -> W:
        """The one world that stands for all that differ in names only."""

    def problem(self, world: W) -> str:
        """The rule that this world breaks, or nothing."""

    def ended(self, world: W) -> bool:
        """Nothing is under way and nobody is held."""


@frozen
class Result:
    """What an exploration found. problem: the rule broken, or nothing; story: how, shortest."""

    name: str
    participants: int
    faults: int
    worlds: int
    edges: int
    seconds: float
    problem: str = ""
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = f"BROKEN: {self.problem}" if self.problem else "holds"
        return (
            f"{self.name:<20} {self.participants} participants, {self.faults} faults: "
            f"{self.worlds:>7} worlds {self.edges:>8} edges {self.seconds:6.1f} s  {verdict}"
        )

    def counterexample(self) -> str:
        lines = [f"{number}. {line}" for number, line in enumerate(self.story, 1)]
        return "\n".join([f"{self.name}: {self.problem}", *lines])


class _Search(Generic[W]):
    def __init__(self, model: Model[W]) -> None:
        self.model = model
        first = model.canonical(model.start())
        self.numbers = {first: 0}
        self.parents = [-1]
        self.into: list[list[int]] = [[]]
        self.ends: list[int] = []
        self.edges = 0
        self._todo = deque([first])

    def run(self) -> tuple[str, int]:
        """The first problem and the number of its world; or nothing and -1."""
        while self._todo:
            world = self._todo.popleft()
            number = self.numbers[world]
            if problem := self.model.problem(world):
                return problem, number
            moved = self._follow(world, number)
            if self.model.ended(world):
                self.ends.append(number)
            elif not moved:
                return "nothing can happen any more, and this is no end: somebody is held", number
        return self._endless()

    def _follow(self, world: W, number: int) -> bool:
        moved = False
        for _, raw in self.model.moves(world):
            after = self.model.canonical(raw)
            known = self.numbers.get(after)
            self.edges += 1
            if known is None:
                known = self.numbers[after] = len(self.parents)
                self.parents.append(number)
                self.into.append([])
                self._todo.append(after)
            if known != number:
                self.into[known].append(number)
                moved = True
        return moved

    def _endless(self) -> tuple[str, int]:
        """Walks back from the ends: a world that is not met can go on for ever."""
        seen = bytearray(len(self.parents))
        todo = list(self.ends)
        for number in todo:
            seen[number] = 1
        while todo:
            for before in self.into[todo.pop()]:
                if not seen[before]:
                    seen[before] = 1
                    todo.append(before)
        lost = seen.find(0)
        return ("", -1) if lost < 0 else ("no end can be reached from here", lost)

    def story(self, number: int) -> tuple[str, ...]:
        """Told again from the start in worlds as they are, so that each keeps its name."""
        path = []
        while number > 0:
            path.append(number)
            number = self.parents[number]
        lines, world = [], self.model.start()
        for wanted in reversed(path):
            for label, raw in self.model.moves(world):
                if self.numbers.get(self.model.canonical(raw)) == wanted:
                    lines.append(label)
                    world = raw
                    break
        return tuple(lines)


def explore(model: Model[W]) -> Result:
    """Walk every world of the model; stops at the first rule that is broken."""
    begun_s = time.perf_counter()
    search = _Search(model)
    problem, number = search.run()
    seconds = time.perf_counter() - begun_s
    story = search.story(number) if problem else ()
    size = (model.participants, model.faults, len(search.parents), search.edges, seconds)
    return Result(model.name, *size, problem, story)


# -- everything that `quiesce check` runs ----------------------------------------------------------


def protocols(sizes: Iterable[tuple[int, int]] = SIZES) -> list[Servers]:
    """Each table against HOLD, and the two of a restore that changes its process, in each size
    (servers, faults)."""
    return [
        model
        for size in sizes
        for model in (*(Servers(table, *size) for table in TABLES), HandOver(*size))
    ]


@define
class Check:
    """All explorations, one after the other; then, which rows none of them fired.

    for result in check.results(): print(result); a broken one has a `counterexample()`.
    """

    sizes: tuple[tuple[int, int], ...] = SIZES
    fired: set[tuple[str, Row]] = field(factory=set)

    def results(self) -> Iterator[Result]:
        for protocol in protocols(self.sizes):
            yield explore(protocol)
            self.fired |= protocol.rows_fired
        yield explore(Rollout(ROLLOUT_FAULTS))

    def never_fired(self) -> list[str]:
        """Rows that fired nowhere, but for those that are known to have no way to."""
        rows = [(table.name, row) for table in EVERY_TABLE for row in table.rows()]
        silent = [f"{name}: {row}" for name, row in rows if (name, row) not in self.fired]
        return [row for row in silent if row not in NEVER_FIRED]

"""A state machine as data.

Two rules: everything that decides *which state follows which* is in a `Table`;
nothing here knows what a step does, who takes part, or what time it is.

A table is a matrix. A line is a state, with the step that runs while the machine is
in it; a column is an event; a cell is the next state. Every cell of the product is
written down: `STAY` says "expected here, and nothing follows from it", an absent cell
says "a bug: refused with `IllegalEvent`, and nothing changes". `Table` checks itself
when it is built, which for the tables of this package is at import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import field, frozen

STAY = "="
RUN, PARKING, PARKED = "run", "parking", "parked"


class TableError(ValueError):
    """A table breaks one of its rules; the message names the table, the row and the rule."""


@frozen
class State:
    """One line of a table.

    `step` runs while the machine is in the state (None: nothing runs). `rollouts` says what
    the rollouts do meanwhile: run, parking or parked. `moves` maps event to next state.
    """

    name: str
    moves: Mapping[str, str]
    step: str | None = None
    rollouts: str = RUN
    terminal: bool = False


@frozen
class Row:
    """One arrow of a table: in `source`, on `event`, go to `target`."""

    source: str
    event: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} --{self.event}--> {self.target}"


@frozen
class Rules:
    """What a table promises beyond being well-formed; `Table` walks the rows to check it.

    abort: the state that every failure before the point of no return leads to.
    no_return: the state whose outcome may be unknown (publish); only `claimed` leads
      from it to `abort`, so it has no `failed` row.
    failures: events that say "this went wrong"; each must be answered in every state
      before `no_return`.
    releasing: steps that let rollouts go on; only such a step leads from held to running.
    unaided: events that come without anybody's help (a failure, a deadline): from each
      state a terminal one must be reachable by them alone.
    """

    abort: str | None = None
    no_return: str | None = None
    failures: frozenset[str] = frozenset()
    releasing: frozenset[str] = frozenset()
    unaided: frozenset[str] = frozenset()


@frozen
class Table:
    """A checked state machine. Raises `TableError` at construction when a rule is broken."""

    name: str
    initial: str
    events: tuple[str, ...]
    lines: tuple[State, ...]
    steps: frozenset[str] = frozenset()
    rules: Rules = field(factory=Rules)

    def __attrs_post_init__(self) -> None:
        from fsm.checks import check  # the checks walk tables, so they import this module

        check(self)

    @property
    def states(self) -> dict[str, State]:
        return {line.name: line for line in self.lines}

    @property
    def terminal(self) -> frozenset[str]:
        return frozenset(line.name for line in self.lines if line.terminal)

    def rows(self) -> Iterator[Row]:
        """Every arrow, in the order of the lines; a `STAY` cell is an arrow to its own state."""
        for line in self.lines:
            for event in self.events:
                if event in line.moves:
                    target = line.moves[event]
                    yield Row(line.name, event, line.name if target == STAY else target)

    def next(self, state: str, event: str) -> str | None:
        """The state that follows, or None where the table has no such row."""
        target = self.states[state].moves.get(event)
        return state if target == STAY else target

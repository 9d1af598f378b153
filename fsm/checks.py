"""What `Table` checks about itself at import. `transitions` accepts nearly anything
(an unknown target, a state that nothing reaches), so every rule is walked here; each
error names the table, the row and the rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fsm.table import RUN, STAY, Row, TableError

if TYPE_CHECKING:
    from fsm.table import Table

# Names that `transitions` puts on a model: an event of such a name would silently not be bound.
RESERVED = frozenset({"state", "trigger", "machine", "history", "initial", "model"})


def check(table: Table) -> None:
    """Raise `TableError` for the first broken rule."""
    for rule in (_names, _targets, _terminals, _reachable, _ends, _failures, _no_return, _release):
        for problem in rule(table):
            raise TableError(f"table {table.name!r}: {problem}")


def reachable(rows: Iterable[Row], start: str) -> set[str]:
    """Every state that some path of `rows` leads to from `start`, itself included."""
    arrows: dict[str, set[str]] = {}
    for row in rows:
        arrows.setdefault(row.source, set()).add(row.target)
    seen, todo = {start}, [start]
    while todo:
        for target in arrows.get(todo.pop(), set()) - seen:
            seen.add(target)
            todo.append(target)
    return seen


def _names(table: Table) -> Iterator[str]:
    names = [line.name for line in table.lines]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"state {name!r} has two lines; write each state once"
    for event in table.events:
        if table.events.count(event) > 1:
            yield f"event {event!r} is declared twice"
        if event in RESERVED or event.startswith("_") or not event.isidentifier():
            yield f"event {event!r} collides with a name of the machine's model; rename it"
    if table.initial not in names:
        yield f"initial state {table.initial!r} has no line"


def _targets(table: Table) -> Iterator[str]:
    states = table.states
    for line in table.lines:
        for event, target in line.moves.items():
            row = Row(line.name, event, target)
            if event not in table.events:
                yield f"row {row}: unknown event {event!r}; declare it or fix the spelling"
            if target != STAY and target not in states:
                yield f"row {row}: unknown state {target!r}; give it a line or fix the spelling"
        if line.step is not None and line.step not in table.steps:
            yield f"state {line.name!r}: unknown step {line.step!r}"


def _terminals(table: Table) -> Iterator[str]:
    for line in table.lines:
        if line.terminal and line.step is not None:
            yield f"terminal state {line.name!r} runs step {line.step!r}; nothing may run there"
        for event in table.events:
            row = Row(line.name, event, line.moves.get(event, "?"))
            if line.terminal and event not in line.moves:
                yield f"row {row}: a terminal state lists its late events explicitly (STAY)"
            if line.terminal and line.moves.get(event, STAY) != STAY:
                yield f"row {row}: leaves a terminal state"


def _reachable(table: Table) -> Iterator[str]:
    seen = reachable(table.rows(), table.initial)
    for line in table.lines:
        if line.name not in seen:
            yield f"state {line.name!r} is reached by no row from {table.initial!r}"


def _ends(table: Table) -> Iterator[str]:
    """From each state a resting one is reached without any participant's help."""
    if not table.rules.unaided:
        return
    resting = table.terminal or {table.initial}
    alone = [row for row in table.rows() if row.event in table.rules.unaided]
    for line in table.lines:
        if not resting & reachable(alone, line.name):
            events = ", ".join(sorted(table.rules.unaided))
            yield f"state {line.name!r} can wait for ever: no path of {events} leads to an end"


def before_no_return(table: Table) -> list[str]:
    """The states from which the point of no return still lies ahead."""
    rules = table.rules
    if rules.no_return is None:
        return []
    forward = [row for row in table.rows() if row.source not in (rules.no_return, rules.abort)]
    return [
        line.name
        for line in table.lines
        if line.name != rules.no_return and rules.no_return in reachable(forward, line.name)
    ]


def _failures(table: Table) -> Iterator[str]:
    """S1: before the point of no return every failure is answered, and leads to abort."""
    rules = table.rules
    for state in before_no_return(table):
        moves = table.states[state].moves
        for event in sorted(rules.failures):
            if event not in moves:
                yield f"state {state!r} has no row for {event!r}: every failure leads to an end"
            elif moves[event] not in (rules.abort, STAY):
                row = Row(state, event, moves[event])
                yield f"row {row}: before {rules.no_return!r} a failure leads to {rules.abort!r}"
            elif moves[event] == STAY and event in rules.unaided:
                yield f"row {Row(state, event, STAY)}: a failure may not be ignored here"


def _no_return(table: Table) -> Iterator[str]:
    """S2: the outcome of the rename is never decided by a failure or a deadline."""
    rules = table.rules
    if "claimed" not in table.events:
        return
    for line in table.lines:
        if line.step != "publish":
            continue
        if "failed" in line.moves:
            yield f"row {Row(line.name, 'failed', line.moves['failed'])}: only a won claim says so"
        for event in sorted(rules.failures & line.moves.keys()):
            if line.moves[event] == rules.abort:
                yield f"row {Row(line.name, event, line.moves[event])}: only `claimed` may abort"


def _release(table: Table) -> Iterator[str]:
    """Whoever was held is let go by a step that does so, never by an arrow alone."""
    rules, states = table.rules, table.states
    if not rules.releasing:
        return
    for row in table.rows():
        source, target = states[row.source], states[row.target]
        if source.rollouts != RUN and target.rollouts == RUN and source.step not in rules.releasing:
            yield f"row {row}: leaves held rollouts behind; {source.step!r} releases nobody"

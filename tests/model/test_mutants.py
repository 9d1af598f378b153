"""Do the checks bite? Every row, guard and action is broken, one at a time, on small worlds (two
servers, one fault); something must notice. `pytest -v` names who did: the import check of the
table, or the rule that the explorer found broken. What may go unnoticed is listed with a reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import TypeVar

import pytest
from attrs import evolve

from fsm.checks import check
from fsm.explore import EVERY_TABLE, TABLES, explore
from fsm.hold import HOLD
from fsm.model.hand_over import HandOver
from fsm.model.programs import RESTORE_PROGRAMS, SAVE_PROGRAMS, Programs
from fsm.model.protocol import ALL_GUARDS, Protocol
from fsm.model.rollout import ALL_CARE, Care, Rollout
from fsm.model.server import Guard
from fsm.restore import RESTORE, RESTORE_HANDING_OVER, RESTORE_TAKING_OVER
from fsm.save import SAVE
from fsm.table import Row, State, Table, TableError

# Servers and faults. Most mutants die in the small sizes already; the last one is the measure.
SIZES = ((2, 0), (1, 1), (2, 1))
T = TypeVar("T")
Say = Callable[[str, str], None]

# Actions that may be swapped without a rule being broken, and why.
_TOLD_EARLY = "told earlier than needed: the release finds a server that never closed (STAY)"
_NOBODY_YET = "a renewal asks those who are told, and nobody is yet"
_FOUND_LATER = "the renewal that was just begun finds the lost hold a little later"
_CHECKED_AGAIN = "the check before the activation finds the lost hold a little later"
EQUIVALENT = {
    ("stay", "drop check everyone"): _FOUND_LATER,
    ("stay", "check everyone <> wait"): _FOUND_LATER,
    ("prepare", "start renewal <> tell callers"): _NOBODY_YET,
    ("prepare", "prepare callers <> tell callees"): _TOLD_EARLY,
    ("fence", "start renewal <> tell callers"): _NOBODY_YET,
    ("fence", "fence callers <> tell callees"): _TOLD_EARLY,
    ("fence", "fence callees <> drain callers"): (
        "turns under way may call callees until these are drained, fenced or not (H7)"
    ),
    ("take_over", "drop check everyone"): _CHECKED_AGAIN,
    ("take_over", "take over <> check everyone"): _CHECKED_AGAIN,
    ("restore_gym", "stage callees <> stage callers"): "what is staged is inert until resume (R1)",
    ("load_controller", "check everyone <> record"): (
        "a restore may be recorded and then aborted in any order, by a cancellation that overtakes "
        "the answer; the next restore records again, and the snapshot stays eligible (F6)"
    ),
}


@pytest.fixture
def say(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Say:
    """Names a mutant and its killer when pytest is verbose."""

    def print_line(mutant: str, killer: str) -> None:
        if request.config.get_verbosity() > 0:
            with capsys.disabled():
                print(f"\n    {mutant}: {killer}", end="")

    return print_line


# -- rows ------------------------------------------------------------------------------------------


def _with_row(table: Table, row: Row, target: str | None) -> Table:
    """The table with one row dropped or redirected, built past its own checks."""
    mutant = copy.copy(table)
    lines = tuple(_changed(line, row, target) for line in table.lines)
    object.__setattr__(mutant, "lines", lines)
    return mutant


def _changed(line: State, row: Row, target: str | None) -> State:
    if line.name != row.source:
        return line
    moves = {event: to for event, to in line.moves.items() if event != row.event}
    return evolve(line, moves=moves if target is None else moves | {row.event: target})


def _row_mutants(table: Table, row: Row) -> Iterator[tuple[str, Table]]:
    yield f"drop {row}", _with_row(table, row, None)
    for target in table.states:
        if target != row.target:
            yield f"{row} redirected to {target}", _with_row(table, row, target)


def _import_check(table: Table) -> str:
    try:
        check(table)
    except TableError as error:
        return f"import check: {error}"
    return ""


def _explorer(
    table: Table,
    *,
    hold: Table = HOLD,
    programs: Programs | None = None,
    guards: frozenset[Guard] = ALL_GUARDS,
) -> str:
    kind = _hand_over(table) or partial(Protocol, table)
    for size in SIZES:
        model = kind(*size, hold_table=hold, programs=programs, guards=guards)
        if problem := explore(model).problem:
            return f"explorer: {problem}"
    return ""


def _hand_over(table: Table) -> Callable[..., Protocol] | None:
    """A table of R8 is explored with its other half."""
    if table.name == RESTORE_HANDING_OVER.name:
        return partial(HandOver, tables=(table, RESTORE_TAKING_OVER))
    if table.name == RESTORE_TAKING_OVER.name:
        return partial(HandOver, tables=(RESTORE_HANDING_OVER, table))
    return None


def _explorer_against(table: Table, hold: Table) -> str:
    return _explorer(table, hold=hold)


def _first(mutant: T, killers: Iterable[Callable[[T], str]]) -> str:
    return next((found for killer in killers if (found := killer(mutant))), "")


def _own_rows() -> list[tuple[Table, Row]]:
    """A line that a table takes over from an earlier one is mutated there."""
    own: list[tuple[Table, Row]] = []
    known: list[State] = []
    for table in [one for one in EVERY_TABLE if one is not HOLD]:
        new = [line for line in table.lines if line not in known]
        known += new
        names = {line.name for line in new}
        own += [(table, row) for row in table.rows() if row.source in names]
    return own


@pytest.mark.parametrize(
    ("table", "row"), [pytest.param(*own, id=f"{own[0].name}: {own[1]}") for own in _own_rows()]
)
def test_row_mutants_are_killed(table: Table, row: Row, say: Say) -> None:
    """The cheap check goes first, but for dropped rows, which the explorer must miss itself."""
    for name, mutant in _row_mutants(table, row):
        order = (_explorer, _import_check)
        killer = _first(mutant, order if name.startswith("drop") else reversed(order))
        say(name, killer)
        assert killer, f"{table.name}: nobody notices: {name}"


@pytest.mark.parametrize("row", list(HOLD.rows()), ids=str)
def test_row_mutants_of_hold_are_killed(row: Row, say: Say) -> None:
    """HOLD's rows of a restore are met in a restore, the others in a save."""
    restoring = HOLD.states[row.source].name in ("fencing", "fenced", "staged")
    pairs = (RESTORE, SAVE) if restoring or row.event == "fence" else (SAVE, RESTORE)
    for name, mutant in _row_mutants(HOLD, row):
        explorers = [partial(_explorer_against, table) for table in pairs]
        killer = _first(mutant, [*explorers, _import_check])
        say(name, killer)
        assert killer, f"hold: nobody notices: {name}"


def test_the_trap_of_publish_is_told_as_a_story() -> None:
    """S2: a plain deadline row aborts attempts whose folder is, or will be, published."""
    trap = _with_row(SAVE, Row("sealed", "late", "unresolved"), "aborting")
    result = explore(Protocol(trap, 2, 0))
    assert result.problem.startswith("S2: an attempt is undone whose folder is, or may become")
    assert result.story[0] == "done: stop dispatch"
    assert result.story[-1] == (
        "the deadline of 'publish' passes\n    save: sealed --late--> aborting"
    )


# -- actions ---------------------------------------------------------------------------------------


def _programs(table: Table) -> Programs:
    return RESTORE_PROGRAMS if "restore_gym" in table.steps else SAVE_PROGRAMS


def _steps() -> list[tuple[Table, str]]:
    """The other steps of a restore that is taken over are those of RESTORE."""
    return [
        (table, step)
        for table in TABLES
        for step in _programs(table)
        if step in {line.step for line in table.lines}
    ] + [(RESTORE_TAKING_OVER, "take_over")]


def _action_mutants(program: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for number, action in enumerate(program):
        yield f"drop {action}", (*program[:number], *program[number + 1 :])
    for number, (one, other) in enumerate(pairwise(program)):
        swapped = (*program[:number], other, one, *program[number + 2 :])
        yield f"{one} <> {other}", swapped


@pytest.mark.parametrize(
    ("table", "step"), [pytest.param(*one, id=f"{one[0].name}: {one[1]}") for one in _steps()]
)
def test_step_mutants_are_killed(table: Table, step: str, say: Say) -> None:
    """Each action dropped, and each two neighbours swapped."""
    programs = _programs(table)
    for name, mutant in _action_mutants(programs[step]):
        killer = _explorer(table, programs={**programs, step: mutant})
        reason = EQUIVALENT.get((step, name))
        say(f"{step}: {name}", killer or f"equivalent: {reason}")
        assert bool(killer) != bool(reason), f"{table.name} {step}: {name}: {killer or reason}"


def test_equivalent_mutants_exist() -> None:
    """The list names no action that is gone."""
    for step, name in EQUIVALENT:
        programs = {**SAVE_PROGRAMS, **RESTORE_PROGRAMS}
        assert name in dict(_action_mutants(programs[step]))


# -- guards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", Guard, ids=lambda guard: guard.name)
def test_guard_mutants_are_killed(guard: Guard, say: Say) -> None:
    left = ALL_GUARDS - {guard}
    killer = _explorer(RESTORE, guards=left) or _explorer(SAVE, guards=left)
    say(f"without: {guard.value}", killer)
    assert killer


@pytest.mark.parametrize("care", Care, ids=lambda care: care.name)
def test_data_guard_mutants_are_killed(care: Care, say: Say) -> None:
    killer = explore(Rollout(1, ALL_CARE - {care})).problem
    say(f"without: {care.value}", killer)
    assert killer

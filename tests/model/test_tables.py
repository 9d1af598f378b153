"""Tables check themselves; each broken one is refused with the row and the rule."""

from __future__ import annotations

import itertools

import pytest
from attrs import evolve

from fsm.hold import HOLD
from fsm.machine import IllegalEvent, Machine
from fsm.restore import RESTORE, RESTORE_HANDING_OVER, RESTORE_TAKING_OVER
from fsm.save import SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED
from fsm.table import PARKED, STAY, Row, Rules, State, Table, TableError

SAVES = [SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED]
RESTORES = [RESTORE, RESTORE_HANDING_OVER, RESTORE_TAKING_OVER]
TABLES = [*SAVES, *RESTORES, HOLD]
OVER = {"ok": STAY, "failed": STAY}


def table(*lines: State, events: tuple[str, ...] = ("ok", "failed"), **more: object) -> Table:
    return Table("t", "a", events, lines, frozenset({"work", "release"}), **more)  # type: ignore[arg-type]


def end(name: str = "z", **moves: str) -> State:
    return State(name, OVER | moves, terminal=True)


def go(**moves: str) -> State:
    return State("a", moves, "work")


RULES = Rules(abort="x", no_return="b", failures=frozenset({"failed"}))
BROKEN = {
    "state written twice": (lambda: table(go(ok="z"), go(ok="z"), end()), "'a' has two lines"),
    "event declared twice": (
        lambda: table(go(ok="z"), end(), events=("ok", "ok", "failed")),
        "'ok' is declared twice",
    ),
    "event of the model's name": (
        lambda: table(go(trigger="z"), end(trigger=STAY), events=("ok", "failed", "trigger")),
        "'trigger' collides",
    ),
    "initial state missing": (lambda: table(end()), "initial state 'a'"),
    "unknown event": (lambda: table(go(okay="z"), end()), "a --okay--> z: unknown event 'okay'"),
    "unknown state": (lambda: table(go(ok="y"), end()), "a --ok--> y: unknown state 'y'"),
    "unknown step": (
        lambda: table(State("a", {"ok": "z"}, "wrok"), end()),
        "unknown step 'wrok'",
    ),
    "terminal state with a step": (
        lambda: table(go(ok="z"), State("z", OVER, "work", terminal=True)),
        "terminal state 'z' runs step",
    ),
    "terminal state that says nothing of late events": (
        lambda: table(go(ok="z"), State("z", {"ok": STAY}, terminal=True)),
        "z --failed--> ?: a terminal state lists",
    ),
    "row that leaves a terminal state": (
        lambda: table(go(ok="z"), end(ok="a")),
        "z --ok--> a: leaves a terminal state",
    ),
    "state that nothing reaches": (
        lambda: table(go(ok="z"), State("b", {"ok": "z"}, "work"), end()),
        "state 'b' is reached by no row",
    ),
    "state that can wait for ever": (
        lambda: table(go(ok="z"), end(), rules=Rules(unaided=frozenset({"failed"}))),
        "state 'a' can wait for ever",
    ),
    "failure without a row": (
        lambda: table(
            go(ok="b"),
            State("b", {"ok": "z", "failed": "x"}, "work"),
            State("x", {"ok": "z"}, "work"),
            end(),
            rules=RULES,
        ),
        "state 'a' has no row for 'failed'",
    ),
    "failure that does not lead to abort": (
        lambda: table(
            go(ok="b", failed="z"),
            State("b", {"ok": "z", "failed": "x"}, "work"),
            State("x", {"ok": "z"}, "work"),
            end(),
            rules=RULES,
        ),
        "a --failed--> z: before 'b' a failure leads to 'x'",
    ),
    "publish that fails by opinion": (
        lambda: evolve(SAVE, lines=_with(SAVE, "sealed", failed="aborting")),
        "sealed --failed--> aborting: only a won claim says so",
    ),
    "publish that a cancellation aborts": (
        lambda: evolve(SAVE, lines=_with(SAVE, "sealed", cancelled="aborting")),
        "sealed --cancelled--> aborting: only `claimed` may abort",
    ),
    "held rollouts left behind": (
        lambda: table(
            State("a", {"ok": "z"}, "work", PARKED),
            end(),
            rules=Rules(releasing=frozenset({"release"})),
        ),
        "a --ok--> z: leaves held rollouts behind",
    ),
}


def _with(base: Table, state: str, **moves: str) -> tuple[State, ...]:
    return tuple(
        evolve(line, moves={**line.moves, **moves}) if line.name == state else line
        for line in base.lines
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_refused_by_name(name: str) -> None:
    build, message = BROKEN[name]
    with pytest.raises(TableError) as error:
        build()
    assert message in str(error.value)


@pytest.mark.parametrize("one", TABLES, ids=lambda t: t.name)
def test_every_state_and_event_has_the_documented_answer(one: Table) -> None:
    """The full product: the row of the table, or the one named error with nothing changed."""
    for state, event in itertools.product(one.states, one.events):
        machine = Machine(evolve(one, initial=one.initial))
        _bring(machine, state)
        before = list(machine.fired)
        expected = one.next(state, event)
        if expected is None:
            with pytest.raises(IllegalEvent, match=f"{event!r} in state {state!r}"):
                machine.fire(event)
            assert machine.state == state
            assert machine.fired == before
        else:
            assert machine.fire(event) == Row(state, event, expected)
            assert machine.state == expected


def _bring(machine: Machine, state: str) -> None:
    """Lead the machine to `state` by a shortest path of its own rows."""
    paths: dict[str, list[str]] = {machine.table.initial: []}
    todo = [machine.table.initial]
    for source in todo:
        for row in machine.table.rows():
            if row.source == source and row.target not in paths:
                paths[row.target] = [*paths[source], row.event]
                todo.append(row.target)
    for event in paths[state]:
        machine.fire(event)


@pytest.mark.parametrize("one", TABLES, ids=lambda t: t.name)
def test_terminal_states_list_every_late_event(one: Table) -> None:
    for name in one.terminal:
        assert dict(one.states[name].moves) == dict.fromkeys(one.events, STAY)


def test_an_unknown_event_is_the_same_named_error() -> None:
    machine = Machine(SAVE)
    with pytest.raises(IllegalEvent, match="'nonsense' in state 'idle'"):
        machine.fire("nonsense")
    assert machine.state == "idle"


def test_release_at_cut_never_parks_again() -> None:
    """S10: after its release no row leads back to a parked state."""
    from fsm.checks import reachable

    after = reachable(SAVE_RELEASE_AT_CUT.rows(), "released")
    assert {SAVE_RELEASE_AT_CUT.states[name].rollouts for name in after} == {"run"}


def test_a_machine_has_no_back_door() -> None:
    """`transitions` adds `to_<state>` triggers by default, which would skip every rule."""
    machine = Machine(SAVE)
    assert not any(name.startswith("to_") for name in dir(machine._model))

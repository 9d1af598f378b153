"""The explorer itself, and what it proves of the tables: every world, within stated bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from fsm.explore import EVERY_TABLE, NEVER_FIRED, TABLES, Check, Result, explore
from fsm.model.hand_over import HandOver
from fsm.model.protocol import ALL_GUARDS, Protocol
from fsm.model.rollout import Rollout
from fsm.model.server import Guard, Server
from fsm.model.world import World
from fsm.restore import RESTORE
from fsm.save import SAVE

# -- the explorer, on worlds that are numbers ------------------------------------------------------


class Graph:
    """Worlds are numbers; arrows as given."""

    name, participants, faults = "graph", 0, 0

    def __init__(self, arrows: dict[int, list[int]], ends: set[int], bad: int = -1) -> None:
        self.arrows, self.ends, self.bad = arrows, ends, bad

    def start(self) -> int:
        return 0

    def moves(self, world: int) -> Iterator[tuple[str, int]]:
        for after in self.arrows.get(world, []):
            yield f"{world} to {after}", after

    def canonical(self, world: int) -> int:
        return world

    def problem(self, world: int) -> str:
        return "bad" if world == self.bad else ""

    def ended(self, world: int) -> bool:
        return world in self.ends


def test_a_sound_graph_holds_and_is_counted() -> None:
    result = explore(Graph({0: [1, 2], 1: [2]}, {2}))
    assert (result.problem, result.worlds, result.edges) == ("", 3, 3)


def test_a_counterexample_is_a_shortest_story() -> None:
    result = explore(Graph({0: [1, 3], 1: [2], 2: [4], 3: [4]}, {4}, bad=4))
    assert result.problem == "bad"
    assert result.story == ("0 to 3", "3 to 4")
    assert result.counterexample() == "graph: bad\n1. 0 to 3\n2. 3 to 4"
    assert "BROKEN: bad" in str(result)


def test_a_world_in_which_nothing_can_happen_is_no_end() -> None:
    result = explore(Graph({0: [1, 2]}, {2}))
    assert "this is no end" in result.problem
    assert result.story == ("0 to 1",)


def test_a_world_that_only_stays_itself_is_stuck() -> None:
    assert "this is no end" in explore(Graph({0: [1, 2], 1: [1]}, {2})).problem


def test_a_circle_without_a_way_out_is_found() -> None:
    result = explore(Graph({0: [1, 3], 1: [2], 2: [1]}, {3}))
    assert result.problem == "no end can be reached from here"
    assert result.story == ("0 to 1",)


# -- the tables ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything() -> tuple[Check, list[Result]]:
    """What `quiesce check` runs, once."""
    check = Check()
    return check, list(check.results())


def test_every_table_holds_in_every_size(everything: tuple[Check, list[Result]]) -> None:
    _, results = everything
    broken = [result.counterexample() for result in results if result.problem]
    assert not broken, "\n\n".join(broken)
    sizes = {(result.name, result.participants, result.faults) for result in results}
    names = {"restore_in_two", *(table.name for table in TABLES)}
    assert {(name, *size) for name in names for size in ((4, 1), (2, 2))} < sizes
    assert ("one rollout", 1, 3) in sizes
    assert all(result.worlds > 5_000 for result in results)


def test_every_row_fires_somewhere(everything: tuple[Check, list[Result]]) -> None:
    check, _ = everything
    assert check.never_fired() == []
    fired = {f"{table}: {row}" for table, row in check.fired}
    known = {f"{table.name}: {row}" for table in EVERY_TABLE for row in table.rows()}
    assert fired.isdisjoint(NEVER_FIRED)
    assert known >= NEVER_FIRED.keys()


FAULTS_WANTED = {
    "refusal": r"agent-1 refuses prepare",
    "exception": r"agent-1 does commit, then fails",
    "timeout": r"the deadline of 'drain' passes",
    "lost answer": r"policy-1 does commit; its answer is lost",
    "lost message": r"prepare to policy-1 is lost",
    "crash of a participant": r"policy-1 crashes",
    "crash of the controller": r"the controller crashes",
    "second controller": r"a newer controller takes over",
    "cancellation": r"somebody cancels",
    "lost lease": r"the lease of agent-1 ends",
    "moved under the hold": r"something moves on agent-1",
    "slow rename": r"the rename that was left behind ends",
    "failed rename": r"the rename fails and the folder is claimed",
    "full disk": r"'seal' fails",
}


def test_every_kind_of_fault_happens() -> None:
    labels = _labels(Protocol(SAVE, 2, 1))
    missing = [kind for kind, label in FAULTS_WANTED.items() if not re.search(label, labels)]
    assert missing == []


HAND_OVER_WANTED = {
    "driver stops too early": r"the first process is told to stop too early",
    "driver dies": r"the first process crashes",
    "driver is closed": r"the first process is closed",
    "driver waits too long": r"the deadline of 'hand_over' passes",
    "lease ends in the gap": r"the lease of agent-1 ends",
    "token lost": r"the token is lost",
    "token used twice": r"the second process crashes, and its token is used again",
    "second process dies": r"the controller crashes",
    "newer controller": r"a newer controller takes over",
    "token refused": r"the token is refused",
}


def test_every_kind_of_fault_happens_to_a_hand_over() -> None:
    labels = _labels(HandOver(2, 1))
    missing = [kind for kind, label in HAND_OVER_WANTED.items() if not re.search(label, labels)]
    assert missing == []


def test_a_late_message_arrives_after_the_release_that_overtook_it() -> None:
    """The hardest one to get right: prepare is under way when its own abort is over (H1)."""
    labels = _labels(Protocol(SAVE, 2, 1))
    assert "agent-1 answers prepare: no" in labels


def _labels(model: Protocol) -> str:
    """Everything that can happen in any world of the model, one a line."""
    labels, seen, todo = set(), {model.start()}, [model.start()]
    while todo:
        for label, raw in model.moves(todo.pop()):
            labels.add(label)
            after = model.canonical(raw)
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return "\n".join(sorted(labels))


class AsTheyAre(Protocol):
    """Servers keep their places."""

    def canonical(self, world: World) -> World:
        return world


@pytest.mark.parametrize("guards", [ALL_GUARDS, ALL_GUARDS - {Guard.CHECK_PHASE}])
def test_taking_alike_servers_for_one_another_hides_nothing(guards: frozenset[Guard]) -> None:
    """Fewer worlds, the same verdict and the same rows."""
    merged, plain = (kind(RESTORE, 3, 1, guards=guards) for kind in (Protocol, AsTheyAre))
    fewer, all_of_them = explore(merged), explore(plain)
    assert fewer.problem == all_of_them.problem
    assert fewer.worlds < all_of_them.worlds
    if not fewer.problem:
        assert merged.rows_fired == plain.rows_fired


def test_a_story_keeps_its_names_and_reads_as_one() -> None:
    """Without the fence of an ended hold, a late prepare closes a server for ever after."""
    result = explore(Protocol(SAVE, 4, 1, guards=ALL_GUARDS - {Guard.ENDED_FENCE}))
    assert result.problem == "H1: a server is closed by a hold that has ended"
    story = "\n".join(result.story)
    assert re.search(r"save: paused --\w+--> aborting", story)
    late = re.findall(r"(\S+) answers resume: yes", story)
    assert f"{late[-1]} answers prepare: yes" in result.story[-1]


def test_worlds_are_counted_the_same_way_each_time() -> None:
    first, second = (explore(Protocol(RESTORE, 2, 1)) for _ in range(2))
    assert (first.worlds, first.edges) == (second.worlds, second.edges)


def test_one_server_is_a_size_too() -> None:
    assert explore(Protocol(SAVE, 1, 1)).problem == ""
    assert Protocol(SAVE, 1, 1).start().servers == (Server(callee=False),)


def test_one_rollout_loses_nothing_and_does_nothing_twice() -> None:
    assert explore(Rollout(2)).problem == ""

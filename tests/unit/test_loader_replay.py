"""The loader's place and the replay index, and that both survive being saved."""

from __future__ import annotations

import json

import pytest

from fsm.outcome import InvariantError
from participants.controller.loader import ListLoader
from participants.controller.replay import ReplayIndex

TASKS = [{"seed": number} for number in range(3)]


def drawn(loader: ListLoader, count: int) -> list[int | None]:
    return [loader.draw() for _ in range(count)]


def test_epochs_end_and_the_end_is_part_of_the_state() -> None:
    loader = ListLoader(TASKS, epochs=2)
    assert drawn(loader, 7) == [0, 1, 2, 0, 1, 2, None]
    assert (loader.exhausted, loader.drawn) == (True, 6)
    again = ListLoader(TASKS, epochs=2)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert (again.draw(), again.exhausted, again.drawn) == (None, True, 6)


def test_without_epochs_it_never_ends() -> None:
    assert drawn(ListLoader(TASKS, None), 8) == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("at", range(7))
def test_a_restored_loader_goes_on_as_the_uninterrupted_one(at: int) -> None:
    loader, whole = ListLoader(TASKS, 2), ListLoader(TASKS, 2)
    assert drawn(loader, at) == drawn(whole, at)
    if at > 2:
        loader.put_back(1)
        whole.put_back(1)
    again = ListLoader(TASKS, 2)
    again.load_state_dict(loader.state_dict())
    assert drawn(again, 8) == drawn(whole, 8)


def test_a_prompt_put_back_at_the_end_is_still_drawn() -> None:
    loader = ListLoader(TASKS[:1])
    loader.draw()
    loader.put_back(0)
    assert not loader.exhausted
    assert (loader.draw(), loader.exhausted, loader.drawn) == (0, True, 2)


def test_a_place_of_another_list_is_refused() -> None:
    state = ListLoader(TASKS).state_dict()
    with pytest.raises(ValueError, match="of a list of 3 prompts, this list has 2"):
        ListLoader(TASKS[:2]).load_state_dict(state)
    for change in ({"next": 3}, {"spare": [9]}):
        with pytest.raises(ValueError, match="outside of its list"):
            ListLoader(TASKS).load_state_dict(state | change)
    with pytest.raises(ValueError, match="drawn"):
        ListLoader(TASKS).load_state_dict(state | {"drawn": "3"})


def test_bad_arguments_of_the_loader() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        ListLoader([])
    with pytest.raises(ValueError, match="one epoch"):
        ListLoader(TASKS, 0)
    with pytest.raises(ValueError, match="prompt 3 is not in a list of 3"):
        ListLoader(TASKS).put_back(3)


def replay(*groups: str) -> ReplayIndex:
    index = ReplayIndex()
    for group in groups:
        index.add(group)
    return index


def test_first_complete_is_first_claimed() -> None:
    index = replay("p1", "p0", "p2")
    assert index.claim(1, 2) == ("p1", "p0")
    assert (index.buffered, index.claimed) == (1, 2)
    assert index.trained(1) == ("p1", "p0")
    assert (index.buffered, index.claimed) == (1, 0)


def test_a_group_is_buffered_once_and_claimed_once() -> None:
    index = replay("p0", "p1")
    with pytest.raises(InvariantError, match="p0 is buffered twice"):
        index.add("p0")
    with pytest.raises(InvariantError, match="step 1 cannot claim 3"):
        index.claim(1, 3)
    index.claim(1, 1)
    with pytest.raises(InvariantError, match="step 1 cannot claim 1"):
        index.claim(1, 1)


def test_undone_claims_come_back_in_front_in_their_order() -> None:
    index = replay("p0", "p1", "p2", "p3")
    for step in (1, 2, 3):
        index.claim(step, 1)
    index = ReplayIndex.read(json.loads(json.dumps(index.record())))
    assert index.roll_back(1) == (("p0",), ("p1", "p2"))
    assert index.claim(2, 3) == ("p1", "p2", "p3")


def test_a_dropped_group_is_not_claimed() -> None:
    index = replay("p0", "p1")
    index.remove("p0")
    index.remove("p9")
    assert index.claim(1, 1) == ("p1",)
    with pytest.raises(ValueError, match="buffered"):
        ReplayIndex.read({"buffered": 3})

"""Which snapshot is eligible, chosen, kept: decisions without a disk."""

from __future__ import annotations

import pytest

from fsm.outcome import SnapshotRejected
from storage.choice import first_whole, surplus
from storage.lineage import Record, eligible


def ids(*places: tuple[int, int]) -> list[str]:
    return [f"snapshot_{incarnation:06}-{sequence:06}" for incarnation, sequence in places]


def snapshot(incarnation: int, sequence: int) -> str:
    return ids((incarnation, sequence))[0]


NOTHING = Record((1, 0), None)


def test_one_incarnation_newest_first() -> None:
    assert eligible(ids((1, 1), (1, 10), (1, 2)), [NOTHING]) == ids((1, 10), (1, 2), (1, 1))


def test_the_chain_goes_back_through_what_was_restored() -> None:
    """Incarnation 2 went on from 1-2: what 1 published later belongs to no living history."""
    records = [NOTHING, Record((2, 1), snapshot(1, 2))]
    there = ids((1, 1), (1, 2), (1, 3), (2, 2))
    assert eligible(there, records) == ids((2, 2), (1, 2), (1, 1))
    assert eligible(there[:3], records) == ids((1, 2), (1, 1))


def test_a_late_snapshot_of_an_old_controller_is_not_eligible() -> None:
    records = [NOTHING, Record((2, 1), snapshot(1, 2)), Record((3, 1), snapshot(2, 2))]
    there = ids((1, 2), (1, 9), (2, 2), (2, 3), (3, 2))
    assert eligible(there, records) == ids((3, 2), (2, 2), (1, 2))


def test_a_start_from_nothing_ends_the_chain() -> None:
    records = [NOTHING, Record((2, 1), None)]
    assert eligible(ids((1, 1), (2, 2)), records) == ids((2, 2))
    assert eligible(ids((1, 1)), records) == []


def test_a_start_that_recorded_nothing_changes_nothing() -> None:
    assert eligible(ids((1, 1)), [NOTHING]) == ids((1, 1))


def test_restoring_twice_in_one_incarnation() -> None:
    records = [NOTHING, Record((1, 4), snapshot(1, 2))]
    assert eligible(ids((1, 1), (1, 2), (1, 3), (1, 5)), records) == ids((1, 5), (1, 2), (1, 1))


def test_the_chain_survives_a_pruned_link() -> None:
    records = [NOTHING, Record((2, 1), snapshot(1, 2))]
    assert eligible(ids((1, 1), (2, 2)), records) == ids((2, 2), (1, 1))


def test_snapshots_without_a_record_are_foreign() -> None:
    assert eligible(ids((1, 1)), []) == []


def test_a_record_that_names_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match="a later one"):
        eligible([], [Record((1, 0), snapshot(1, 5))])


def refusing(*bad: str):  # type: ignore[no-untyped-def]
    def verified(name: str) -> str:
        if name in bad:
            raise SnapshotRejected(name, "file", "why")
        return name

    return verified


def test_the_newest_whole_one_is_chosen() -> None:
    assert first_whole(["c", "b", "a"], refusing(), "raise") == ("c", [])
    chosen, rejected = first_whole(["c", "b", "a"], refusing("c"), "older")
    assert chosen == "b"
    assert [error.snapshot for error in rejected] == ["c"]
    assert first_whole([], refusing(), "older") == (None, [])


@pytest.mark.parametrize("if_bad", ["raise", "older"])
def test_if_none_is_whole_the_newest_ones_reason_is_raised(if_bad: str) -> None:
    with pytest.raises(SnapshotRejected, match="'b'"):
        first_whole(["b", "a"], refusing("a", "b"), if_bad)


def test_raise_does_not_look_at_older_ones() -> None:
    with pytest.raises(SnapshotRejected):
        first_whole(["b", "a"], refusing("b"), "raise")
    with pytest.raises(ValueError, match="'raise' or 'older'"):
        first_whole(["b", "a"], refusing(), "ignore")


STEPS = {"e": 3, "d": 3, "c": 2, "b": 1, "a": 1}


@pytest.mark.parametrize(
    ("durable", "keep", "anchors", "goes"),
    [
        (None, 1, (), ""),  # nothing is durable: nothing goes (F4)
        ("x", 1, (), ""),
        ("e", 1, (), "dcba"),
        ("e", 2, (), "cba"),
        ("d", 1, (), "cba"),  # e is newer, and may not survive a power cut
        ("d", 2, (), "ba"),
        ("e", 9, (), ""),
        ("e", 1, (1,), "dca"),  # the newest of each anchor that the trainer keeps
        ("e", 1, (1, 2, 3), "da"),
        ("e", 1, (7,), "dcba"),
    ],
)
def test_retention(durable: str | None, keep: int, anchors: tuple[int, ...], goes: str) -> None:
    assert surplus(list("edcba"), durable, keep, frozenset(anchors), STEPS.get) == list(goes)

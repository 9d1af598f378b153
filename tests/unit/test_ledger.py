"""The recovery ledger: every change needs a slot, entries leave only when nothing is owed."""

from __future__ import annotations

import json

import pytest

from fsm.outcome import InvariantError
from participants.controller.ledger import Ledger, Slot
from participants.gym.wire import Finished


def reserved(*groups: str, size: int = 2) -> Ledger:
    ledger = Ledger()
    for number, group in enumerate(groups):
        ledger.reserve(Slot("draw"), group, number, ["agent-0"] * size)
    return ledger


def sealed(ledger: Ledger, *names: str) -> Ledger:
    for name in names:
        ledger.dispatch(Slot("dispatch"), name)
        ledger.seal(Slot("finish"), name, "result", "row", (f"{name}/call-0",))
    return ledger


def test_a_change_outside_of_its_mutation_is_a_bug() -> None:
    ledger, slot = reserved("p0"), Slot("dispatch")
    with pytest.raises(InvariantError, match="mutation 'dispatch', not in one of"):
        ledger.claim(slot, "p0")
    slot.close()
    with pytest.raises(InvariantError, match="ended"):
        ledger.dispatch(slot, "p0_g0")
    assert ledger.get("p0_g0").state == "reserved"


def test_groups_are_counted_by_where_they_are() -> None:
    ledger = reserved("p0", "p1", "p2", "p3")
    sealed(ledger, "p0_g0", "p0_g1", "p1_g0")
    ledger.drop(Slot("drop"), "p3", "stale", {})
    assert ledger.places() == {
        "trained": 0,
        "claimed": 0,
        "buffered": 1,
        "in_flight": 1,
        "reserved": 1,
        "dropped": 1,
    }


def test_siblings_that_contradict_are_a_bug() -> None:
    ledger = sealed(reserved("p0"), "p0_g0", "p0_g1")
    ledger.claim(Slot("claim"), "p0")
    half = [one for one in ledger.entries() if one.generation == 0]
    extra = sealed(reserved("p0"), "p0_g1").entries()[1]
    with pytest.raises(InvariantError, match="siblings of p0 contradict"):
        Ledger([*half, extra]).places()


@pytest.mark.parametrize("change", ["seal", "claim", "train"])
def test_a_state_follows_only_its_own_predecessor(change: str) -> None:
    ledger = reserved("p0")
    with pytest.raises(InvariantError, match="p0_g0 is reserved"):
        if change == "seal":
            ledger.seal(Slot("finish"), "p0_g0", "", "", ())
        elif change == "claim":
            ledger.claim(Slot("claim"), "p0")
        else:
            ledger.train(Slot("optimizer_commit"), ["p0"], 1, {})


def test_steps_are_trained_in_order() -> None:
    ledger = sealed(reserved("p0"), "p0_g0", "p0_g1")
    ledger.claim(Slot("claim"), "p0")
    with pytest.raises(InvariantError, match="step 2 is not the next"):
        ledger.train(Slot("optimizer_commit"), ["p0"], 2, {})


def test_a_trained_rollout_leaves_when_acknowledged_and_cleared() -> None:
    ledger = sealed(reserved("p0"), "p0_g0", "p0_g1")
    ledger.claim(Slot("claim"), "p0")
    ledger.train(Slot("optimizer_commit"), ["p0"], 1, {})
    assert len(ledger.entries()) == 2
    ledger.cleared(Slot("clear"), ledger.uncleared())
    assert [one.row_key for one in ledger.entries()] == ["", ""]
    ledger.acknowledged(Slot("acknowledge"), ledger.owed())
    assert ledger.entries() == ()
    assert ledger.places()["trained"] == 1


def test_clearing_keeps_what_was_named_since() -> None:
    ledger = sealed(reserved("p0"), "p0_g0", "p0_g1")
    before = ledger.uncleared()
    ledger.drop(Slot("drop"), "p0", "stale", {"p0_g0": ("p0_g0/call-9",)})
    ledger.cleared(Slot("drop"), before)
    assert ledger.get("p0_g0").rows == ("p0_g0/call-9",)
    assert ledger.get("p0_g0").row_key == "p0_g0", "its training row was not cleared by that"


def test_an_ack_of_an_earlier_run_does_not_count() -> None:
    ledger = sealed(reserved("p0"), "p0_g0")
    ledger.acknowledged(Slot("acknowledge"), [Finished("p0_g0", 7, ""), Finished("nobody", 0, "")])
    assert [one.rollout_id for one in ledger.owed()] == ["p0_g0"]


def test_a_restart_is_run_n_plus_1_of_a_new_lineage() -> None:
    ledger = reserved("p0")
    ledger.dispatch(Slot("dispatch"), "p0_g0")
    ledger.restart(Slot("start_over"), "p0_g0", "lineage_lost", ("p0_g0/call-0",))
    one = ledger.get("p0_g0")
    assert (one.state, one.attempt_index, one.lineage, one.start_overs) == ("reserved", 1, 1, 1)
    assert list(ledger.unsent()) == ["p0_g1", "p0_g0"]
    assert one.rows == ("p0_g0/call-0",)


def test_records_survive_json() -> None:
    ledger = sealed(reserved("p0", "p1"), "p0_g0")
    ledger.drop(Slot("drop"), "p1", "stale", {})
    records = json.loads(json.dumps(ledger.records()))
    again = Ledger.read(records, json.loads(json.dumps(ledger.totals_record())))
    assert again.entries() == ledger.entries()
    assert again.totals == ledger.totals
    assert again.owed() == ledger.owed()


def test_bad_records_are_named() -> None:
    records = reserved("p0").records()
    totals = reserved("p0").totals_record()
    with pytest.raises(ValueError, match="p0_g0 is in the ledger twice"):
        Ledger.read([*records, records[0]], totals)
    with pytest.raises(ValueError, match="state"):
        Ledger.read([{**records[0], "state": "lost"}], totals)
    with pytest.raises(ValueError, match="unknown key 'colour'"):
        Ledger.read([{**records[0], "colour": 1}], totals)

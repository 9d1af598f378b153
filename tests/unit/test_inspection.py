"""`quiesce verify` ties the parts of a snapshot together."""

from __future__ import annotations

import pytest

from fsm.outcome import SnapshotRejected
from quiesce.inspection import references

GYM = {"_needs": {"capture row": {"p0_g0/call-1": "p0_g0", "p1_g0/call-1": "p1_g0"}}}
LEDGER = {"_needs": {"training row": {"p2_g0": "p2_g0"}}, "_live": ["p0_g0", "p2_g0"]}
ROWS = {"_has": {"capture row": ["p0_g0/call-1"], "training row": ["p2_g0"]}}


def test_names_of_live_owners_are_counted() -> None:
    parts = {"gym": GYM, "controller": LEDGER, "data_plane": ROWS}
    assert references("s", parts) == {"capture row": 1, "training row": 1}


def test_without_a_ledger_every_name_counts() -> None:
    with pytest.raises(SnapshotRejected, match=r"capture row p1_g0/call-1: not there"):
        references("s", {"gym": GYM, "data_plane": ROWS})


@pytest.mark.parametrize(
    ("has", "who"),
    [
        ({"capture row": ["p0_g0/call-1"], "training row": []}, "controller"),
        ({"capture row": [], "training row": ["p2_g0"]}, "gym"),
    ],
)
def test_a_missing_row_is_refused_with_who_names_it(has: dict[str, list[str]], who: str) -> None:
    parts = {"gym": GYM, "controller": LEDGER, "data_plane": {"_has": has}}
    with pytest.raises(SnapshotRejected, match=rf"'s' is refused: {who}: names "):
        references("s", parts)

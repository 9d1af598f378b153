"""participants/transfer_queue/columns.py: rows of one shape together, nothing dense."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensordict")

from tensordict import TensorDict  # noqa: E402

from participants.data_plane import BATCH_ROWS  # noqa: E402
from participants.transfer_queue import columns  # noqa: E402


def back(groups: list[columns.Group]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for group in groups:
        fields = group.fields
        batch = TensorDict({}, batch_size=len(group.keys)) if fields is None else fields
        rows |= dict(zip(group.keys, columns.unpack(batch, group.shape), strict=True))
    return rows


def test_rows_of_one_shape_go_together_and_come_back() -> None:
    rows = {
        "a": {"ids": [1, 2], "lp": [0.5, 1.0], "text": "x"},
        "b": {"ids": [3], "lp": [0.25], "text": "y"},
        "c": {"ids": [], "lp": [], "text": "z"},
        "d": {"ids": []},
    }
    groups = columns.pack(rows, {})
    assert [group.keys for group in groups] == [["a", "b"], ["c"], ["d"]]
    assert back(groups) == rows


def test_no_number_column_is_dense() -> None:
    (group,) = columns.pack({"a": {"x": [1, 2], "n": 3}, "b": {"x": [3, 4], "n": 4}}, {})
    assert group.fields is not None
    assert group.fields.get("x").layout is torch.jagged
    assert not isinstance(group.fields.get("n"), torch.Tensor)


def test_a_dense_batch_is_made_jagged() -> None:
    batch = TensorDict(
        {"image": torch.arange(12).reshape(2, 3, 2), "reward": torch.tensor([0.5, 1.5])},
        batch_size=2,
    )
    (group,) = columns.pack_batch(["a", "b"], batch, {})
    assert group.fields is not None
    assert group.fields.get("image").layout is torch.jagged
    assert back([group])["b"] == {"image": [[6, 7], [8, 9], [10, 11]], "reward": 1.5}


def test_a_group_is_never_longer_than_one_call_may_be() -> None:
    rows = {f"k{i}": {"x": [i]} for i in range(BATCH_ROWS + 1)}
    assert [len(group.keys) for group in columns.pack(rows, {})] == [BATCH_ROWS, 1]


def test_whole_numbers_join_a_column_of_floats_but_not_the_other_way() -> None:
    kinds: dict[str, str] = {}
    columns.pack({"a": {"x": [0.5]}}, kinds)
    (group,) = columns.pack({"b": {"x": [1, 2]}}, kinds)
    assert group.shape == (("x", "float64"),)
    with pytest.raises(
        ValueError, match=r"'c', column 'x': object where earlier rows have float64"
    ):
        columns.pack({"c": {"x": "text"}}, kinds)


def test_a_refused_batch_teaches_nothing() -> None:
    kinds: dict[str, str] = {}
    with pytest.raises(ValueError, match=r"'b', column 'x': float64 where .* int64"):
        columns.pack({"a": {"x": [1]}, "b": {"x": [0.5]}}, kinds)
    assert kinds == {}


def test_a_number_too_large_for_a_tensor_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"row 'a', column 'x'"):
        columns.pack({"a": {"x": [2**70]}}, {})


def test_a_tag_says_what_the_row_consists_of_and_is_never_empty() -> None:
    (group,) = columns.pack({"a": {"x": [1]}}, {})
    stored = columns.tag_of(group.shape, {})
    assert stored
    assert columns.read_tag(stored) == ({}, group.shape)
    # TransferQueue merges the new tag of an overwritten row into the old one.
    merged = columns.tag_of(group.shape, {"old": 1}) | columns.tag_of(group.shape, {"new": 2})
    assert columns.read_tag(merged) == ({"new": 2}, group.shape)
    assert columns.read_tag({"theirs": 1}) == ({"theirs": 1}, None)

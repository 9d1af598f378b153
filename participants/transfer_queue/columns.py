"""Rows as TransferQueue wants them, and back.

A dense batch makes a checkpoint hundreds of times larger than its data: its rows are views of one
storage, and each is pickled with all of it. So lists of numbers go in as jagged columns, and
scalars and texts as objects; nothing dense is ever put.

TransferQueue merges the tag of an overwritten row into the old one, keeps columns that the new
row does not have, casts silently when rows of two dtypes are read at once, and drops columns that
only some of the rows read have. So each tag says what its row consists of (`Shape`), and only
rows of one shape are put or read together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

from participants.data_plane import BATCH_ROWS, Row, Tag

SHAPE = "_quiesce"  # our entry in a tag
OBJECT, NOTHING = "object", "nothing"  # kinds of a column that is no tensor; NOTHING: []

Shape = tuple[tuple[str, str], ...]  # (column, kind), sorted; kind "float64", "float64[20]", ...


@frozen
class Group:
    """Rows of one shape. fields: a TensorDict of len(keys) rows; None: no column has content."""

    keys: list[str]
    shape: Shape
    fields: TensorDict | None


def tag_of(shape: Shape, tag: Tag) -> dict[str, Any]:
    """The caller's tag with what the row consists of. It is never empty: the commit mark."""
    return {**tag, SHAPE: {"columns": dict(shape), "tag": list(tag)}}


def read_tag(stored: Mapping[str, Any]) -> tuple[dict[str, Any], Shape | None]:
    """The caller's tag, and the shape; None for a row that somebody else put."""
    ours = stored.get(SHAPE)
    if ours is None:
        return dict(stored), None
    return {name: stored[name] for name in ours["tag"]}, tuple(sorted(ours["columns"].items()))


def pack(rows: Mapping[str, Row], kinds: dict[str, str]) -> list[Group]:
    """Rows in groups of one shape each, at most BATCH_ROWS long.

    kinds: dtype of each column of this partition so far; new columns are entered. Raises
    ValueError for a row whose column is of another dtype than before.
    """
    known = dict(kinds)
    cells: dict[tuple[Shape, int], dict[str, dict[str, Any]]] = {}
    for number, (key, row) in enumerate(rows.items()):
        packed = {name: _cell(key, name, value, known) for name, value in row.items()}
        shape = tuple(sorted((name, kind) for name, (kind, _) in packed.items()))
        group = cells.setdefault((shape, number // BATCH_ROWS), {})
        group[key] = {name: cell for name, (_, cell) in packed.items()}
    kinds.update(known)
    return [Group(list(group), shape, _fields(group, shape)) for (shape, _), group in cells.items()]


def pack_batch(keys: Sequence[str], batch: TensorDict, kinds: dict[str, str]) -> list[Group]:
    """A TensorDict of len(keys) rows, its dense columns made jagged. Raises as `pack`."""
    if batch.batch_size[:1] != (len(keys),):
        raise ValueError(f"{len(keys)} keys for a batch of size {tuple(batch.batch_size)}")
    columns = {str(name): _split(batch.get(name)) for name in batch.keys()}  # noqa: SIM118
    return pack(
        {key: {name: cells[i] for name, cells in columns.items()} for i, key in enumerate(keys)},
        kinds,
    )


def unpack(batch: TensorDict, shape: Shape | None) -> list[dict[str, Any]]:
    """The rows of a batch that was read, as plain data."""
    kinds = dict(shape) if shape is not None else dict.fromkeys(map(str, batch.keys()), OBJECT)
    columns = {name: _plain(batch.get(name)) for name, kind in kinds.items() if kind != NOTHING}
    return [
        {name: [] if kind == NOTHING else columns[name][i] for name, kind in kinds.items()}
        for i in range(len(batch))
    ]


def stored_columns(shape: Shape) -> list[str]:
    """Columns of the shape that TransferQueue holds something for."""
    return [name for name, kind in shape if kind != NOTHING]


def _cell(key: str, name: str, value: Any, kinds: dict[str, str]) -> tuple[str, Any]:
    """Kind and content of one value."""
    if isinstance(value, list | tuple | torch.Tensor) and not len(value):
        return NOTHING, None  # it has no dtype; the shape alone brings it back
    if isinstance(value, list | tuple):
        value = _tensor(key, name, value, kinds.get(name))
    if not isinstance(value, torch.Tensor):
        kind = known = OBJECT
    else:
        known = str(value.dtype).removeprefix("torch.")
        kind = f"{known}{list(value.shape[1:])}" if value.dim() > 1 else known
    if kinds.setdefault(name, known) != known:
        raise ValueError(
            f"row {key!r}, column {name!r}: {known} where earlier rows have {kinds[name]}; "
            "TransferQueue keeps one type per column, give it another name"
        )
    return kind, value


def _tensor(key: str, name: str, value: Any, known: str | None) -> torch.Tensor:
    try:
        tensor = torch.tensor(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"row {key!r}, column {name!r}: {error}") from None
    if tensor.is_floating_point() or known == "float64":
        return torch.tensor(value, dtype=torch.float64)  # what a Python float is
    return tensor


def _fields(group: Mapping[str, Mapping[str, Any]], shape: Shape) -> TensorDict | None:
    fields: dict[str, Any] = {}
    for name in stored_columns(shape):
        cells = [row[name] for row in group.values()]
        if isinstance(cells[0], torch.Tensor):
            fields[name] = torch.nested.as_nested_tensor(cells, layout=torch.jagged)
        else:
            fields[name] = NonTensorStack(*cells)
    return TensorDict(fields, batch_size=len(group)) if fields else None


def _split(column: Any) -> list[Any]:
    """A batch's column as one value per row; numbers of a dense (N,) column become objects."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind()) if column.dim() > 1 else column.tolist()
    values: list[Any] = column.tolist()
    return values


def _plain(column: Any) -> list[Any]:
    cells: Iterable[Any] = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
    return [cell.tolist() if isinstance(cell, torch.Tensor) else cell for cell in cells]

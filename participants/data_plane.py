"""What quiesce needs of a data plane, and twins in memory.

Training rows live in partition `train` (key: the rollout, so that a repeat overwrites),
token-capture rows in `capture` (key: `<capture key>/<model call>`, written once, never changed).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

TRAIN, CAPTURE = "train", "capture"

# A row: column name to a list of numbers, a number, or a text. Plain data, so that a policy
# server needs no tensor library to capture a call.
Row = Mapping[str, Any]


class CaptureSink(Protocol):
    """Where a policy server puts token-capture rows. The row is there when `put` returns."""

    async def put(self, key: str, row: Row) -> None: ...


class Barrier(Protocol):
    """Many mutations, or one cut. Cuts do not nest."""

    def mutation(self, kind: str) -> AbstractAsyncContextManager[None]: ...
    def cut(self) -> AbstractAsyncContextManager[None]: ...
    @property
    def mutations(self) -> int:
        """How many mutations began since the start: has anything changed?"""


class DataPlane(CaptureSink, Protocol):
    """Rows by partition and key. A row is there only with its tag: the tag is the commit mark.

    Raises KeyError for a missing key (naming partition and key), OSError or TimeoutError for I/O.
    """

    async def put_rows(self, partition: str, rows: Mapping[str, Row], tag: Mapping[str, Any]) -> None: ...
    async def get_rows(self, partition: str, keys: Iterable[str]) -> dict[str, dict[str, Any]]: ...
    async def keys(self, partition: str) -> dict[str, dict[str, Any]]:
        """Committed keys and their tags."""
    async def half_born(self, partition: str) -> list[str]:
        """Keys without the commit mark: a writer died in between."""
    async def clear(self, partition: str, keys: Iterable[str]) -> None: ...

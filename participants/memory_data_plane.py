"""A data plane in memory: a first-class twin for tests, the demo, and trainers without Ray.

Faults, each for the next matching call only, so that a test says what breaks and when:
`lose_next_tag()` leaves the next put half-born and raises, as if its writer had died before the
tag; `fail(nth)` makes the nth call from now raise before it changes anything; `pause` (an
awaitable factory) runs before every call: a slow plane without a clock.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from attrs import define

from participants.data_plane import CAPTURE, Row, Tag, check_row


@define
class _Stored:
    row: dict[str, Any]
    tag: dict[str, Any] | None = None  # the commit mark


class MemoryDataPlane:
    """`data_plane.DataPlane` in a dictionary. Rows are copied on the way in and out."""

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, _Stored]] = {}
        self.calls = 0
        self.pause: Callable[[], Awaitable[None]] | None = None
        self._fail_at = 0
        self._error: Exception = OSError("the data plane failed")
        self._lose_tag = False

    # -- faults --------------------------------------------------------------------------------

    def lose_next_tag(self) -> None:
        """The next put writes its rows without the commit mark and raises OSError."""
        self._lose_tag = True

    def fail(self, nth: int = 1, error: Exception | None = None) -> None:
        """The nth call from now (1: the next) raises `error`, by default an OSError."""
        self._fail_at = self.calls + nth
        self._error = error or OSError("the data plane failed")

    # -- DataPlane -----------------------------------------------------------------------------

    async def put(self, key: str, row: Row) -> None:
        await self.put_rows(CAPTURE, {key: row}, {})

    async def put_rows(self, partition: str, rows: Mapping[str, Row], tag: Tag) -> None:
        for key, row in rows.items():
            check_row(key, row)
        await self._called()
        stored = self._partitions.setdefault(partition, {})
        mark = None if self._lose_tag else dict(tag)
        for key, row in rows.items():
            stored[key] = _Stored(copy.deepcopy(dict(row)), copy.deepcopy(mark))
        if self._lose_tag:
            self._lose_tag = False
            raise OSError(f"the writer of {sorted(rows)} in {partition!r} died before the tag")

    async def get_rows(self, partition: str, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        await self._called()
        stored = self._partitions.get(partition, {})
        result = {}
        for key in keys:
            if key not in stored or stored[key].tag is None:
                raise KeyError(f"partition {partition!r} has no row {key!r}")
            result[key] = copy.deepcopy(stored[key].row)
        return result

    async def keys(self, partition: str) -> dict[str, dict[str, Any]]:
        await self._called()
        stored = self._partitions.get(partition, {})
        return {key: copy.deepcopy(one.tag) for key, one in stored.items() if one.tag is not None}

    async def half_born(self, partition: str) -> list[str]:
        await self._called()
        stored = self._partitions.get(partition, {})
        return sorted(key for key, one in stored.items() if one.tag is None)

    async def clear(self, partition: str, keys: Iterable[str]) -> None:
        await self._called()
        for key in keys:
            self._partitions.get(partition, {}).pop(key, None)

    async def _called(self) -> None:
        if self.pause is not None:
            await self.pause()
        self.calls += 1
        if self.calls == self._fail_at:
            raise self._error

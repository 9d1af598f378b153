"""What every `DataPlane` and every `CaptureSink` must do (`quiesce.testing`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from participants.data_plane import BATCH_ROWS, CAPTURE, TRAIN, CaptureSink, DataPlane, Row

ROW = {
    "token_ids": [5, 6, 7],
    "logprobs": [-0.1, -2.0, -math.inf],
    "policy_version": 3,
    "name": "ä",
}
LIMIT_S = 60.0


class CaptureSinkConformance:
    """Override `make` (a sink into an empty place) and `read` (the rows that are there)."""

    async def make(self) -> CaptureSink:
        raise NotImplementedError

    async def read(self, sink: Any) -> dict[str, Row]:
        """Every row that another process would see now, by key."""
        raise NotImplementedError

    def run(self, main: Callable[[Any], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with asyncio.timeout(LIMIT_S):
                await main(await self.make())

        asyncio.run(whole())

    def test_a_row_is_there_when_put_returns(self) -> None:
        """The reply of a model call goes out after that: a row that came later could be lost."""

        async def main(sink: CaptureSink) -> None:
            for number in range(3):
                key = f"p0_g0/call-{number}"
                await sink.put(key, ROW)
                assert (await self.read(sink))[key] == ROW

        self.run(main)

    def test_a_repeated_put_changes_nothing(self) -> None:
        async def main(sink: CaptureSink) -> None:
            await sink.put("p0_g0/call-0", ROW)
            await sink.put("p0_g0/call-0", ROW)
            assert await self.read(sink) == {"p0_g0/call-0": ROW}

        self.run(main)

    def test_concurrent_puts_lose_nothing(self) -> None:
        async def main(sink: CaptureSink) -> None:
            await asyncio.gather(*(sink.put(f"p{n}/call-0", ROW) for n in range(20)))
            assert len(await self.read(sink)) == 20

        self.run(main)

    def test_what_is_no_row_is_refused_by_name(self) -> None:
        async def main(sink: CaptureSink) -> None:
            with pytest.raises(ValueError, match="'bad'"):
                await sink.put("bad", {"x": {"a": 1}})
            assert await self.read(sink) == {}

        self.run(main)


class DataPlaneConformance:
    """Override `run`: it calls `main(plane)` with an empty plane, on an event loop."""

    def run(self, main: Callable[[Any], Awaitable[None]]) -> None:
        raise NotImplementedError

    def test_a_row_comes_back_equal_with_its_tag(self) -> None:
        async def main(plane: DataPlane) -> None:
            await plane.put_rows(TRAIN, {"p0_g0": ROW}, {"len": 3, "status": "done"})
            assert await plane.get_rows(TRAIN, ["p0_g0"]) == {"p0_g0": ROW}
            assert await plane.keys(TRAIN) == {"p0_g0": {"len": 3, "status": "done"}}
            assert await plane.half_born(TRAIN) == []

        self.run(main)

    def test_rows_of_different_columns_lengths_and_no_numbers_live_together(self) -> None:
        rows: dict[str, dict[str, Any]] = {
            "a": {"token_ids": [1, 2], "logprobs": [0.5, 0.25]},
            "b": {"token_ids": [], "logprobs": []},
            "c": {"token_ids": [4], "logprobs": [1.5], "top": [[0.1, 0.2]]},
            "d": {"reward": 0.5, "done": True},
        }

        async def main(plane: DataPlane) -> None:
            await plane.put_rows(TRAIN, rows, {})
            assert await plane.get_rows(TRAIN, rows) == rows
            assert await plane.get_rows(TRAIN, ["d", "b", "b"]) == {"b": rows["b"], "d": rows["d"]}
            assert list(await plane.keys(TRAIN)) == list(rows)

        self.run(main)

    def test_a_capture_row_is_committed_without_a_tag_of_its_own(self) -> None:
        async def main(plane: DataPlane) -> None:
            await plane.put("p0_g0/call-1", ROW)
            assert await plane.keys(CAPTURE) == {"p0_g0/call-1": {}}
            assert await plane.keys(TRAIN) == {}

        self.run(main)

    def test_a_repeat_overwrites_the_row_and_its_whole_tag(self) -> None:
        async def main(plane: DataPlane) -> None:
            await plane.put_rows(TRAIN, {"k": {"token_ids": [1], "name": "old"}}, {"a": 1})
            await plane.put_rows(TRAIN, {"k": {"token_ids": [2]}}, {"b": 2})
            assert await plane.get_rows(TRAIN, ["k"]) == {"k": {"token_ids": [2]}}
            assert await plane.keys(TRAIN) == {"k": {"b": 2}}

        self.run(main)

    def test_more_rows_than_one_call_takes(self) -> None:
        rows = {f"k{i}": {"token_ids": [i, i + 1]} for i in range(BATCH_ROWS + 1)}

        async def main(plane: DataPlane) -> None:
            await plane.put_rows(TRAIN, rows, {})
            assert await plane.get_rows(TRAIN, rows) == rows
            await plane.clear(TRAIN, rows)
            assert await plane.keys(TRAIN) == {}

        self.run(main)

    def test_a_missing_key_is_named_with_its_partition(self) -> None:
        async def main(plane: DataPlane) -> None:
            with pytest.raises(KeyError, match=r"'train'.*'nope'"):
                await plane.get_rows(TRAIN, ["nope"])
            await plane.put_rows(TRAIN, {"k": ROW}, {})
            with pytest.raises(KeyError, match="'nope'"):
                await plane.get_rows(TRAIN, ["k", "nope"])

        self.run(main)

    def test_clear_takes_the_named_rows_and_shrugs_at_unknown_ones(self) -> None:
        async def main(plane: DataPlane) -> None:
            await plane.put_rows(TRAIN, {"a": ROW, "b": ROW}, {})
            await plane.clear(TRAIN, ["a", "nope"])
            await plane.clear(CAPTURE, ["nope"])
            await plane.clear(TRAIN, [])
            assert set(await plane.keys(TRAIN)) == {"b"}

        self.run(main)

    @pytest.mark.parametrize(
        ("row", "column"),
        [
            ({"x": [1, "a"]}, "'x'"),
            ({"x": {"a": 1}}, "'x'"),
            ({"x": None}, "'x'"),
            ({"x": ["a", "b"]}, "'x'"),
            ({"x": [[1], 2]}, "'x'"),
            ({"x": [[1], [2, 3]]}, "'x'"),
            ({3: 1}, "3"),
            ({}, "no column"),
        ],
    )
    def test_what_is_no_row_is_refused_by_name_and_nothing_of_it_is_written(
        self, row: Any, column: str
    ) -> None:
        async def main(plane: DataPlane) -> None:
            with pytest.raises(ValueError, match=rf"'bad'.*{column}"):
                await plane.put_rows(TRAIN, {"good": ROW, "bad": row}, {})
            assert await plane.keys(TRAIN) == {}
            assert await plane.half_born(TRAIN) == []

        self.run(main)

    def test_concurrent_writers_lose_nothing(self) -> None:
        async def main(plane: DataPlane) -> None:
            await asyncio.gather(*(plane.put(f"p{i}/call-0", ROW) for i in range(20)))
            assert len(await plane.keys(CAPTURE)) == 20

        self.run(main)

"""MemoryDataPlane behaves like a DataPlane, and breaks only when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from participants.conformance.data_plane import DataPlaneConformance
from participants.data_plane import CAPTURE, TRAIN
from participants.memory_data_plane import MemoryDataPlane


class TestMemoryDataPlane(DataPlaneConformance):
    def run(self, main: Callable[[MemoryDataPlane], Awaitable[None]]) -> None:
        async def whole() -> None:
            await main(MemoryDataPlane())

        asyncio.run(whole())

    def test_a_writer_that_dies_before_the_tag_leaves_a_half_born_key(self) -> None:
        async def main(plane: MemoryDataPlane) -> None:
            plane.lose_next_tag()
            with pytest.raises(OSError, match=r"\['a'\] in 'train' died before the tag"):
                await plane.put_rows(TRAIN, {"a": {"x": 1}}, {"len": 1})
            assert await plane.keys(TRAIN) == {}
            assert await plane.half_born(TRAIN) == ["a"]
            with pytest.raises(KeyError, match="'a'"):
                await plane.get_rows(TRAIN, ["a"])
            await plane.put_rows(TRAIN, {"a": {"x": 2}}, {"len": 1})  # the repeat heals it
            assert await plane.half_born(TRAIN) == []

        self.run(main)

    def test_the_nth_call_fails_once_and_changes_nothing(self) -> None:
        async def main(plane: MemoryDataPlane) -> None:
            plane.fail(2, TimeoutError("away"))
            await plane.put("a", {"x": 1})
            with pytest.raises(TimeoutError, match="away"):
                await plane.put("b", {"x": 1})
            assert set(await plane.keys(CAPTURE)) == {"a"}

        self.run(main)

    def test_a_slow_plane_waits_before_it_changes_anything(self) -> None:
        async def main(plane: MemoryDataPlane) -> None:
            gate = asyncio.Event()
            plane.pause = gate.wait
            put = asyncio.create_task(plane.put("a", {"x": 1}))
            await asyncio.sleep(0)
            assert plane.calls == 0
            gate.set()
            await put
            assert plane.calls == 1

        self.run(main)

    def test_rows_are_copied_in_and_out(self) -> None:
        async def main(plane: MemoryDataPlane) -> None:
            row = {"x": [1]}
            await plane.put("a", row)
            row["x"].append(2)
            (await plane.get_rows(CAPTURE, ["a"]))["a"]["x"].append(3)
            assert await plane.get_rows(CAPTURE, ["a"]) == {"a": {"x": [1]}}

        self.run(main)

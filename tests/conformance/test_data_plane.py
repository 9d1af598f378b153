"""The rows of any data plane, saved and put back by `DataPlanePart`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fsm.participant import Facts, Participant, Restore
from participants.barrier import AsyncBarrier
from participants.data_plane import TRAIN, DataPlanePart
from participants.memory_data_plane import MemoryDataPlane
from quiesce.testing import IN_PROCESS, Conformance


class KeepsEverything(Participant):
    """In the controller's place: a join that keeps every row."""

    name, calls = "controller", frozenset({"data_plane"})
    restore_step = "load_controller"

    async def restore(self, restore: Restore) -> Facts:
        found = restore.facts["data_plane"]
        return {"keep_train": list(found["_train"]), "keep_capture": list(found["_capture"])}


class DataPlaneConformance(Conformance):
    """For every data plane. A subclass makes the participant."""

    no_hold = "writers elsewhere are drained by Gym; the barrier keeps the others out of the cut"
    no_staging = "rows are loaded into an empty data plane; a rollback empties it"
    fresh_only = "rows of another time would be mixed in: a plane that is not empty is refused"
    no_lease = no_fence = IN_PROCESS

    async def work(self, one: DataPlanePart, number: int) -> None:
        key = f"p{number}_g0"
        async with self.rows.mutation("put"):
            await one.plane.put_rows(TRAIN, {key: {"token_ids": [number, 7]}}, {"len": 2})
            await one.plane.put(f"{key}/call-1", {"token_ids": [number], "logprobs": [-0.5]})

    async def observe(self, one: DataPlanePart) -> Any:
        held = await one._list()
        rows = {
            partition: await one.plane.get_rows(partition, tags)
            for partition, tags in held.tags.items()
            if tags
        }
        return held, rows

    async def is_held(self, one: DataPlanePart) -> bool:
        return False

    def others(self, one: DataPlanePart) -> Iterable[Participant]:
        return [KeepsEverything()]

    def barrier(self, one: DataPlanePart) -> Callable[[], AbstractAsyncContextManager[None]]:
        self.rows = AsyncBarrier()
        return self.rows.cut


class TestMemoryDataPlane(DataPlaneConformance):
    async def make(self) -> DataPlanePart:
        return DataPlanePart(MemoryDataPlane())

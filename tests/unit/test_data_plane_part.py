"""DataPlanePart: what the cut demands, what a restore may touch (S3, R1, R5)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fsm.outcome import Refused, SnapshotRejected
from participants.data_plane import BATCH_ROWS, CAPTURE, MAX_NAMES, TRAIN, DataPlanePart
from participants.memory_data_plane import MemoryDataPlane
from storage.memory import MemoryStore
from tests.saving import attempt, newest, save

ROW = {"token_ids": [1, 2], "logprobs": [-0.5, -math.inf], "name": "ä"}


def run(main: Callable[[MemoryStore, MemoryDataPlane], Awaitable[None]]) -> None:
    async def whole() -> None:
        store = MemoryStore()
        await store.open()
        await main(store, MemoryDataPlane())

    asyncio.run(asyncio.wait_for(whole(), 20))


async def fill(plane: MemoryDataPlane) -> None:
    await plane.put_rows(TRAIN, {"p0_g0": ROW}, {"len": 2})
    await plane.put_rows(TRAIN, {"p0_g1": {"reward": 0.5}}, {"len": 9})
    await plane.put("p1_g0/call-1", ROW)
    await plane.put("p1_g0/call-2", ROW)


GYM = {"gym": {"_rows": {"p1_g0": ["p1_g0/call-1", "p1_g0/call-2"]}}}


async def everything(plane: MemoryDataPlane) -> dict[str, Any]:
    keys = {partition: await plane.keys(partition) for partition in (TRAIN, CAPTURE)}
    rows = {partition: await plane.get_rows(partition, some) for partition, some in keys.items()}
    return {"keys": keys, "rows": rows}


def test_every_row_and_tag_comes_back_into_an_empty_plane() -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        await fill(plane)
        facts = await save(store, DataPlanePart(plane), GYM)
        assert facts == {"train_rows": 2, "capture_rows": 2, "half_born": []}

        other = DataPlanePart(MemoryDataPlane())
        restore, _ = await newest(store, other)
        said = await other.restore(restore)
        assert said == {
            "train_rows": 2,
            "capture_rows": 2,
            "_train": {"p0_g0": {"len": 2}, "p0_g1": {"len": 9}},
            "_capture": ["p1_g0/call-1", "p1_g0/call-2"],
        }
        assert await everything(other.plane) == await everything(plane)
        assert DataPlanePart.inspect(restore.saved()) == {
            "train_rows": 2,
            "capture_rows": 2,
            "_has": {
                "training row": ["p0_g0", "p0_g1"],
                "capture row": ["p1_g0/call-1", "p1_g0/call-2"],
            },
        }

    run(main)


def test_more_rows_than_one_batch() -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        rows = {f"k{i}": {"x": i} for i in range(2 * BATCH_ROWS + 1)}
        await plane.put_rows(TRAIN, rows, {})
        await save(store, DataPlanePart(plane), {})
        other = DataPlanePart(MemoryDataPlane())
        await other.restore((await newest(store, other))[0])
        assert await other.plane.get_rows(TRAIN, rows) == rows

    run(main)


def test_a_row_that_a_parked_rollout_names_must_exist() -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        part = DataPlanePart(plane)
        await fill(plane)
        await plane.clear(CAPTURE, ["p1_g0/call-2"])
        seen, _, _ = await attempt(store, part, GYM)
        with pytest.raises(Refused, match=r"row_missing: rollout 'p1_g0' names row 'p1_g0/call-2'"):
            await part.cut(seen)

    run(main)


def test_a_half_born_row_that_a_rollout_names_is_missing() -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        part = DataPlanePart(plane)
        plane.lose_next_tag()
        with pytest.raises(OSError, match="died"):
            await plane.put("p1_g0/call-1", ROW)
        seen, _, _ = await attempt(store, part, GYM)
        with pytest.raises(Refused, match="p1_g0/call-1"):
            await part.cut(seen)

    run(main)


def test_half_born_rows_are_listed_and_not_saved() -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        await fill(plane)
        plane.lose_next_tag()
        with pytest.raises(OSError, match="died"):
            await plane.put_rows(TRAIN, {f"h{i}": ROW for i in range(MAX_NAMES + 1)}, {})
        facts = await save(store, DataPlanePart(plane), GYM)
        assert len(facts["half_born"]) == MAX_NAMES
        assert facts["half_born"][0] == "train/h0"
        assert facts["train_rows"] == 2
        other = DataPlanePart(MemoryDataPlane())
        assert (await other.restore((await newest(store, other))[0]))["train_rows"] == 2

    run(main)


def test_a_row_that_comes_during_the_cut_ends_the_attempt() -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        await fill(plane)
        part = DataPlanePart(plane)
        seen, _, _ = await attempt(store, part, GYM)

        async def stray_writer() -> None:
            plane.pause = None
            await plane.put("p9/call-0", ROW)

        async def first_read() -> None:  # of the rows, after the listing
            if plane.calls == calls + 4:
                await stray_writer()

        calls = plane.calls
        plane.pause = first_read
        with pytest.raises(Refused, match="moved_during_cut"):
            await part.cut(seen)

    run(main)


async def put_old(plane: MemoryDataPlane, partition: str, left: str) -> None:
    if left == "half_born":
        plane.lose_next_tag()
        with pytest.raises(OSError, match="died"):
            await plane.put_rows(partition, {"old": ROW}, {})
    else:
        await plane.put_rows(partition, {"old": ROW}, {})


@pytest.mark.parametrize("left", ["committed", "half_born"])
def test_a_plane_that_holds_training_rows_is_refused_and_left_alone(left: str) -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        await fill(plane)
        await save(store, DataPlanePart(plane), GYM)
        other = DataPlanePart(MemoryDataPlane())
        await put_old(other.plane, TRAIN, left)
        await other.plane.put("p0_g0/call-9", ROW)
        restore, _ = await newest(store, other)
        with pytest.raises(Refused, match="not_empty: the data plane holds 1 rows"):
            await other.restore(restore)
        await other.rollback(restore)
        assert len([*await other.plane.keys(TRAIN), *await other.plane.half_born(TRAIN)]) == 1
        assert list(await other.plane.keys(CAPTURE)) == ["p0_g0/call-9"]

    run(main)


@pytest.mark.parametrize("left", ["committed", "half_born"])
def test_capture_rows_of_policy_servers_that_lived_on_make_way(left: str) -> None:
    """R4: their runs end with this restore, and Gym is fenced when it loads."""

    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        await fill(plane)
        await save(store, DataPlanePart(plane), GYM)
        other = DataPlanePart(MemoryDataPlane())
        await put_old(other.plane, CAPTURE, left)
        restore, _ = await newest(store, other)
        await other.restore(restore)
        assert await everything(other.plane) == await everything(plane)
        assert await other.plane.half_born(CAPTURE) == []

    run(main)


def test_rollback_empties_what_a_failed_load_put_and_the_next_restore_works() -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        await fill(plane)
        await save(store, DataPlanePart(plane), GYM)
        other = DataPlanePart(MemoryDataPlane())
        restore, _ = await newest(store, other)
        other.plane.fail(6)  # 4 calls to see that it is empty, then the second put
        with pytest.raises(OSError, match="the data plane failed"):
            await other.restore(restore)
        assert await other.plane.keys(TRAIN)
        await other.rollback(restore)
        assert await other.plane.keys(TRAIN) == {}
        again, _ = await newest(store, other)
        await other.restore(again)
        assert await everything(other.plane) == await everything(plane)

    run(main)


def test_a_rollback_of_another_restore_touches_nothing() -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        await fill(plane)
        await save(store, DataPlanePart(plane), GYM)
        other = DataPlanePart(MemoryDataPlane())
        await other.restore((await newest(store, other))[0])
        later, _ = await newest(store, other)
        with pytest.raises(Refused, match="not_empty"):
            await other.restore(later)
        await other.rollback(later)
        assert len(await other.plane.keys(TRAIN)) == 2

    run(main)


def test_reconcile_keeps_exactly_what_the_join_keeps() -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        await fill(plane)
        await save(store, DataPlanePart(plane), GYM)
        other = DataPlanePart(MemoryDataPlane())
        restore, operation = await newest(store, other)
        await other.restore(restore)
        other.plane.lose_next_tag()
        with pytest.raises(OSError, match="died"):
            await other.plane.put("half", ROW)
        operation.facts["controller"] = {
            "keep_train": ["p0_g1"],
            "keep_capture": ["p1_g0/call-1"],
        }
        await other.reconcile(restore)
        assert list(await other.plane.keys(TRAIN)) == ["p0_g1"]
        assert list(await other.plane.keys(CAPTURE)) == ["p1_g0/call-1"]
        assert await other.plane.half_born(CAPTURE) == []

    run(main)


@pytest.mark.parametrize(("partition", "kept"), [(TRAIN, "keep_train"), (CAPTURE, "keep_capture")])
def test_a_kept_row_that_is_not_there_is_named_before_anything_is_cleared(
    partition: str, kept: str
) -> None:
    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        await fill(plane)
        part = DataPlanePart(plane)
        await save(store, part, GYM)
        restore, operation = await newest(store, part)
        join = {"keep_train": [], "keep_capture": []}
        operation.facts["controller"] = join | {kept: ["lost"]}
        before = await everything(plane)
        with pytest.raises(Refused, match=rf"the restored ledger names row 'lost'.*'{partition}'"):
            await part.reconcile(restore)
        assert await everything(plane) == before

    run(main)


def test_a_record_that_is_none_is_refused_with_file_and_line() -> None:
    class Wrong(DataPlanePart):
        async def _write(self, attempt: Any, part: Any, held: Any) -> None:
            part.records(TRAIN)({"key": "k", "tag": "{}"})
            part.records(CAPTURE)

    async def main(store: MemoryStore, plane: MemoryDataPlane) -> None:
        await save(store, Wrong(plane), {})
        other = DataPlanePart(MemoryDataPlane())
        restore, _ = await newest(store, other)
        with pytest.raises(SnapshotRejected, match=r"train.jsonl, line 1.*row"):
            await other.restore(restore)

    run(main)

"""The real TransferQueue on a real Ray, saved through a real snapshot folder."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")

from participants.transfer_queue import cluster  # noqa: E402  before transfer_queue: settings

tq = pytest.importorskip("transfer_queue")

from tensordict import TensorDict  # noqa: E402

from fsm.outcome import Refused, SnapshotRejected, Unavailable  # noqa: E402
from participants.conformance.data_plane import ROW, DataPlaneConformance  # noqa: E402
from participants.data_plane import CAPTURE, TRAIN  # noqa: E402
from participants.transfer_queue.participant import TransferQueue  # noqa: E402
from participants.transfer_queue.plane import TransferQueuePlane  # noqa: E402
from storage.store import FolderStore  # noqa: E402
from tests.saving import attempt, newest, save  # noqa: E402

GYM = {"gym": {"_rows": {"p1_g0": ["p1_g0/call-1"]}}}


class Cluster:
    """One TransferQueue for the module; `empty` between tests, `fresh` where that is the point."""

    def __init__(self) -> None:
        self.plane = cluster.start(2, timeout_s=20)

    def fresh(self) -> TransferQueuePlane:
        self.close()
        self.plane = cluster.start(2, timeout_s=20)
        return self.plane

    def close(self) -> None:
        cluster.stop(self.plane)

    async def empty(self) -> TransferQueuePlane:
        listing = await self.plane.listing()
        for of_partition in (listing.tags, listing.half_born):
            for partition, keys in of_partition.items():
                await self.plane.clear(partition, keys)
        self.plane._kinds.clear()  # what a column held in another test does not matter
        return self.plane


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    ray.init(
        num_cpus=12,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200 * 2**20,
    )
    one = Cluster()
    yield one
    one.close()
    ray.shutdown()


def run(running: Cluster, main: Callable[[TransferQueuePlane], Awaitable[None]]) -> None:
    async def whole() -> None:
        await main(await running.empty())

    asyncio.run(asyncio.wait_for(whole(), 120))


async def open_store(tmp_path: Path) -> FolderStore:
    store = FolderStore(tmp_path / "snapshots")
    await store.open()
    return store


async def leave_half_born(key: str, partition: str) -> None:
    """As a writer that died after its first call."""
    client = tq.get_client()
    await client.async_kv_retrieve_meta(keys=[key], partition_id=partition, create=True)


async def fill(plane: TransferQueuePlane) -> None:
    await plane.put_rows(TRAIN, {"p0_g0": ROW, "p0_g1": {"token_ids": [9]}}, {"len": 3})
    await plane.put("p1_g0/call-1", ROW)


class TestTransferQueuePlane(DataPlaneConformance):
    @pytest.fixture(autouse=True)
    def _running(self, running: Cluster) -> None:
        self.cluster = running

    def run(self, main: Callable[[Any], Awaitable[None]]) -> None:
        run(self.cluster, main)

    def test_keys_without_tag_are_half_born_and_not_readable(self) -> None:
        async def main(plane: TransferQueuePlane) -> None:
            await fill(plane)
            await leave_half_born("half", TRAIN)
            assert set(await plane.keys(TRAIN)) == {"p0_g0", "p0_g1"}
            assert await plane.half_born(TRAIN) == ["half"]
            with pytest.raises(KeyError, match="'half'"):
                await plane.get_rows(TRAIN, ["p0_g0", "half"])
            await plane.clear(TRAIN, ["half"])
            assert await plane.half_born(TRAIN) == []

        self.run(main)

    def test_a_column_of_another_type_is_refused_by_name(self) -> None:
        async def main(plane: TransferQueuePlane) -> None:
            await plane.put_rows(TRAIN, {"a": {"x": [1, 2]}}, {})
            with pytest.raises(ValueError, match=r"'b', column 'x': float64.*int64"):
                await plane.put_rows(TRAIN, {"b": {"x": [0.5]}}, {})
            assert set(await plane.keys(TRAIN)) == {"a"}

        self.run(main)

    def test_rows_that_others_put_are_read_as_they_are(self) -> None:
        async def main(plane: TransferQueuePlane) -> None:
            ids = torch.nested.as_nested_tensor([torch.tensor([1, 2])], layout=torch.jagged)
            fields = TensorDict({"ids": ids}, batch_size=1)
            await asyncio.to_thread(tq.kv_batch_put, ["o"], TRAIN, fields, [{"theirs": 1}])
            assert await plane.keys(TRAIN) == {"o": {"theirs": 1}}
            assert await plane.get_rows(TRAIN, ["o"]) == {"o": {"ids": [1, 2]}}

        self.run(main)

    def test_a_batch_whose_sizes_differ_is_refused(self) -> None:
        async def main(plane: TransferQueuePlane) -> None:
            batch = TensorDict({"x": torch.zeros(2, 3)}, batch_size=2)
            with pytest.raises(ValueError, match=r"1 keys for a batch of size \(2,\)"):
                await plane.put_batch(TRAIN, ["a"], batch, [{}])
            with pytest.raises(ValueError, match="1 tags for 2 keys"):
                await plane.put_batch(TRAIN, ["a", "b"], batch, [{}])

        self.run(main)

    def test_a_call_without_answer_ends_at_its_deadline(self) -> None:
        async def main(plane: TransferQueuePlane) -> None:
            deaf = TransferQueuePlane(plane.topology, timeout_s=1e-6)
            try:
                with pytest.raises(TimeoutError, match="did not list keys within 1e-06 s"):
                    await deaf.keys(TRAIN)
            finally:
                deaf.close()
            assert await plane.keys(TRAIN) == {}  # the connection is none the worse

        self.run(main)


def test_a_dense_batch_becomes_a_checkpoint_of_its_own_size(
    running: Cluster, tmp_path: Path
) -> None:
    rows, numbers = 1000, 128

    async def main(plane: TransferQueuePlane) -> None:
        keys = [f"k{i}" for i in range(rows)]
        x = torch.arange(rows * numbers).reshape(rows, numbers)
        batch = TensorDict({"x": x, "reward": torch.arange(rows) / 2}, batch_size=rows)
        await plane.put_batch(TRAIN, keys, batch, [{"i": i} for i in range(rows)])
        assert await plane.get_rows(TRAIN, ["k7"]) == {"k7": {"x": x[7].tolist(), "reward": 3.5}}
        assert (await plane.keys(TRAIN))["k7"] == {"i": 7}
        store = await open_store(tmp_path)
        await save(store, TransferQueue(plane), {})
        restore, _ = await newest(store, TransferQueue(plane))
        size_bytes = sum(file.size_bytes for file in restore.saved().files())
        assert size_bytes <= 3 * rows * numbers * 8
        await store.close()

    run(running, main)


def test_everything_comes_back_in_a_fresh_transfer_queue(running: Cluster, tmp_path: Path) -> None:
    async def before(plane: TransferQueuePlane) -> None:
        await fill(plane)
        await plane.put_rows("other", {"kept": {"x": [1]}}, {})
        await leave_half_born("half", CAPTURE)
        store = await open_store(tmp_path)
        facts = await save(store, TransferQueue(plane), GYM)
        assert facts == {"train_rows": 2, "capture_rows": 1, "half_born": ["capture/half"]}
        await store.close()

    async def after() -> None:
        part = TransferQueue(running.plane)
        store = await open_store(tmp_path)
        restore, operation = await newest(store, part)
        assert await part.restore(restore) == {
            "train_rows": 2,
            "capture_rows": 1,
            "_train": {"p0_g0": {"len": 3}, "p0_g1": {"len": 3}},
            "_capture": ["p1_g0/call-1"],
        }
        keep = {"keep_train": ["p0_g0"], "keep_capture": ["p1_g0/call-1"]}
        operation.facts["controller"] = keep
        await part.reconcile(restore)
        assert await part.plane.get_rows(TRAIN, await part.plane.keys(TRAIN)) == {"p0_g0": ROW}
        assert await part.plane.get_rows(CAPTURE, ["p1_g0/call-1"]) == {"p1_g0/call-1": ROW}
        assert await part.plane.get_rows("other", ["kept"]) == {"kept": {"x": [1]}}
        assert await part.plane.half_born(CAPTURE) == []
        assert TransferQueue.inspect(restore.saved())["half_born"] == 1
        await part.plane.put("p2_g0/call-1", ROW)  # a new index collides with nothing
        assert (await part.plane.get_rows(CAPTURE, ["p1_g0/call-1"]))["p1_g0/call-1"] == ROW
        await store.close()

    run(running, before)
    running.fresh()
    asyncio.run(asyncio.wait_for(after(), 120))


def test_a_missing_row_refuses_the_cut(running: Cluster, tmp_path: Path) -> None:
    async def main(plane: TransferQueuePlane) -> None:
        store = await open_store(tmp_path)
        part = TransferQueue(plane)
        seen, _, _ = await attempt(store, part, GYM)
        with pytest.raises(Refused, match="row_missing: rollout 'p1_g0'"):
            await part.cut(seen)
        await store.close()

    run(running, main)


def test_a_full_target_and_a_moving_row_end_the_cut(
    running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(plane: TransferQueuePlane) -> None:
        await fill(plane)
        store = await open_store(tmp_path)
        part = TransferQueue(plane)
        real = tq.save_checkpoint

        def with_a_stray_clear(folder: Path) -> None:
            real(folder)
            tq.kv_clear("p0_g1", TRAIN)

        def full(folder: Path) -> None:
            raise RuntimeError("No space left on device")

        for save_checkpoint, error, words in (
            (with_a_stray_clear, Refused, "moved_during_cut"),
            (full, OSError, "No space left"),
        ):
            monkeypatch.setattr(tq, "save_checkpoint", save_checkpoint)
            seen, _, _ = await attempt(store, part, GYM)
            with pytest.raises(error, match=words):
                await part.cut(seen)
        await store.close()

    run(running, main)


def test_a_save_that_outlives_its_deadline_is_still_known_to_run(
    running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(plane: TransferQueuePlane) -> None:
        await fill(plane)
        store = await open_store(tmp_path)
        part = TransferQueue(plane)
        client, loop = tq.get_client(), asyncio.get_running_loop()
        real = client.save_controller_checkpoint  # the first thing that it does in its folder
        begun, go_on = asyncio.Event(), asyncio.Event()

        def slow(path: str) -> None:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            real(path)

        monkeypatch.setattr(client, "save_controller_checkpoint", slow)
        seen, draft, operation = await attempt(store, part, GYM)
        cut = asyncio.create_task(part.cut(seen))
        await begun.wait()
        cut.cancel()  # what the engine does at the deadline
        with pytest.raises(asyncio.CancelledError):
            await cut
        (left,) = operation.threads  # the engine skips attempts until this has ended
        await plane.put("p2/call-0", ROW)  # the loop, and the plane, go on meanwhile
        await store.discard(draft)
        go_on.set()
        await asyncio.wait([left])
        assert operation.threads == set()
        assert not (store.root / draft.name).exists()  # it did not bring the folder back
        monkeypatch.undo()
        await save(store, part, GYM)
        await store.close()

    run(running, main)


def test_a_save_that_begins_too_late_does_not_bring_its_folder_back(
    running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(plane: TransferQueuePlane) -> None:
        store = await open_store(tmp_path)
        part = TransferQueue(plane)
        seen, draft, operation = await attempt(store, part, {})
        real = operation.in_thread

        async def late(function: Callable[[], Any]) -> Any:
            await store.discard(draft)
            return await real(function)

        monkeypatch.setattr(operation, "in_thread", late)
        with pytest.raises(FileNotFoundError, match="comes after its attempt ended"):
            await part.cut(seen)
        assert not (store.root / draft.name).exists()
        await store.close()

    run(running, main)


def test_what_is_not_empty_or_not_alike_is_refused_and_nothing_is_loaded(
    running: Cluster, tmp_path: Path
) -> None:
    async def main(plane: TransferQueuePlane) -> None:
        await fill(plane)
        store = await open_store(tmp_path)
        await save(store, TransferQueue(plane), GYM)
        await running.empty()

        await plane.put_rows("other", {"x": ROW}, {})
        restore, _ = await newest(store, part := TransferQueue(plane))
        with pytest.raises(Refused, match="not_empty"):
            await part.restore(restore)
        await part.rollback(restore)
        assert set(await plane.keys("other")) == {"x"}
        await plane.clear("other", ["x"])

        alike, plane.topology = plane.topology, evolve(plane.topology, units=3)
        try:
            with pytest.raises(Refused, match="units 2 saved, 3 here"):
                await part.restore(restore)
            with pytest.raises(SnapshotRejected, match="units"):
                await newest(store, part)  # the fingerprint says so before any file is read
        finally:
            plane.topology = alike
        await part.rollback(restore)
        assert len(await plane.listing()) == 0
        await store.close()

    run(running, main)


@pytest.mark.parametrize("left", ["committed", "half_born"])
def test_capture_rows_of_policy_servers_that_lived_on_make_way(
    running: Cluster, tmp_path: Path, left: str
) -> None:
    async def main(plane: TransferQueuePlane) -> None:
        await fill(plane)
        before = await plane.listing()
        store = await open_store(tmp_path)
        await save(store, TransferQueue(plane), GYM)
        await running.empty()
        if left == "half_born":
            await leave_half_born("p9/call-9", CAPTURE)
        else:
            await plane.put("p9/call-9", ROW)
        restore, _ = await newest(store, part := TransferQueue(plane))
        await part.restore(restore)
        assert await plane.listing() == before
        await store.close()

    run(running, main)


def test_rollback_empties_what_was_loaded_and_a_second_restore_is_the_same(
    running: Cluster, tmp_path: Path
) -> None:
    async def main(plane: TransferQueuePlane) -> None:
        await fill(plane)
        await leave_half_born("half", CAPTURE)
        store = await open_store(tmp_path)
        await save(store, TransferQueue(plane), GYM)
        await running.empty()
        part = TransferQueue(plane)
        said = []
        for _ in range(2):
            restore, _ = await newest(store, part)
            said.append(await part.restore(restore))
            await part.rollback(restore)
            assert len(await plane.listing()) == 0
        assert said[0] == said[1]
        await store.close()

    run(running, main)


def test_one_flipped_bit_is_refused_before_anything_is_unpickled(
    running: Cluster, tmp_path: Path
) -> None:
    async def main(plane: TransferQueuePlane) -> None:
        await fill(plane)
        store = await open_store(tmp_path)
        part = TransferQueue(plane)
        await save(store, part, GYM)
        (file,) = store.root.glob("snapshot_*/data_plane/checkpoint/controller_state.pkl")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(SnapshotRejected, match=r"controller_state\.pkl"):
            await newest(store, part)
        await store.close()

    run(running, main)


def test_after_a_load_that_failed_only_a_fresh_start_will_do(
    running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(plane: TransferQueuePlane) -> None:
        await fill(plane)
        store = await open_store(tmp_path)
        await save(store, TransferQueue(plane), GYM)
        await running.empty()
        restore, _ = await newest(store, part := TransferQueue(plane))

        def torn(folder: Path) -> None:
            raise RuntimeError("unit 1: pickle data was truncated")

        monkeypatch.setattr(tq, "load_checkpoint", torn)
        with pytest.raises(Refused, match="fresh_start_needed: loading failed part way: unit 1"):
            await part.restore(restore)
        monkeypatch.undo()
        for again in (part.restore, part.rollback):
            with pytest.raises(Refused, match="fresh_start_needed"):
                await again(restore)

        monkeypatch.setattr(tq, "load_checkpoint", lambda folder: None)
        with pytest.raises(Refused, match="keys or tags differ"):
            await TransferQueue(plane).restore(restore)
        await store.close()

    run(running, main)


POLICY_SERVER = """
import asyncio, sys
from participants.transfer_queue.sink import TransferQueueSink

async def main():
    sink = TransferQueueSink(sys.argv[1], timeout_s=20)
    await sink.put("p7_g2/call-1", {"token_ids": [1, 2], "logprobs": [-0.5, -1.0]})
    sink.close()

asyncio.run(main())
"""


def test_a_policy_server_in_another_process_writes_its_rows(running: Cluster) -> None:
    async def main(plane: TransferQueuePlane) -> None:
        address = ray.get_runtime_context().gcs_address
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", POLICY_SERVER, address],
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        row = {"token_ids": [1, 2], "logprobs": [-0.5, -1.0]}
        assert await plane.get_rows(CAPTURE, ["p7_g2/call-1"]) == {"p7_g2/call-1": row}

    run(running, main)


def test_too_few_cpus_and_a_second_start_say_what_to_do(running: Cluster) -> None:
    with pytest.raises(ValueError, match="runs in this Ray already"):
        cluster.start(2)
    running.close()
    try:
        with pytest.raises(Unavailable, match="no TransferQueue runs in the Ray at hand"):
            cluster.connect()
        with pytest.raises(ValueError, match=r"needs 21 free CPUs, Ray has .*num_cpus=23"):
            cluster.start(20)
    finally:
        running.plane = cluster.start(2, timeout_s=20)

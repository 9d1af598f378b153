"""The faults that MemoryStore has on demand: each one must really happen."""

from __future__ import annotations

import asyncio
import io

import pytest

from fsm.outcome import SnapshotRejected
from fsm.storing import Publication
from storage.memory import MemoryStore
from storage.memory_parts import MemoryDraft
from tests.folders import newest, save, sealed


async def started(old: MemoryStore | None = None) -> MemoryStore:
    store = MemoryStore(old.disk if old else None)
    await store.open()
    return store


@pytest.mark.parametrize("operation", ["begin", "write", "seal", "newest", "restored", "prune"])
def test_the_nth_operation_fails(operation: str) -> None:
    async def main() -> None:
        store = await started()

        async def everything() -> None:
            await save(store)
            await store.restored(await newest(store))
            await store.prune()

        store.faults.fail(operation, OSError(28, "no room"), on=2)  # type: ignore[arg-type]
        if operation != "write":
            await everything()
            assert not store.faults.fired
        with pytest.raises(OSError, match="no room"):
            await everything()
        assert store.faults.fired
        store.faults.clear()
        await everything()

    asyncio.run(main())


def test_any_operation_can_be_counted() -> None:
    async def main() -> None:
        failed, on = [], 0
        while True:
            on += 1
            store = await started()
            store.faults.fail("any", OSError(5, "broken"), on=on)
            try:
                await save(store)
            except OSError:
                failed.append(store.faults.calls[-1])
            if not store.faults.fired:
                break
        assert failed == ["begin", "write", "write", "seal"]

    asyncio.run(main())


def test_a_sticky_fault_goes_on() -> None:
    async def main() -> None:
        store = await started()
        store.faults.fail("begin", OSError(28, "no room"), sticky=True)
        for _ in range(3):
            with pytest.raises(OSError, match="no room"):
                await save(store)

    asyncio.run(main())


def test_a_failed_write_or_seal_poisons_the_draft() -> None:
    async def main() -> None:
        store = await started()
        draft = await sealed(store)
        store.faults.fail("seal", OSError(5, "broken"))
        other = await store.begin(await store.fence())
        for _ in range(2):
            with pytest.raises(OSError, match="broken"):
                await store.seal(other, {})
        assert (await store.publish(draft)).published

    asyncio.run(main())


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("durable", [True, False])
def test_a_publish_goes_as_it_is_told(published: bool, durable: bool) -> None:
    async def main() -> None:
        store = await started()
        draft = await sealed(store)
        store.faults.next_publish(published=published, durable=durable)
        assert await store.publish(draft) == Publication(published, published and durable)
        assert (await newest(store) is not None) == published

    asyncio.run(main())


@pytest.mark.parametrize("published", [True, False])
def test_a_held_publish_waits_to_be_told(published: bool) -> None:
    async def main() -> None:
        store = await started()
        draft = await sealed(store)
        fault = store.faults.next_publish(held=True)
        caller = asyncio.ensure_future(store.publish(draft))
        await fault.reached.wait()
        caller.cancel()  # nobody's going away decides it
        assert await newest(store) is None
        again = asyncio.ensure_future(store.publish(draft))
        fault.release(published=published)
        assert await again == Publication(published, published)
        assert (await newest(store) is not None) == published

    asyncio.run(main())


def test_an_answer_can_get_lost_after_the_rename() -> None:
    async def main() -> None:
        store = await started()
        draft = await sealed(store)
        fault = store.faults.next_publish(held=True, renamed_early=True)
        caller = asyncio.ensure_future(store.publish(draft))
        await fault.reached.wait()
        assert not caller.done()
        store.crash()
        saved = await newest(await started(store))
        assert saved is not None
        assert saved.id == draft.id
        await store.close()
        with pytest.raises(asyncio.CancelledError):
            await caller

    asyncio.run(main())


def test_a_crash_leaves_a_draft_that_the_next_start_sweeps() -> None:
    async def main() -> None:
        store = await started()
        draft = await sealed(store)
        store.crash()
        assert list(store.disk.drafts) == [draft.name]
        other = await started(store)
        assert store.disk.drafts == {}
        assert await store.publish(draft) == Publication(published=False)
        assert await newest(other) is None

    asyncio.run(main())


@pytest.mark.parametrize("path", ["manifest.json", "tq/rows.jsonl"])
def test_damage_is_refused_and_put_aside(path: str) -> None:
    async def main() -> None:
        store = await started()
        older, newer = await save(store, 1), await save(store, 2)
        store.disk.flip(newer, path)
        with pytest.raises(SnapshotRejected, match=path):
            await newest(store)
        saved = await newest(store, if_bad="older")
        assert saved is not None
        assert saved.id == older
        assert list(store.disk.quarantine) == [newer]

    asyncio.run(main())


def test_servers_of_a_test_write_by_put_and_note() -> None:
    async def main() -> None:
        store = await started()
        draft = await store.begin(await store.fence())
        assert isinstance(draft, MemoryDraft)
        entry = draft.put("gym/agent/agent0/x.json", b"{}")
        with pytest.raises(OSError, match="not entered by its writer"):
            await store.seal(draft, {})
        assert entry.size_bytes == 2
        with pytest.raises(io.UnsupportedOperation, match="needs a FolderStore"):
            _ = draft.part("tq").path

    asyncio.run(main())

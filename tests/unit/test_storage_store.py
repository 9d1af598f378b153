"""What every store promises: the same tests on folders and in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from fsm.outcome import Anchor, SnapshotRejected
from fsm.storing import Fence, FileEntry, Publication, Store
from storage.memory import MemoryDisk, MemoryStore
from storage.store import FolderStore
from tests.folders import FORMATS, TOPOLOGY, body, folders, newest, save, sealed

Start = Callable[..., Store]
Scenario = Callable[[Start], Awaitable[None]]


@pytest.fixture(params=["folder", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    """Run a scenario; each `start()` in it is a controller that starts on the same root."""
    disk, made = MemoryDisk(), []

    def start(**options: Any) -> Store:
        on_disk = request.param == "folder"
        store = (
            FolderStore(tmp_path / "root", **options) if on_disk else MemoryStore(disk, **options)
        )
        made.append(store)
        return store

    async def whole(scenario: Scenario) -> None:
        await scenario(start)
        for store in made:
            await store.close()

    return lambda scenario: asyncio.run(whole(scenario))


def published(store: Store) -> list[str]:
    if isinstance(store, FolderStore):
        return folders(store.root, "snapshot")
    assert isinstance(store, MemoryStore)
    return sorted(store.disk.snapshots)


async def opened(start: Start, **options: Any) -> Store:
    store = start(**options)
    await store.open()
    return store


def test_a_saved_snapshot_comes_back_whole(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        first, second = await save(store, 1), await save(store, 2)
        assert first < second
        await store.close()
        saved = await newest(await opened(start))
        assert saved is not None
        assert (saved.id, saved.anchor) == (second, Anchor(2, "weights"))
        assert (saved.formats, saved.facts) == (FORMATS, {"tq": {"rows": 3}})
        assert saved.fence.incarnation == 1
        part = saved.part("tq")
        assert list(part.records("rows")) == [{"row": row, "step": 2} for row in range(3)]
        assert part.document("loader") == {"place": 3}
        assert [entry.path for entry in part.files()] == ["tq/loader.json", "tq/rows.jsonl"]
        with pytest.raises(SnapshotRejected, match=r"tq/more\.json: the manifest names no such"):
            part.document("more")

    run(scenario)


def test_an_empty_root_has_nothing(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        assert await newest(await opened(start)) is None

    run(scenario)


def test_fences_rise_with_every_start(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        fences = [await store.fence(), await store.fence()]
        await store.close()
        store = await opened(start)
        fences.append(await store.fence())
        assert [(one.incarnation, one.sequence) for one in fences] == [(1, 1), (1, 2), (2, 1)]
        assert len({one.root for one in fences}) == 1
        with pytest.raises(ValueError, match="not of this incarnation"):
            await store.begin(fences[0])

    run(scenario)


def test_one_writer_per_root(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        with pytest.raises(BlockingIOError, match="in use by"):
            await start().open()
        await save(store)  # the failed start took nothing from the first one
        await store.close()
        await opened(start)

    run(scenario)


def test_a_cold_start_over_snapshots_is_never_silent(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        await save(store)
        await store.close()
        store = await opened(start)
        with pytest.raises(ValueError, match=r"restored\(None\) to start from nothing"):
            await store.begin(await store.fence())
        await store.restored(None)
        assert await newest(store) is None
        new = await save(store)
        await store.close()
        saved = await newest(await opened(start))
        assert saved is not None
        assert saved.id == new

    run(scenario)


def test_going_on_from_an_older_one_leaves_the_newer_one_behind(
    run: Callable[[Scenario], None],
) -> None:
    """F6: a record of what was restored decides, not the greatest name."""

    async def scenario(start: Start) -> None:
        store = await opened(start)
        await save(store, 1)
        older = await newest(store)
        await save(store, 2)
        await store.restored(older)
        assert older is not None
        again = await newest(store)
        assert again is not None
        assert again.id == older.id

    run(scenario)


@pytest.mark.parametrize(
    ("topology", "formats", "why"),
    [
        ({"gym": {"agents": 3}}, FORMATS, r"gym\.agents was 2, is now 3"),
        (TOPOLOGY, {"tq": 2}, "format version 1 in the snapshot; this program reads version 2"),
        (TOPOLOGY, {}, "format version 1; this program has no such participant"),
        (TOPOLOGY, {"tq": 1, "new": 4}, "not in the snapshot; .* format version 4"),
    ],
)
def test_what_does_not_fit_is_refused(
    run: Callable[[Scenario], None], topology: Any, formats: Any, why: str
) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        await save(store)
        for if_bad in ("raise", "older"):
            with pytest.raises(SnapshotRejected, match=why):
                await store.newest(topology, formats, if_bad=if_bad)
        assert await newest(store) is not None  # nothing was put aside

    run(scenario)


def test_discard_is_safe_to_repeat_and_after_publish(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        draft = await sealed(store)
        for _ in range(2):
            await store.discard(draft)
        assert await newest(store) is None
        draft = await store.begin(await store.fence())
        await store.discard(draft)
        with pytest.raises(FileNotFoundError):
            await store.seal(draft, body())
        draft = await sealed(store)
        await store.publish(draft)
        await store.discard(draft)
        assert await newest(store) is not None

    run(scenario)


def test_publishing_twice_gives_the_same_answer(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        draft = await sealed(store)
        assert await store.publish(draft) == await store.publish(draft) == Publication(True, True)

    run(scenario)


def test_a_discarded_draft_is_not_published(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        draft = await sealed(store)
        await store.discard(draft)
        assert await store.publish(draft) == Publication(published=False)
        assert await newest(store) is None

    run(scenario)


def test_an_unsealed_draft_cannot_be_published(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        draft = await store.begin(await store.fence())
        with pytest.raises(ValueError, match="not sealed"):
            await store.publish(draft)

    run(scenario)


def test_an_error_in_a_part_poisons_the_draft(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        draft = await store.begin(await store.fence())
        with pytest.raises(ZeroDivisionError):
            async with draft.part("tq"):
                _ = 1 / 0
        with pytest.raises(OSError, match=r"cannot be sealed.*ZeroDivisionError"):
            await store.seal(draft, {})

    run(scenario)


def test_a_file_that_was_promised_must_be_there(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        draft = await store.begin(await store.fence())
        entry = FileEntry("gym/agent/agent0/x.json", 1, "00")
        draft.note((entry,))
        draft.note((entry,))
        with pytest.raises(ValueError, match="two different files"):
            draft.note((FileEntry(entry.path, 2, "00"),))
        with pytest.raises(OSError, match="on disk: missing; entered: 1 bytes"):
            await store.seal(draft, {})

    run(scenario)


def test_pruning_keeps_the_newest_and_kept_anchors(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start, keep_latest=1)
        for step in (1, 1, 2, 3):
            await save(store, step)
        await store.prune(frozenset({1}))
        assert published(store) == ["snapshot_000001-000002", "snapshot_000001-000004"]

    run(scenario)


def test_a_new_start_may_prune_what_is_whole(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        store = await opened(start)
        await save(store, 1)
        await save(store, 2)
        await store.close()
        store = await opened(start, keep_latest=1)
        await store.prune()
        assert published(store) == ["snapshot_000001-000002"]

    run(scenario)


# -- a restore that changes its process ------------------------------------------------------------


async def handed_over(start: Start) -> tuple[Fence, str]:
    """The fence of a restore whose process let the root go, and the snapshot that it restores."""
    old = await opened(start)
    await save(old, 1)
    snapshot = await save(old, 2)
    await old.close()
    first = await opened(start)
    fence = await first.fence()
    await first.close()
    return fence, snapshot


def test_another_process_goes_on_in_the_same_incarnation(run: Callable[[Scenario], None]) -> None:
    """F6.6."""

    async def scenario(start: Start) -> None:
        fence, snapshot = await handed_over(start)
        second = start()
        saved = await second.take_over(fence, snapshot)
        assert saved is not None
        assert next(iter(saved.part("tq").records("rows"))) == {"row": 0, "step": 2}
        assert second.incarnation == fence.incarnation
        assert await second.fence() > fence
        await second.restored(saved)
        later = await save(second, 3)
        assert later > snapshot

    run(scenario)


def test_only_one_process_goes_on(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        fence, snapshot = await handed_over(start)
        second = start()
        saved = await second.take_over(fence, snapshot)
        with pytest.raises(BlockingIOError):
            await start().take_over(fence, snapshot)
        await second.restored(saved)
        await second.close()
        with pytest.raises(ValueError, match="finished already"):
            await start().take_over(fence, snapshot)

    run(scenario)


def test_a_controller_that_began_since_is_not_overtaken(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        fence, snapshot = await handed_over(start)
        await (await opened(start)).close()
        with pytest.raises(ValueError, match="controller 3 began after the restore of"):
            await start().take_over(fence, snapshot)
        with pytest.raises(ValueError, match="begun in root"):
            await start().take_over(evolve(fence, root="another"), snapshot)
        store = await opened(start)
        assert store.incarnation == 4, "a refusal lets the root go again"

    run(scenario)


def test_taking_over_gets_its_snapshot_or_nothing(run: Callable[[Scenario], None]) -> None:
    async def scenario(start: Start) -> None:
        fence, _ = await handed_over(start)
        store = start()
        assert await store.take_over(fence, None) is None

    run(scenario)

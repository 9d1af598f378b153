"""Publishing on a disk that fails, and in a process that is killed: whole, or absent."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsm.storing import Publication
from storage import durable, publish
from storage.reader import list_snapshots, verify_snapshot
from storage.store import FolderStore
from tests.faults.disk import FaultyDisk
from tests.folders import body, folders, gone_on, newest_id, root_with, save, sealed

OLD, NEW = "snapshot_000001-000001", "snapshot_000002-000002"
MOST_OPERATIONS = 400  # a run has about 100; more means that a loop does not end


async def one_saved(root: Path) -> None:
    await (await root_with(root, 1)).close()


@pytest.fixture(autouse=True)
def _look_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "LOOK_AGAIN_S", 0.0)


async def attempt(store: FolderStore) -> Publication | None:
    """One save as the engine does it: an error before publish discards. None: never published."""
    draft = None
    try:
        draft = await sealed(store)
    except OSError:
        return None
    return await store.publish(draft)


async def run_on(root: Path, disk: FaultyDisk) -> Publication | None:
    await one_saved(root)
    store = await gone_on(root)
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        publication = await attempt(store)
    assert publication is None or publication.published == (NEW in folders(root, "snapshot"))
    # The disk is well again: the next save of the same controller must succeed, in a new folder.
    again = await save(store)
    assert again > NEW
    await store.close()
    return publication


def check_root(root: Path, publication: Publication | None) -> None:
    """Every published folder is whole, the label is true, nothing unpublished survives a start."""
    there = [summary.id for summary in list_snapshots(root)]
    assert there[0] == OLD
    assert (NEW in there) == (publication is not None and publication.published)
    for snapshot in there:
        verify_snapshot(root / snapshot)
    assert asyncio.run(newest_id(root)) == there[-1]
    assert folders(root, "tmp") == folders(root, "trash") == []


def check_syncs(disk: FaultyDisk) -> None:
    """F1: a failed fsync is never repeated, on whatever name the folder has by then."""
    for place, (path, fine) in enumerate(disk.synced):
        assert fine or path not in [later for later, _ in disk.synced[place + 1 :]]


FAULTS = {
    "EIO once": (errno.EIO, 1, False),
    "EIO for a while": (errno.EIO, 40, False),
    "ENOSPC once": (errno.ENOSPC, 1, False),
    "EMFILE for a while": (errno.EMFILE, 40, False),
    "ESTALE once, the rename happened": (errno.ESTALE, 1, True),
    "EROFS for a while": (errno.EROFS, 40, False),
    "EINTR once": (errno.EINTR, 1, False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_file_operation_may_fail(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1: fail operation 1, 2, 3... until a run ends without reaching it."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nobody pulls the plug here: be quick
    code, lasting, lying = FAULTS[fault]
    seen: set[str] = set()
    for fail_at in range(1, MOST_OPERATIONS):
        root = tmp_path / str(fail_at)
        disk = FaultyDisk(fail_at, code, lasting, lying=lying)
        publication = asyncio.run(run_on(root, disk))
        check_root(root, publication)
        check_syncs(disk)
        seen.update(disk.failed)
        if not disk.reached:
            assert publication == Publication(published=True, durable=True)
            assert {"open", "write", "fsync", "close", "mkdir", "renameat2"} <= seen
            return
    pytest.fail(f"a save takes {MOST_OPERATIONS} file operations and more")


def test_a_failed_fsync_of_data_ends_the_draft(tmp_path: Path) -> None:
    """B17: NOT PUBLISHED; the file is not synced again, the folder not used again."""

    async def main() -> None:
        store = await root_with(tmp_path, 1)
        draft = await store.begin(await store.fence())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable.os, "fsync", _raise)
            with pytest.raises(OSError, match=r"fsync file: .*tq/rows\.jsonl"):
                async with draft.part("tq") as part:
                    part.records("rows")({"row": 1})
        for _ in range(2):
            with pytest.raises(OSError, match=r"cannot be sealed.*fsync file"):
                await store.seal(draft, {})
        await store.discard(draft)
        assert folders(tmp_path, "tmp") == []
        await store.close()

    asyncio.run(main())


def test_a_failed_seal_is_not_tried_again(tmp_path: Path) -> None:
    """F1: the second fsync would succeed, and the data may be gone."""

    async def main() -> None:
        store = await root_with(tmp_path, 1)
        draft = await store.begin(await store.fence())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable, "fsync_tree", _raise)
            with pytest.raises(OSError, match="injected"):
                await store.seal(draft, body())
        (tmp_path / draft.name / "manifest.json").unlink()
        with pytest.raises(OSError, match=r"cannot be sealed: sealing ended with .*injected"):
            await store.seal(draft, body())
        with pytest.raises(OSError, match="cannot be sealed"):
            await store.publish(draft)
        await store.close()

    asyncio.run(main())


def _raise(*_: object) -> None:
    raise OSError(errno.EIO, "injected")


def test_a_failed_fsync_of_the_parent_is_published_but_not_durable(tmp_path: Path) -> None:
    """B19: the name is there, so it is published; nothing is pruned for it (F4)."""

    async def main() -> None:
        store = await root_with(tmp_path, 2, keep_latest=1)
        draft = await sealed(store)
        parent_synced: list[Path] = []

        def failing(path: Path) -> None:
            parent_synced.append(path)
            _raise()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable, "fsync_directory", failing)
            for _ in range(2):
                assert await store.publish(draft) == Publication(published=True, durable=False)
        assert parent_synced == [tmp_path]
        await store.prune()
        there = folders(tmp_path, "snapshot")
        assert there == ["snapshot_000001-000002", draft.id]  # the newest durable one stays
        await save(store)
        await store.prune()
        assert folders(tmp_path, "snapshot") == ["snapshot_000001-000004"]
        await store.close()

    asyncio.run(main())


THINGS: dict[str, Callable[[Path], object]] = {
    "empty directory": lambda path: path.mkdir(),
    "full directory": lambda path: (path / "inside").mkdir(parents=True),
    "file": lambda path: path.write_text("mine"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "foreign manifest": lambda path: (path.mkdir(), (path / "manifest.json").write_text("{}")),
}


@pytest.mark.parametrize("thing", THINGS)
def test_a_name_that_is_taken_is_left_alone(tmp_path: Path, thing: str) -> None:
    """A16: NOT PUBLISHED; what is there is untouched."""

    async def main() -> None:
        store = await root_with(tmp_path, 1)
        draft = await sealed(store)
        taken = tmp_path / draft.id
        THINGS[thing](taken)
        before = os.lstat(taken)
        assert await store.publish(draft) == Publication(published=False)
        assert os.lstat(taken) == before
        assert folders(tmp_path, "tmp") == folders(tmp_path, "trash") == []
        await store.close()

    asyncio.run(main())


def test_a_rename_that_lands_late_is_seen(tmp_path: Path) -> None:
    """S2: a network file system reports an error, and renames between our look and our claim."""

    async def main() -> None:
        store = await root_with(tmp_path, 1)
        draft = await sealed(store)
        rename = durable.rename_noreplace
        asked: list[tuple[Path, Path]] = []

        def late(source: Path, target: Path) -> None:
            asked.append((source, target))
            if len(asked) == 1:
                raise OSError(errno.ESTALE, "injected")
            rename(*asked[0])
            rename(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable, "rename_noreplace", late)
            assert await store.publish(draft) == Publication(published=True, durable=True)
        assert [target.name[:5] for _, target in asked] == ["snaps", "trash"]
        await store.close()
        assert await newest_id(tmp_path) == draft.id

    asyncio.run(main())


def test_publish_looks_until_it_knows(tmp_path: Path) -> None:
    """S2: while the disk cannot be seen there is no answer; closing does not wait for one."""

    async def main() -> None:
        store = await root_with(tmp_path, 1)
        draft = await sealed(store)
        loop, looked = asyncio.get_running_loop(), asyncio.Event()
        looks = 0

        def blind(*_: object, **__: object) -> int:
            nonlocal looks
            looks += 1
            if looks > 3:
                loop.call_soon_threadsafe(looked.set)
            raise OSError(errno.EIO, "injected")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable, "open_below", blind)
            publishing = asyncio.ensure_future(store.publish(draft))
            await looked.wait()
            assert not publishing.done()
            await store.close()
            with pytest.raises(asyncio.CancelledError):
                await publishing
        assert await newest_id(tmp_path) is not None

    asyncio.run(main())
    assert asyncio.run(newest_id(tmp_path)) == "snapshot_000001-000002"  # the rename was done


BEFORE_RENAME = ["begun", "file_written", "sealed_file", "manifest_written", "sealed"]
AFTER_RENAME = ["renamed", "parent_synced", "claimed", "pruned_to_trash"]


@pytest.mark.parametrize("point", BEFORE_RENAME + AFTER_RENAME)
def test_killed_at_every_point(tmp_path: Path, point: str) -> None:
    """A3, A4, A10: at most one unpublished folder, no torn name; the next start goes on."""
    asyncio.run(one_saved(tmp_path))
    child = subprocess.run(
        [sys.executable, "-m", "tests.faults.publisher", str(tmp_path)],
        env=os.environ | {"QUIESCE_CRASH_AT": point},
        check=False,
        timeout=60,
    )
    assert child.returncode == -signal.SIGKILL, f"{point} was never reached"
    assert len(folders(tmp_path, "tmp")) == (point in BEFORE_RENAME)
    for summary in list_snapshots(tmp_path):
        verify_snapshot(tmp_path / summary.id)
    assert asyncio.run(newest_id(tmp_path)) == (OLD if point in BEFORE_RENAME else NEW)
    assert folders(tmp_path, "tmp") == folders(tmp_path, "trash") == []
    asyncio.run(_goes_on(tmp_path))


async def _goes_on(root: Path) -> None:
    store = await gone_on(root)
    new = await save(store)
    await store.close()
    assert await newest_id(root) == new


def test_the_publisher_ends_well_when_nobody_kills_it(tmp_path: Path) -> None:
    """The tests above would also pass with a child that fails for another reason."""
    asyncio.run(one_saved(tmp_path))
    subprocess.run([sys.executable, "-m", "tests.faults.publisher", str(tmp_path)], check=True)
    assert folders(tmp_path, "snapshot") == [NEW]


def test_two_controllers_race_for_one_folder(tmp_path: Path) -> None:
    """F6: the old one's rename and the new one's sweep want the same folder; one of them wins,
    and both know which."""

    async def main() -> None:
        old = await root_with(tmp_path, 1)
        draft = await sealed(old)
        old._root.release()  # its lock does not reach the other host
        new = FolderStore(tmp_path)
        publication, _ = await asyncio.gather(old.publish(draft), new.open())
        assert publication.published == (draft.id in folders(tmp_path, "snapshot"))
        assert folders(tmp_path, "tmp") == []
        await new.close()

    asyncio.run(main())

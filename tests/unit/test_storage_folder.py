"""FolderStore and its folders: the lock, the sweep, damage, quarantine, retention."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fsm.outcome import Anchor, SnapshotRejected
from fsm.storing import Publication
from storage import durable
from storage.reader import list_snapshots, read_manifest, verify_snapshot
from storage.store import FolderStore
from tests.folders import PART, folders, gone_on, newest, newest_id, root_with, save, sealed


async def two_saved(root: Path) -> tuple[Path, Path]:
    """The folders of an older and a newer snapshot; the store is closed."""
    store = await root_with(root, 2)
    await store.close()
    older, newer = folders(root, "snapshot")
    return root / older, root / newer


# -- opening -------------------------------------------------------------------------------------


def test_the_holder_of_the_lock_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        store = await root_with(tmp_path / "root", 0)
        with pytest.raises(BlockingIOError, match=rf"in use by pid {os.getpid()} on .* since"):
            await FolderStore(tmp_path / "root").open()
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("place", ["file/root", "missing/root", "file"])
def test_a_root_that_cannot_be_used_gives_one_clear_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"cannot use the snapshot root.*must be writable") as caught:
        asyncio.run(FolderStore(tmp_path / place).open())
    assert caught.value.filename == str(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_store_must_be_opened_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not open: call open\(\) first"):
        asyncio.run(FolderStore(tmp_path).fence())
    with pytest.raises(ValueError, match="keep_latest must be at least 1"):
        FolderStore(tmp_path, keep_latest=0)


def test_unpublished_folders_are_swept_and_unknown_ones_never(tmp_path: Path) -> None:
    root = tmp_path / "root"

    async def main() -> None:
        store = await root_with(root, 1)
        await sealed(store)
        await store.close()
        strangers = [
            "tmp_mine",
            "trash_mine",
            "snapshot_old",
            "notes",
            "tmp_000001-000001_0123abcd\n",
        ]
        for name in [*strangers, "trash_snapshot_000001-000009_0123abcd"]:
            (root / name / "inside").mkdir(parents=True)
        store = await gone_on(root)
        await store.close()
        assert all((root / name / "inside").is_dir() for name in strangers)
        assert not [name for name in folders(root, "tmp") if name not in strangers]
        assert not [name for name in folders(root, "trash") if name not in strangers]
        assert folders(root, "snapshot")[0] == "snapshot_000001-000001"

    asyncio.run(main())


def test_a_lost_lineage_never_gives_an_incarnation_twice(tmp_path: Path) -> None:
    async def main() -> None:
        store = await root_with(tmp_path, 1)
        await store.close()
        shutil.rmtree(tmp_path / "lineage")
        store = FolderStore(tmp_path)
        await store.open()
        assert store.incarnation == 2
        assert await newest(store) is None
        await store.close()

    asyncio.run(main())


def test_a_snapshot_of_another_root_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        for name in ("one", "two"):
            await (await root_with(tmp_path / name, 1)).close()
        snapshot = "snapshot_000001-000001"
        shutil.rmtree(tmp_path / "two" / snapshot)
        shutil.copytree(tmp_path / "one" / snapshot, tmp_path / "two" / snapshot)
        with pytest.raises(SnapshotRejected, match="written in root"):
            await newest_id(tmp_path / "two")

    asyncio.run(main())


# -- damage (D44, D47) ---------------------------------------------------------------------------

FILES = ["manifest.json", "tq/rows.jsonl", "tq/loader.json", f"{PART}/continuations.jsonl"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _link(path: Path) -> None:
    path.rename(path.parents[len(path.parents) - 3] / "elsewhere")
    path.symlink_to(path.parents[len(path.parents) - 3] / "elsewhere")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flip": _flip,
    "truncate": lambda path: os.truncate(path, path.stat().st_size - 1),
    "append": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "remove": lambda path: path.unlink(),
    "add": lambda path: path.with_name("more.bin").write_bytes(b""),
    "link": _link,
    "directory": _directory,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_damage_is_refused_by_name_and_the_older_one_is_taken(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"

    async def main() -> None:
        older, newer = await two_saved(root)
        DAMAGE[damage](newer / file)
        named = str(Path(file).with_name("more.bin")) if damage == "add" else file
        with pytest.raises(SnapshotRejected) as caught:
            verify_snapshot(newer)
        assert caught.value.what.endswith(named)
        with pytest.raises(SnapshotRejected, match=newer.name):
            await newest_id(root)
        assert newer.is_dir()
        store = FolderStore(root)
        await store.open()
        saved = await newest(store, if_bad="older")
        assert saved is not None
        assert saved.id == older.name
        assert folders(root, "quarantine") == [f"quarantine_{newer.name}"]
        assert f"put aside as quarantine_{newer.name}" in caplog.text
        await store.restored(saved)
        assert await save(store) == "snapshot_000003-000002"
        await store.close()

    with caplog.at_level(logging.WARNING, "quiesce.storage"):
        asyncio.run(main())


def test_if_every_snapshot_is_damaged_none_is_put_aside(tmp_path: Path) -> None:
    async def main() -> None:
        for folder in await two_saved(tmp_path):
            _flip(folder / "tq/rows.jsonl")
        store = FolderStore(tmp_path)
        await store.open()
        with pytest.raises(SnapshotRejected, match="snapshot_000001-000002"):
            await newest(store, if_bad="older")
        await store.close()
        assert len(folders(tmp_path, "snapshot")) == 2

    asyncio.run(main())


def test_trouble_of_the_process_rejects_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files says nothing about a snapshot: an error, not a rejection."""

    async def main() -> None:
        await two_saved(tmp_path)
        store = FolderStore(tmp_path)
        await store.open()

        def no_more(*_: object, **__: object) -> int:
            raise OSError(24, "Too many open files", "x")

        with monkeypatch.context() as patch:
            patch.setattr(durable, "open_below", no_more)
            with pytest.raises(OSError, match="Too many open files"):
                await newest(store, if_bad="older")
        assert await newest(store) is not None
        await store.close()

    asyncio.run(main())


def test_a_folder_under_another_name_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        _, newer = await two_saved(tmp_path)
        newer.rename(tmp_path / "snapshot_000001-000007")
        with pytest.raises(SnapshotRejected, match="it is that of 'snapshot_000001-000002'"):
            await newest_id(tmp_path)

    asyncio.run(main())


def test_with_a_key_only_signed_snapshots_are_restored(tmp_path: Path) -> None:
    async def main() -> None:
        store = await root_with(tmp_path, 1, key=b"secret")
        assert await newest(store) is not None
        await store.close()
        with pytest.raises(SnapshotRejected, match="signed, and no key is configured"):
            await newest_id(tmp_path)

    asyncio.run(main())


# -- publishing and retention --------------------------------------------------------------------


def test_an_old_controller_does_not_publish_after_a_new_one_started(tmp_path: Path) -> None:
    """Locks may not reach from host to host; the incarnation is read again before the rename."""

    async def main() -> None:
        store = await root_with(tmp_path, 1)
        draft = await sealed(store)
        (tmp_path / "lineage/incarnation_000002").touch()
        assert await store.publish(draft) == Publication(published=False)
        assert folders(tmp_path, "tmp") == []
        assert folders(tmp_path, "snapshot") == ["snapshot_000001-000001"]
        await store.close()

    asyncio.run(main())


def test_a_file_that_nobody_entered_stops_the_seal(tmp_path: Path) -> None:
    async def main() -> None:
        store = await root_with(tmp_path, 0)
        draft = await store.begin(await store.fence())
        async with draft.part("tq") as part:
            (part.path / "rows.pkl").write_bytes(b"x")
        with pytest.raises(OSError, match="not entered by its writer") as caught:
            await store.seal(draft, {})
        assert caught.value.filename == "tq/rows.pkl"
        await store.discard(draft)
        draft = await store.begin(await store.fence())
        async with draft.part("tq") as part:
            (part.path / "rows.pkl").write_bytes(b"x")
            part.adopt()
        await store.seal(
            draft, {"topology": {}, "config": {}, "anchor": None, "formats": {}, "facts": {}}
        )
        await store.close()

    asyncio.run(main())


def test_order_of_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: files, manifest, directories bottom-up, rename, parent; nothing synced twice but
    directories, which the part's writer and the sealer both own."""
    seen: list[str] = []

    def fsync(fd: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(tmp_path).as_posix())

    async def main() -> None:
        store = await root_with(tmp_path, 1)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(durable, "point", lambda name: seen.append(f"<{name}>"))
        draft = await sealed(store)
        await store.publish(draft)
        await store.close()
        tail = [
            step.replace(draft.name, "tmp") for step in seen[seen.index("<manifest_written>") :]
        ]
        assert tail == [
            "<manifest_written>",
            "tmp/gym/agent/agent0",
            "tmp/gym/agent",
            "tmp/gym",
            "tmp/tq",
            "tmp",
            "<sealed>",
            "<renamed>",
            ".",
            "<parent_synced>",
        ]
        files = sorted(step for step in seen if step.endswith((".json", ".jsonl")))
        assert files == sorted(f"{draft.name}/{file}" for file in FILES)

    asyncio.run(main())


def test_retention_goes_through_the_trash_durably(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        store = await root_with(tmp_path, 3, keep_latest=1)
        steps: list[str] = []

        def removed(path: Path) -> None:
            steps.append(f"delete {path.name[:14]}")
            shutil.rmtree(path)

        def synced(path: Path) -> None:
            steps.append(f"fsync {path.relative_to(tmp_path)}")

        monkeypatch.setattr(durable, "remove_tree", removed)
        monkeypatch.setattr(durable, "fsync_directory", synced)
        await store.prune()
        assert steps == ["fsync .", "delete trash_snapshot"] * 2
        assert folders(tmp_path, "snapshot") == ["snapshot_000001-000003"]
        await store.close()

    asyncio.run(main())


def test_kept_anchors_stay(tmp_path: Path) -> None:
    async def main() -> None:
        store = await root_with(tmp_path, 0, keep_latest=1)
        for step in (1, 1, 2, 3):
            await save(store, step)
        await store.prune(frozenset({1}))
        anchors = [summary.anchor for summary in list_snapshots(tmp_path)]
        assert anchors == [Anchor(1, "weights"), Anchor(3, "weights")]
        await store.close()

    asyncio.run(main())


def test_a_cancelled_save_leaves_the_thread_to_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2: a caller that goes away does not change what becomes of the rename."""

    async def main() -> None:
        store = await root_with(tmp_path, 1)
        draft = await sealed(store)
        loop, reached, go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        rename = durable.rename_noreplace

        async def wait() -> None:
            reached.set()
            await go.wait()

        def slow(source: Path, target: Path) -> None:
            asyncio.run_coroutine_threadsafe(wait(), loop).result()
            rename(source, target)

        monkeypatch.setattr(durable, "rename_noreplace", slow)
        publishing = asyncio.ensure_future(store.publish(draft))
        await reached.wait()
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        go.set()
        assert await store.publish(draft) == Publication(published=True, durable=True)
        assert draft.id in folders(tmp_path, "snapshot")
        await store.close()

    asyncio.run(main())


# -- for the command line ------------------------------------------------------------------------


def _times(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in root.rglob("*"))


def test_looking_needs_no_lock_and_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        store = await root_with(tmp_path, 2)
        before = _times(tmp_path)
        first, second = list_snapshots(tmp_path)
        assert (first.id, first.parent, first.problem) == ("snapshot_000001-000001", None, None)
        assert (second.id, second.parent) == ("snapshot_000001-000002", first.id)
        assert second.files == 3
        manifest = verify_snapshot(tmp_path / second.id)
        assert manifest == read_manifest(tmp_path / second.id)
        assert manifest.counts == {"files": 3, "bytes": second.size_bytes}
        assert _times(tmp_path) == before
        await store.close()

    asyncio.run(main())


def test_a_list_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "snapshot_000001-000001").mkdir()
    (summary,) = list_snapshots(tmp_path)
    assert summary.problem is not None
    assert "manifest.json" in summary.problem
    with pytest.raises(SnapshotRejected, match=r"manifest\.json"):
        read_manifest(tmp_path / "snapshot_000001-000009")

"""Snapshots for tests: one small save, the same on every store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsm.outcome import Anchor
from fsm.storing import Draft, Publication, SavedSnapshot, Store
from storage.part import PartFolder
from storage.store import FolderStore

TOPOLOGY = {"gym": {"agents": 2}}
FORMATS = {"tq": 1}
PART = "gym/agent/agent0"


def body(step: int | None = 0, **changes: Any) -> dict[str, Any]:
    anchor = None if step is None else Anchor(step, "weights")
    facts = {"tq": {"rows": 3}}
    given = {
        "topology": TOPOLOGY,
        "config": {},
        "anchor": anchor,
        "formats": FORMATS,
        "facts": facts,
    }
    return given | changes


async def sealed(store: Store, step: int | None = 0, rows: int = 3) -> Draft:
    """A draft with two files of `tq` and, in a folder store, one written by a Gym server."""
    draft = await store.begin(await store.fence())
    async with draft.part("tq") as part:
        write = part.records("rows")
        for row in range(rows):
            write({"row": row, "step": step})
        part.document("loader", {"place": rows})
    if isinstance(store, FolderStore):
        with PartFolder(store.root, draft.name, PART) as server:
            server.records("continuations")({"rollout_id": "p7_g2"})
        draft.note(server.files)
    await store.seal(draft, body(step))
    return draft


async def save(store: Store, step: int | None = 0) -> str:
    """Save one snapshot, durably; its id."""
    draft = await sealed(store, step)
    assert await store.publish(draft) == Publication(published=True, durable=True)
    return draft.id


async def newest(store: Store, *, if_bad: str = "raise") -> SavedSnapshot | None:
    return await store.newest(TOPOLOGY, FORMATS, if_bad=if_bad)


async def newest_id(root: Path) -> str | None:
    """What a new controller finds, as a fresh incarnation; every row of it is read."""
    store = FolderStore(root)
    await store.open()
    try:
        saved = await newest(store)
        if saved is not None:
            assert [row["row"] for row in saved.part("tq").records("rows")] == [0, 1, 2]
        return saved.id if saved else None
    finally:
        await store.close()


async def root_with(root: Path, count: int, **options: Any) -> FolderStore:
    """An open store on a new root in which `count` snapshots were published before."""
    store = FolderStore(root, **options)
    await store.open()
    for step in range(count):
        await save(store, step)
    return store


async def gone_on(root: Path, **options: Any) -> FolderStore:
    """The next incarnation on a root, gone on from the newest snapshot."""
    store = FolderStore(root, **options)
    await store.open()
    await store.restored(await newest(store))
    return store


def folders(root: Path, kind: str) -> list[str]:
    """Names of the root's folders that begin with `kind` ("tmp", "snapshot", "trash"...)."""
    return sorted(path.name for path in root.iterdir() if path.name.startswith(f"{kind}_"))

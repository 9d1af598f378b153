"""A pool of sandboxes as a participant: the database of each rollout is in the snapshot."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quiesce import Attempt, Participant, Restore, SavedPart, SnapshotRejected
from quiesce_sandboxes.pool import SandboxPool

INDEX, KIND = "sessions", "sandbox"


class Sandboxes(Participant):
    """Sessions are named like their rollouts. Gym calls the pool: it is told first, opened last."""

    name, format_version = "sandboxes", 1
    called_by = frozenset({"gym"})

    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool
        self._staged: dict[str, Path] | None = None

    async def prepare(self, attempt: Attempt) -> None:
        self.pool.close_door()

    async def drain(self, attempt: Attempt) -> None:
        await self.pool.empty()

    async def commit(self, attempt: Attempt) -> Mapping[str, int]:
        start_over = attempt.facts.get("gym", {}).get("restarts", {})
        sessions = [name for name in self.pool.sessions if name not in start_over]
        async with attempt.part() as part:
            part.document(INDEX, sessions)
            for name in sessions:
                await self.pool.copy(name, part.path.absolute() / f"{name}.sqlite")
            await attempt.in_thread(part.adopt)  # digested and fsynced: another process wrote them
        return {"sandboxes": len(sessions)}

    async def fence(self, restore: Restore) -> None:
        self.pool.close_door()
        await self.pool.empty()

    async def restore(self, restore: Restore) -> None:
        stage = self.pool.folder / "staged"
        self._staged = await restore.in_thread(lambda: _copied(restore.saved(), stage))

    async def reconcile(self, restore: Restore) -> None:
        for name in restore.facts.get("controller", {}).get("discard", ()):
            (self._staged or {}).pop(name, None)

    async def resume(self, attempt: Attempt | Restore) -> None:
        if isinstance(attempt, Restore) and self._staged is not None:
            await self.pool.start_from(self._staged)
            self._staged = None
        self.pool.open_door()

    async def rollback(self, restore: Restore) -> None:
        self._staged = None
        self.pool.open_door()

    @classmethod
    def inspect(cls, saved: SavedPart) -> Mapping[str, Any]:
        """Every session that the index names needs its database."""
        has = [Path(one.path).stem for one in saved.files() if one.path.endswith(".sqlite")]
        needs = {name: name for name in saved.document(INDEX)}
        return {"sandboxes": len(has), "_has": {KIND: has}, "_needs": {KIND: needs}}


def _copied(saved: SavedPart, stage: Path) -> dict[str, Path]:
    """Copies to work on: opening a database writes to it, and the snapshot must stay as it is."""
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    found = {path.stem: path for path in saved.path.glob("*.sqlite")}
    if missing := set(saved.document(INDEX)) - found.keys():
        raise SnapshotRejected("(this one)", "sandboxes", f"no database of {min(missing)}")
    return {name: shutil.copyfile(path, stage / path.name) for name, path in found.items()}

"""The demo's trainer, which can be made to stand still at a chosen place of a save or restore.

    python -m tests.faults.stopping_trainer SPEC

It stands when the file `stop` names the place that it comes to, says so in `stopped`, and goes on
when `stop` names another place, or is gone. Places: `<save or restore>.<hook>.<early or late>`
(before Gym's own hook of that step, or after it), and `disk.<point>` (storage's crash points).
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from fsm.participant import Attempt, Participant, Restore
from quiesce.demo.spec import Spec, write_whole
from quiesce.demo.trainer import log_to_stderr, main
from storage import durable

STOP, STOPPED = "stop", "stopped"
LOOK_EVERY_S = 0.02


class Stops:
    """The two files, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._stop, self._stopped = folder / STOP, folder / STOPPED

    def wanted(self, place: str) -> bool:
        try:
            return self._stop.read_text(encoding="utf-8") == place
        except FileNotFoundError:
            return False

    def reach(self, place: str) -> bool:
        """Is this the place? Then it is said."""
        here = self.wanted(place)
        if here:
            write_whole(self._stopped, place)
        return here

    async def at(self, place: str) -> None:
        if self.reach(place):
            while self.wanted(place):  # noqa: ASYNC110  another process says when it is over
                await asyncio.sleep(LOOK_EVERY_S)

    def in_thread(self, place: str) -> None:
        if self.reach(place):
            while self.wanted(place):
                time.sleep(LOOK_EVERY_S)


class Stopping(Participant):
    """Stands still in each hook. Its neighbours in the order decide when that is."""

    def __init__(self, name: str, stops: Stops) -> None:
        self.name, self._stops = name, stops

    async def _at(self, operation: Attempt | Restore, hook: str) -> None:
        kind = "save" if isinstance(operation, Attempt) else "restore"
        await self._stops.at(f"{kind}.{hook}.{self.name}")

    async def pause(self, attempt: Attempt) -> None:
        await self._at(attempt, "pause")

    async def prepare(self, attempt: Attempt) -> None:
        await self._at(attempt, "prepare")

    async def drain(self, attempt: Attempt) -> None:
        await self._at(attempt, "drain")

    async def commit(self, attempt: Attempt) -> None:
        await self._at(attempt, "commit")

    async def cut(self, attempt: Attempt) -> None:
        await self._at(attempt, "cut")

    async def resume(self, attempt: Attempt | Restore) -> None:
        await self._at(attempt, "resume")

    async def fence(self, restore: Restore) -> None:
        await self._at(restore, "fence")

    async def restore(self, restore: Restore) -> None:
        await self._at(restore, "restore")

    async def reconcile(self, restore: Restore) -> None:
        await self._at(restore, "reconcile")


class Early(Stopping):
    calls = frozenset({"gym"})


class Late(Stopping):
    called_by = frozenset({"gym"})


def run(path: Path) -> None:
    stops = Stops(Spec.load(path).places.folder)
    point: Any = durable.point

    def stop_at(name: str) -> None:
        stops.in_thread(f"disk.{name}")
        point(name)

    durable.point = stop_at
    asyncio.run(main(path, [Early("early", stops), Late("late", stops)]))


if __name__ == "__main__":
    log_to_stderr()
    run(Path(sys.argv[1]))

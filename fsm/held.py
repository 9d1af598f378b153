"""An operation that keeps its holds up in the background: a save that stays paused, a restore
that is handed over."""

from __future__ import annotations

import asyncio
import logging

from fsm.drive import Drive
from fsm.outcome import AbortReason
from fsm.save import CANCELLED

log = logging.getLogger("quiesce.engine")


class Held:
    """Goes on with `drive` from where it stands, until it is let go, left, or lost (S11, R8)."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self._task = asyncio.ensure_future(self._keep_up())

    @property
    def over(self) -> bool:
        return self._task.done()

    async def let_go(self) -> None:
        """The step ends well: after a save everyone is released, a hand-over is over."""
        self.drive.performing.let_go.set()
        await asyncio.wait({self._task})
        self._task.result()

    async def leave(self) -> None:
        """Nobody is told anything: the holds end with their leases."""
        self.drive.run.post(CANCELLED)
        await asyncio.wait({self._task})

    async def _keep_up(self) -> None:
        await self.drive.go()
        cause = self.drive.run.cause
        if cause is not None and cause.reason is AbortReason.HOLD_LOST:
            # A restore's holds end with its activation, wherever that happens.
            level = logging.WARNING if self.drive.operation.kind == "save" else logging.INFO
            log.log(level, "%s is not held any more: %s", self.drive.operation.label, cause)

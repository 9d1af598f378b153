"""What attempts that are over may leave behind, and what it means for the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from fsm.outcome import Skip, SkipReason
from fsm.release import Release

log = logging.getLogger("quiesce.engine")


class Leftovers:
    """unresolved: a rename whose outcome is not known yet (S2). A cut that outlived its deadline
    cannot be stopped (S3). A release that is not confirmed by everyone is tried again (S6)."""

    def __init__(self) -> None:
        self.unresolved: asyncio.Future[Any] | None = None
        self._running: set[asyncio.Future[Any]] = set()
        self._pending: Release | None = None

    def take(self, step: str, future: asyncio.Future[Any]) -> None:
        """Something goes on after its step is over. step: "" for a thread."""
        if step:
            log.warning("step %r outlived its deadline and is left behind", step)
        if step == "publish":
            self.unresolved = future
            future.add_done_callback(self._resolved)
        else:
            self._running.add(future)
            future.add_done_callback(self._running.discard)

    def released(self, release: Release) -> Mapping[str, frozenset[str]]:
        """An operation has let go as well as it could; returns who has not confirmed."""
        silent = release.silent()
        self._pending = release if silent else None
        return silent

    async def settle(self) -> None:
        """Raises Skip for what stands in the way of an attempt (S7)."""
        if self.unresolved is not None:
            raise Skip(SkipReason.PUBLISH_UNRESOLVED)
        if self._running:
            raise Skip(SkipReason.PREVIOUS_CUT_RUNNING)
        if self._pending is not None:
            await self._pending.one_round()
            silent = self.released(self._pending)
            if silent:
                names = sorted(name for group in silent.values() for name in group)
                raise Skip(SkipReason.RELEASE_PENDING, ", ".join(names))

    def _resolved(self, _: asyncio.Future[Any]) -> None:
        self.unresolved = None

"""The dispatch gate, and the bell that wakes whoever waits for a change of the bookkeeping."""

from __future__ import annotations

import asyncio


class Bell:
    """Take `heard()` before you look, wait for it after: no ring is lost in between."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def heard(self) -> asyncio.Event:
        return self._event

    def ring(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()


class DispatchGate:
    """Closed, or open but for some servers. Waiting holds nothing, so it may be cancelled."""

    def __init__(self) -> None:
        self._bell = Bell()
        self._closed = True
        self._unavailable: frozenset[str] = frozenset()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._bell.ring()

    def open(self, unavailable: frozenset[str] = frozenset()) -> None:
        self._closed, self._unavailable = False, unavailable
        self._bell.ring()

    def lets(self, server: str) -> bool:
        return not self._closed and server not in self._unavailable

    async def passed(self, server: str) -> None:
        """Until work may be sent to this server. True at the moment it returns: send at once."""
        while not self.lets(server):
            await self._bell.heard().wait()

    async def opened(self) -> None:
        while self._closed:
            await self._bell.heard().wait()

    async def stopped(self) -> None:
        while not self._closed:
            await self._bell.heard().wait()

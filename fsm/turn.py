"""One operation at a time (S8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Turn:
    """A lock that refuses to wait for its own owner."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._owner: asyncio.Task[Any] | None = None

    def locked(self) -> bool:
        return self._lock.locked()

    @asynccontextmanager
    async def take(self, what: str) -> AsyncIterator[None]:
        """Raises ValueError inside of another `take` of the same task."""
        task = asyncio.current_task()
        if self._owner is task:
            raise ValueError(f"{what} inside of exclusive() would wait for itself: call it after")
        async with self._lock:
            self._owner = task
            try:
                yield
            finally:
                self._owner = None

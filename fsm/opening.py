"""Whether an engine has its store."""

from __future__ import annotations

import asyncio
from typing import Any

from fsm.storing import Fence, SavedSnapshot, Store


class Opening:
    """Opens a store once, whoever asks, and closes it.

    Opening runs in a task of its own: a caller that is cancelled half way would leave a root
    that is locked by an engine which does not know that it has it (F6).
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_open = False
        self._task: asyncio.Task[Any] | None = None

    async def open(self) -> None:
        if not self.is_open:
            if self._task is None:
                self._task = asyncio.ensure_future(self._open())
            await asyncio.shield(self._task)

    async def take_over(self, fence: Fence, snapshot: str | None) -> SavedSnapshot | None:
        """Instead of `open`, after `close`: as `Store.take_over`."""

        async def take() -> SavedSnapshot | None:
            try:
                taken = await self.store.take_over(fence, snapshot)
                self.is_open = True
                return taken
            finally:
                self._task = None

        self._task = task = asyncio.ensure_future(take())
        return await asyncio.shield(task)

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task})
        if self.is_open:
            await self.store.close()
            self.is_open = False

    async def _open(self) -> None:
        try:
            await self.store.open()
            self.is_open = True
        finally:
            self._task = None

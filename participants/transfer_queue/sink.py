"""Where a policy server in another process puts its token-capture rows."""

from __future__ import annotations

import asyncio

from participants.data_plane import Row
from participants.transfer_queue.cluster import connect
from participants.transfer_queue.plane import TransferQueuePlane


class TransferQueueSink:
    """`data_plane.CaptureSink`; joins the trainer's Ray by address at the first row.

    address: host:port of the Ray in which TransferQueue runs. timeout_s: of each put.
    Raises `Unavailable` when nothing runs there, OSError or TimeoutError for a put that failed.
    """

    def __init__(self, address: str, timeout_s: float = 60.0) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._joining = asyncio.Lock()
        self._plane: TransferQueuePlane | None = None

    async def put(self, key: str, row: Row) -> None:
        """The row is there, with its commit mark, when this returns."""
        await (await self.joined()).put(key, row)

    async def joined(self) -> TransferQueuePlane:
        """The plane behind this sink, joined now if it is not yet; takes some seconds."""
        async with self._joining:
            if self._plane is None:
                self._plane = await asyncio.to_thread(
                    connect, self._address, timeout_s=self._timeout_s
                )
            return self._plane

    def close(self) -> None:
        """Let go of the plane. TransferQueue goes on."""
        if self._plane is not None:
            self._plane.close()
            self._plane = None

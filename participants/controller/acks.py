"""The ACK outbox: tells Gym which results are durable here, so that it may drop them.

The ledger holds what is owed; a result is owed from the mutation in which its training row is
put and sealed, so an ACK never goes out before. While dispatch is stopped the outbox stands
still: an unflushed ACK is saved as owed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from fsm.outcome import Refused
from participants.controller.dispatch import DispatchGate
from participants.gym.wire import Finished

_log = logging.getLogger("quiesce.acks")
BATCH = 256  # results in one message
SEND_TIMEOUT_S = 10.0

Send = Callable[[Sequence[Finished], float], Awaitable[None]]


class AckOutbox:
    """owed: what is to be acknowledged. send: to Gym. sent: enters it, in a barrier mutation."""

    def __init__(
        self,
        owed: Callable[[], tuple[Finished, ...]],
        send: Send,
        sent: Callable[[Sequence[Finished]], Awaitable[None]],
    ) -> None:
        self._owed, self._send, self._sent = owed, send, sent
        self._busy = asyncio.Lock()  # one sender at a time: results go out once, in order

    async def flush(self, limit_s: float) -> int:
        """Send what is owed, for at most `limit_s` seconds. Returns how many stay owed."""
        try:
            async with asyncio.timeout(limit_s):
                await self._all(limit_s)
        except (Refused, OSError, TimeoutError) as error:
            _log.info("%d results stay to be acknowledged: %s", len(self._owed()), error)
        return len(self._owed())

    async def flush_while_open(self, gate: DispatchGate) -> None:
        """`flush`, given up at once when dispatch stops: nothing may move on Gym then (S4)."""
        if gate.closed:
            return
        flush = asyncio.create_task(self.flush(SEND_TIMEOUT_S))
        stopped = asyncio.create_task(gate.stopped())
        try:
            await asyncio.wait({flush, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            flush.cancel()
            stopped.cancel()
            await asyncio.gather(flush, stopped, return_exceptions=True)

    async def _all(self, limit_s: float) -> None:
        async with self._busy:
            while batch := self._owed()[:BATCH]:
                await self._send(batch, limit_s)
                await self._sent(batch)

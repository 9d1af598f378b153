"""Keeping the leases while an attempt holds others, and telling when one is lost (S4, H3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fsm.operation import HoldLost, HookFailed, Operation, together
from fsm.outcome import AbortReason, Cause, Unavailable
from fsm.participant import Attempt, Participant, Restore

# `release_timeout_s` has this much beside its rounds: a longer wait would cost one of them (S6).
STOP_GRACE_S = 1.0


class Renewal:
    """Calls `renew` on everyone who confirmed a hold, every `every_s` seconds.

    A refusal means that a hold ended or something moved: `lost` is called at once. A server that
    does not answer may be slow: it is lost when its lease could have ended.
    left_behind: told of a round that did not end in time.
    """

    def __init__(
        self,
        operation: Operation,
        view: Callable[[Participant], Attempt | Restore],
        every_s: float,
        lost: Callable[[Cause], None],
    ) -> None:
        self._operation, self._view = operation, view
        self._every_s, self._lost = every_s, lost
        self.left_behind: Callable[[str, asyncio.Task[None]], None] = lambda *_: None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._loop())

    async def stop(self) -> None:
        """Ends before a release is sent, so that no renewal re-arms a lease that was let go.

        A hook that swallows its cancellation does not keep the others held: it is left behind, and
        a server refuses what it still sends for a hold that has ended (H1)."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=STOP_GRACE_S)
        finally:
            if not task.done():
                self.left_behind("renew", task)

    async def check(self) -> None:
        """One round now. Raises `HoldLost` if any hold no longer stands."""
        try:
            await together([self._renew(one) for one in self._operation.holding.values()])
        except HookFailed as failed:
            raise HoldLost(f"{failed.participant}: {failed.__cause__}") from failed

    async def _renew(self, participant: Participant) -> None:
        await self._operation.call(participant, "renew", self._view(participant))

    async def _loop(self) -> None:
        loop = asyncio.get_running_loop()
        kept_s = loop.time()
        while True:
            await asyncio.sleep(self._every_s)
            try:
                async with asyncio.timeout(self._operation.lease_s / 2):
                    await self.check()
                kept_s = loop.time()
            except (HoldLost, TimeoutError) as error:
                if not _only_slow(error) or loop.time() - kept_s >= self._operation.lease_s / 2:
                    self._lost(Cause("renew", AbortReason.HOLD_LOST, None, str(error) or "late"))
                    return


def _only_slow(error: BaseException) -> bool:
    failed = error.__cause__
    cause = failed.__cause__ if isinstance(failed, HookFailed) else error
    return isinstance(cause, (Unavailable, TimeoutError))

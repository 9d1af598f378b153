"""An event loop whose time jumps: hours of deadlines and leases pass in milliseconds.

Works with everything that only waits for timers and tasks (not with threads or sockets). The
order of tasks that are ready at the same instant is shuffled by a seed, so that a test sees more
than one schedule and a failing one can be repeated.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Everybody waits, and no timer is set: nothing can ever happen again."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only when nothing is ready, straight to the next timer."""

    def __init__(self, seed: int | None = None) -> None:
        self._now_s = 0.0
        self._shuffle = None if seed is None else random.Random(seed)
        super().__init__()

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        # `_ready` and `_scheduled` are the loop's queue and its timers (3.8 to 3.13; a test pins).
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not timers:
                raise Deadlock("every task waits and no timer is set")
            self._now_s = max(self._now_s, timers[0]._when)
        if self._shuffle is not None and len(ready) > 1:
            handles = list(ready)
            self._shuffle.shuffle(handles)
            ready.clear()
            ready.extend(handles)
        super()._run_once()  # type: ignore[misc]


def run(main: Coroutine[Any, Any, T], *, seed: int | None = None) -> T:
    """Like `asyncio.run`, on virtual time. Raises `Deadlock` when nothing can happen any more."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(main)

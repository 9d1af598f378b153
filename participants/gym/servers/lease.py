"""The lease of a hold: it ends by itself when nobody renews it (H3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    """The part of an event loop that leases need."""

    def time(self) -> float: ...
    def call_at(self, when: float, callback: Callable[..., Any]) -> Any: ...


class Lease:
    """Calls `on_end` when its time is over. clock: in place of the running event loop (tests)."""

    def __init__(self, on_end: Callable[[], None], clock: Clock | None = None) -> None:
        self._on_end, self._clock = on_end, clock
        self._end_s = 0.0
        self._timer: Any = None

    def now_s(self) -> float:
        return self._running().time()

    @property
    def over(self) -> bool:
        """Asked with every message: after a stall, messages come before timers."""
        return self.now_s() >= self._end_s

    def renew(self, lease_s: float) -> None:
        self.stop()
        self._end_s = self.now_s() + lease_s
        self._timer = self._running().call_at(self._end_s, self._on_end)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _running(self) -> Clock:
        return self._clock or asyncio.get_running_loop()

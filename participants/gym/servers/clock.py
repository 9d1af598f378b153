"""Parked time is invisible to a loop's own time-outs (H6).

People write `asyncio.timeout(60)` around a model call. A pause may last for minutes, and a rollout
must not die of it: while its run is parked, the timers that its loop set stand still.

Works where the event loop is a `ParkingLoop`, as under `serve`. Under another one a loop's
time-outs go on while it is parked; nothing else changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any

_of_run: ContextVar[RunTimers | None] = ContextVar("quiesce_run_timers", default=None)


class RunTimers:
    """The timers that one run's loop has set, in all of its tasks."""

    def __init__(self) -> None:
        self._running: set[RunTimer] = set()
        self.stopped = False

    def adopt_this_task(self) -> None:
        """Timers set by the current task, and by tasks that it starts, belong to this run."""
        _of_run.set(self)

    def stop(self) -> None:
        """Safe to repeat."""
        if not self.stopped:
            self.stopped = True
            for timer in self._running:
                timer.stop()

    def go_on(self) -> None:
        """Each timer goes on with the time that it had left. Safe to repeat."""
        if self.stopped:
            self.stopped = False
            for timer in self._running:
                timer.go_on()

    def add(self, timer: RunTimer) -> None:
        self._running.add(timer)
        if not self.stopped:
            timer.go_on()

    def remove(self, timer: RunTimer) -> None:
        self._running.discard(timer)


class RunTimer(asyncio.TimerHandle):
    """What `call_at` gives to a loop's code. A timer of the event loop rings for it, unless it
    stands still."""

    def __init__(
        self,
        timers: RunTimers,
        loop: ParkingTimers,
        when_s: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        context: Context | None,
    ) -> None:
        super().__init__(when_s, callback, args, loop, context)
        self._timers, self._parking = timers, loop
        self._left_s = when_s - loop.time()
        self._real: asyncio.TimerHandle | None = None

    def when(self) -> float:
        return self._real.when() if self._real else self._parking.time() + self._left_s

    def cancel(self) -> None:
        self._timers.remove(self)
        self.stop()
        super().cancel()

    def stop(self) -> None:
        if self._real is not None:
            self._left_s = self._real.when() - self._parking.time()
            self._real.cancel()
            self._real = None

    def go_on(self) -> None:
        self._real = self._parking.real_call_at(self._parking.time() + self._left_s, self._ring)

    def _ring(self) -> None:
        self._timers.remove(self)
        self._run()  # in its own context, errors to the loop's handler


class ParkingTimers(asyncio.BaseEventLoop):
    """For an event loop: timers set by the code of a run can be stopped."""

    def real_call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # its callbacks are typed by the one caller
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timers = _of_run.get()
        if timers is None:
            return self.real_call_at(when, callback, *args, context=context)
        timer = RunTimer(timers, self, when, callback, args, context=context)
        timers.add(timer)
        return timer


class ParkingLoop(ParkingTimers, asyncio.SelectorEventLoop):
    """The event loop of a Gym server's process."""

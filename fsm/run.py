"""One running machine and the one task that owns it.

The owner starts the step of the current state, then waits for events: the step's answer, its
deadline, a lost hold, a cancellation from outside. Each event names the epoch it belongs to; a
late answer of an earlier epoch is dropped and counted. The next step starts only after the last
one has ended, so an abort never runs beside what it undoes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from attrs import frozen

from fsm.machine import Machine
from fsm.outcome import Cause
from fsm.save import CANCELLED, LATE, OK
from fsm.table import Table
from fsm.trace import Trace

# A step that does not end when it is cancelled is left behind after this long.
CANCEL_GRACE_S = 5.0


@frozen
class Event:
    """epoch None: it concerns the attempt, whatever step it is in."""

    name: str
    cause: Cause | None = None
    epoch: int | None = None


@frozen
class Steps:
    """How a table is performed.

    of: step name → what to run. judge: an exception of a step → the event it means, and why.
    until: step name → the instant of its deadline (the loop's clock), or None.
    unstoppable: steps that are never cancelled, only left behind (S2).
    left_behind: told of every task that did not end in time.
    """

    of: Mapping[str, Callable[[], Awaitable[None]]]
    judge: Callable[[str, BaseException], tuple[str, Cause]]
    until: Callable[[str], float | None]
    left_behind: Callable[[str, asyncio.Task[None]], None]
    unstoppable: frozenset[str] = frozenset()


class Run:
    """Drives one machine from its initial to a terminal state, whatever happens outside."""

    def __init__(self, table: Table, steps: Steps, trace: Trace) -> None:
        self.machine = Machine(table)
        self.trace = trace
        self.cause: Cause | None = None
        self.cancelled = False
        self.dropped = 0
        self.entered_s = trace.clock()
        self._steps = steps
        self._epoch = 0
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()

    def post(self, name: str, cause: Cause | None = None) -> None:
        """Something happened outside the running step."""
        self._inbox.put_nowait(Event(name, cause))

    async def drive(self, until: str | None = None) -> None:
        """Run to a terminal state, or until the state `until` is entered: then nothing of it has
        been done yet, and `drive` may be called again to go on.

        A cancellation is answered by the table; the caller finds it in `cancelled` afterwards and
        re-raises it once everybody has been released."""
        while not self.machine.over and self.machine.state != until:
            await self._one_state()

    async def _one_state(self) -> None:
        step = self.machine.step
        assert step is not None, f"state {self.machine.state!r} neither ends nor does anything"
        self._epoch += 1
        self.entered_s = self.trace.clock()
        task = asyncio.ensure_future(self._perform(step))
        timer = self._arm(step)
        try:
            while not self._take(await self._next_event(), step):
                pass
        finally:
            if timer is not None:
                timer.cancel()
        await self._end(step, task)

    async def _perform(self, step: str) -> None:
        epoch = self._epoch
        try:
            await self._steps.of[step]()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            name, cause = self._steps.judge(step, error)
            self._inbox.put_nowait(Event(name, cause, epoch))
        else:
            self._inbox.put_nowait(Event(OK, None, epoch))

    def _arm(self, step: str) -> asyncio.TimerHandle | None:
        until = self._steps.until(step)
        if until is None:
            return None
        late = Event(LATE, None, self._epoch)
        return asyncio.get_running_loop().call_at(until, self._inbox.put_nowait, late)

    async def _next_event(self) -> Event:
        try:
            return await self._inbox.get()
        except asyncio.CancelledError:
            self.cancelled = True
            return Event(CANCELLED)

    def _take(self, event: Event, step: str) -> bool:
        """Fire the event's row; True when it led to another state."""
        if event.epoch not in (None, self._epoch):
            self.dropped += 1
            self.trace.add("dropped", event.name, state=self.machine.state, epoch=event.epoch)
            return False
        row = self.machine.fire(event.name)
        moved = row.target != row.source
        if moved and event.name != OK and self.cause is None:
            self.cause = event.cause or self._steps.judge(step, _error_of(event))[1]
        took_s = self.trace.clock() - self.entered_s
        why = str(event.cause) if event.cause else ""
        self.trace.add(
            "row", str(row), step=step if moved else "", event=event.name, took_s=took_s, why=why
        )
        return moved

    async def _end(self, step: str, task: asyncio.Task[None]) -> None:
        """Wait until the step's task is really over, or leave it behind and say so."""
        if task.done():
            return
        if step in self._steps.unstoppable:
            self._steps.left_behind(step, task)
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + CANCEL_GRACE_S
        task.cancel()
        while not task.done() and loop.time() < until:
            try:
                await asyncio.wait({task}, timeout=until - loop.time())
            except asyncio.CancelledError:
                self.cancelled = True
        if not task.done():
            self._steps.left_behind(step, task)


def being_cancelled() -> bool:
    """Told apart from a step that raises CancelledError by itself, which is a failure."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _error_of(event: Event) -> BaseException:
    return asyncio.CancelledError() if event.name == CANCELLED else TimeoutError()

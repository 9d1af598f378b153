"""The data-plane barrier: many mutations, or one cut (S3).

A mutation is one whole change of rows and books together (rows put + ledger sealed + ACK owed);
a cut sees all of it or nothing. It is an asyncio object of one event loop: writers in other
processes do not pass through it, they are quiet during a cut because drain waits for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from attrs import frozen

from fsm.outcome import InvariantError

Task = asyncio.Task[Any]


@frozen
class CutTimes:
    """One cut. waited_s: for running mutations; held_s: the barrier was closed to new ones,
    the waiting included; delayed: how many mutations had to wait for its end."""

    waited_s: float
    held_s: float
    delayed: int


class AsyncBarrier:
    """`data_plane.Barrier` on asyncio.

    A cut waits for running mutations, and from its call on new ones wait for it, so neither side
    starves: mutations that waited for a cut all enter before the next cut does. A mutation inside
    a mutation of the same task joins it (waiting would be a deadlock) and is not counted again.
    Raises `InvariantError` for a second cut, a cut inside a mutation, a mutation inside a cut.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutations = 0
        self._entered = 0  # running mutations, and waiting ones that a cut's end has let in
        self._kinds: dict[Task, str] = {}
        self._cutter: Task | None = None
        self._quiet: asyncio.Future[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self.last_cut: CutTimes | None = None

    @property
    def mutations(self) -> int:
        """How many mutations began since the start; those that failed count too."""
        return self._mutations

    @property
    def running(self) -> tuple[str, ...]:
        """Kinds of the mutations that run now: what a cut waits for."""
        return tuple(sorted(self._kinds.values()))

    @asynccontextmanager
    async def mutation(self, kind: str) -> AsyncIterator[None]:
        """One change, whole. kind: for people (`seal`, `claim`), shown by `running`."""
        task = _this_task()
        if task in self._kinds:
            yield
            return
        if task is self._cutter:
            raise InvariantError(f"mutation {kind!r} inside a cut would wait for itself")
        await self._enter()
        self._kinds[task] = kind
        self._mutations += 1
        try:
            yield
        finally:
            del self._kinds[task]
            self._leave()

    @asynccontextmanager
    async def cut(self) -> AsyncIterator[None]:
        """Nothing moves inside. Give it a deadline of your own: a mutation may hang."""
        task = _this_task()
        if self._cutter is not None:
            raise InvariantError("cuts do not nest: another cut waits or runs")
        if task in self._kinds:
            kind = self._kinds[task]
            raise InvariantError(f"a cut inside mutation {kind!r} would wait for itself")
        self._cutter, asked = task, self._clock()
        entered = None
        try:
            await self._until_quiet()
            entered = self._clock()
            yield
        finally:
            now = self._clock()
            waited_s = (now if entered is None else entered) - asked
            self.last_cut = CutTimes(waited_s, now - asked, self._reopen())

    async def _enter(self) -> None:
        if self._cutter is None:
            self._entered += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # let in and cancelled at once: give the place back
                self._leave()
            raise

    def _leave(self) -> None:
        self._entered -= 1
        if self._entered == 0 and self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    async def _until_quiet(self) -> None:
        if self._entered:
            self._quiet = asyncio.get_running_loop().create_future()
            try:
                await self._quiet
            finally:
                self._quiet = None

    def _reopen(self) -> int:
        """Let in all who wait, on their behalf: a cut that follows at once waits for them."""
        self._cutter = None
        turns = [turn for turn in self._waiting if not turn.done()]
        self._waiting.clear()
        self._entered += len(turns)
        for turn in turns:
            turn.set_result(None)
        return len(turns)


def _this_task() -> Task:
    task = asyncio.current_task()
    assert task is not None, "a coroutine always runs in a task"
    return task

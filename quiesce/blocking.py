"""The engine for trainers without an event loop: the same words, from one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar, overload

from attrs import frozen

from fsm.config import EngineConfig
from fsm.engine import KeptAnchors, Then, Until
from fsm.outcome import Restored, SaveOutcome
from fsm.participant import Participant
from fsm.restore_steps import IfBad, IfForeign, IfNone
from fsm.save_steps import AnchorSource
from fsm.storing import Store
from fsm.token import RestoreToken
from participants.data_plane import Barrier
from quiesce.engine import Engine

T = TypeVar("T")
# Python looks at signals between waits: one that comes just before a wait is seen after it.
SIGNALS_EVERY_S = 1.0


@frozen
class _Running:
    """The timer, in a task of its own. leave: it is to end."""

    task: asyncio.Task[None]
    leave: asyncio.Event


class BlockingEngine:
    """`Engine` in a thread of its own, which owns it: hooks of participants, `anchor` and
    `kept_anchors` are called there. Meant for one trainer thread.

    What `cut` reads of the trainer, the trainer changes inside `hold_off` or `exclusive` only;
    other hooks run beside those too, and need a lock for what they share with the trainer.
    An error of the background (a bug, too many failures) is raised in the trainer's thread by the
    next word, by `check` and on leaving `running`: alone, or as an ExceptionGroup of several.
    Call `close` at the end: the thread ends with it.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        participants: Iterable[Participant],
        *,
        barrier: Barrier | None = None,
        anchor: AnchorSource | None = None,
        kept_anchors: KeptAnchors | None = None,
    ) -> None:
        self._engine = Engine(
            config, store, participants, barrier=barrier, anchor=anchor, kept_anchors=kept_anchors
        )
        self._running: _Running | None = None
        self._exclusive = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        # A daemon: a trainer that dies without `close` must not hang; leases end its holds.
        self._thread = threading.Thread(target=self._own, name="quiesce", daemon=True)
        self._thread.start()

    # -- the same words ------------------------------------------------------------------------

    def save(self, then: Then = "resume") -> SaveOutcome:
        """As `Engine.save`."""
        self.check()
        return self._call(self._engine.save(then))

    def let_go(self) -> Mapping[str, frozenset[str]]:
        """As `Engine.let_go`."""
        return self._call(self._engine.let_go())

    @overload
    def restore(
        self,
        *,
        if_none: IfNone = ...,
        if_bad: IfBad = ...,
        if_foreign: IfForeign = ...,
        until: Until,
    ) -> RestoreToken: ...
    @overload
    def restore(
        self,
        token: RestoreToken | None = None,
        *,
        if_none: IfNone = ...,
        if_bad: IfBad = ...,
        if_foreign: IfForeign = ...,
        until: None = ...,
    ) -> Restored: ...
    def restore(
        self,
        token: RestoreToken | None = None,
        *,
        if_none: IfNone = "raise",
        if_bad: IfBad = "raise",
        if_foreign: IfForeign = "refuse",
        until: Until | None = None,
    ) -> Restored | RestoreToken:
        """As `Engine.restore`."""
        self._outside("restore")
        # Which of its overloads this is, it says itself.
        restore: Callable[..., Coroutine[Any, Any, Restored | RestoreToken]] = self._engine.restore
        return self._call(
            restore(token, if_none=if_none, if_bad=if_bad, if_foreign=if_foreign, until=until)
        )

    def status(self) -> dict[str, object]:
        """As `Engine.status`."""
        return self._call(_soon(self._engine.status))

    @contextmanager
    def hold_off(self, why: str) -> Iterator[None]:
        """As `Engine.hold_off`; waits until a cut under way is over, at most `cut_timeout_s`."""
        self.check()
        holding = self._engine.hold_off(why)
        self._call(_soon(holding.__enter__))
        try:
            self._call(self._engine.cut_over())
            yield
        finally:
            self._call(_soon(holding.__exit__, None, None, None))

    @contextmanager
    def exclusive(self, what: str) -> Iterator[list[SaveOutcome]]:
        """As `Engine.exclusive`."""
        self.check()
        self._outside("exclusive")
        with self._entered(self._engine.exclusive(what)) as outcomes:
            self._exclusive = True
            try:
                yield outcomes
            finally:
                self._exclusive = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """As `Engine.running`; the body cannot be cancelled from outside, so call `check` in it."""
        self._running = self._call(self._start())
        try:
            yield
        finally:
            running, self._running = self._running, None
            self._call(_soon(running.leave.set))
            self._call(asyncio.wait({running.task}))
            _raise_from(running.task)

    def check(self) -> None:
        """Raise what went wrong in the background since `running` was entered."""
        if self._running is not None and self._running.task.done():
            _raise_from(self._running.task)

    def close(self) -> None:
        """As `Engine.close`; then the thread ends. Safe to repeat."""
        if self._loop.is_closed():
            return
        self._outside("close")
        try:
            self._call(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # -- the owner's thread --------------------------------------------------------------------

    def _own(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the owner's thread. A KeyboardInterrupt here cancels it there."""
        if self._loop.is_closed():
            coroutine.close()
            raise ValueError("this engine is closed: make another one")
        future = asyncio.run_coroutine_threadsafe(self._counted(coroutine), self._loop)
        try:
            while not wait({future}, timeout=SIGNALS_EVERY_S).done:
                pass
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _counted(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None, "a coroutine always runs in a task"
        self._calls.add(task)
        try:
            return await coroutine
        finally:
            self._calls.discard(task)

    async def _end(self) -> None:
        """The trainer waits for nothing else now: a call that goes on was interrupted (Ctrl-C),
        at an instant at which `_call` could not cancel it."""
        interrupted = [task for task in self._calls if task is not asyncio.current_task()]
        for task in interrupted:
            task.cancel()
        if interrupted:
            await asyncio.wait(interrupted)
        await self._engine.close()

    async def _start(self) -> _Running:
        loop = asyncio.get_running_loop()
        entered, leave = loop.create_future(), asyncio.Event()

        async def run() -> None:
            async with self._engine.running():
                entered.set_result(None)
                await leave.wait()

        task = loop.create_task(run())
        await asyncio.wait({task, entered}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            _raise_from(task)
        return _Running(task, leave)

    @contextmanager
    def _entered(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        value = self._call(manager.__aenter__())
        try:
            yield value
        except BaseException as error:
            leaving = manager.__aexit__(type(error), error, error.__traceback__)
            if not self._call(leaving):
                raise
        else:
            self._call(manager.__aexit__(None, None, None))

    def _outside(self, what: str) -> None:
        if self._exclusive:
            raise ValueError(f"{what} inside of exclusive() would wait for itself: call it after")


async def _soon(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def _raise_from(task: asyncio.Task[None]) -> None:
    """Its error: alone where the group holds one."""
    error = None if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if error is not None:
        raise error

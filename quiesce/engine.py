"""The engine as a trainer embeds it: the timer, the failure limit, and what people can see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from fsm.config import EngineConfig
from fsm.engine import KeptAnchors, SnapshotEngine, Then, Until
from fsm.outcome import Restored, SaveOutcome
from fsm.participant import Participant
from fsm.restore_steps import Choices
from fsm.save_steps import AnchorSource
from fsm.storing import Store
from fsm.token import RestoreToken
from participants.data_plane import Barrier
from quiesce.failures import Failures
from quiesce.watch import Watch


class Engine(SnapshotEngine):
    """Saves and restores what its participants hold; one owner, one event loop.

    config: deadlines and choices. store: where snapshots go (`FolderStore`). participants: who
    takes part. barrier: the data plane's, held during the cut. anchor: the trainer checkpoint that
    a snapshot taken now would belong to, or None while there is none. kept_anchors: the steps of
    the checkpoints that the trainer still keeps: the newest snapshot of each is kept too.
    Raises ValueError at construction for parts that do not fit together.
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
        _check(config, store, barrier, {"anchor": anchor, "kept_anchors": kept_anchors})
        cut = None if barrier is None else barrier.cut
        super().__init__(
            config, store, participants, barrier=cut, anchor=anchor, kept_anchors=kept_anchors
        )
        self._watch = Watch(self)
        self._failures = Failures(config.max_consecutive_failures)
        self._timer_runs = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Attempts every `snapshot_attempt_interval_s`, counted from the end of the last one.

        A bug, or too many failures in a row, raises here, in the trainer, as a `TaskGroup` does:
        the body is cancelled, and an ExceptionGroup comes out. On leaving, an attempt under way is
        cancelled: it aborts and everyone is released. Raises ValueError while it runs already.
        """
        if self._timer_runs:
            raise ValueError("this engine is running already: enter running() once")
        await self.open()
        self._timer_runs = True
        try:
            async with asyncio.TaskGroup() as group:
                timer = group.create_task(self._attempts())
                try:
                    yield
                finally:
                    timer.cancel()
        finally:
            self._timer_runs = False

    def status(self) -> dict[str, object]:
        """What is going on, since when, waiting for whom, until when, and what happens then."""
        return self._watch.status()

    async def _attempt(self, then: Then = "resume") -> SaveOutcome:
        async with self._watch.watching():
            outcome = await super()._attempt(then)
        self._failures.note(outcome)
        self._watch.ended(outcome)
        return outcome

    async def _restore(self, choices: Choices, until: Until | None) -> Restored | RestoreToken:
        async with self._watch.watching():
            restored = await super()._restore(choices, until)
        self._watch.ended(restored)
        return restored

    async def _go_on(self, token: RestoreToken) -> Restored:
        async with self._watch.watching():
            restored = await super()._go_on(token)
        self._watch.ended(restored)
        return restored

    async def _attempts(self) -> None:
        interval_s = self.config.snapshot_attempt_interval_s
        if interval_s is None:
            return
        while True:
            await asyncio.sleep(interval_s)
            await self.save()
            self._failures.check()


def _check(config: object, store: object, barrier: object, sources: Mapping[str, object]) -> None:
    """Wrong parts are refused at once, with what to do (they would fail in the first save)."""
    if not isinstance(config, EngineConfig):
        raise ValueError(f"config is a {type(config).__name__}: use Config.from_mapping(...)")
    if isinstance(store, str | os.PathLike):
        raise ValueError(f"store is a path: use FolderStore({os.fspath(store)!r})")
    if missing := [name for name in _STORE if not hasattr(store, name)]:
        raise ValueError(f"{type(store).__name__} is no store: it has no {', '.join(missing)}")
    if barrier is not None and not callable(getattr(barrier, "cut", None)):
        raise ValueError(f"barrier is a {type(barrier).__name__} without cut(): use AsyncBarrier()")
    for name, source in sources.items():
        if source is not None and not callable(source):
            raise ValueError(f"{name} must be a function: it is asked anew for each snapshot")


_STORE = tuple(name for name in vars(Store) if not name.startswith("_"))

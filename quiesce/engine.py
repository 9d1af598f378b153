"""The engine as a trainer embeds it: the timer, the failure limit, and what people can see."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from fsm.config import EngineConfig
from fsm.engine import SnapshotEngine
from fsm.outcome import Aborted, AbortReason, QuiesceError, Restored, Saved, SaveOutcome, Skipped
from fsm.participant import Participant
from fsm.restore_steps import IfBad, IfNone
from fsm.save_steps import AnchorSource
from fsm.storing import Store
from participants.data_plane import Barrier
from quiesce.watch import Watch

log = logging.getLogger("quiesce")

# Our own disk: the trainer must hear of it. A Gym server that is away is only warned about (S9).
OURS = frozenset({AbortReason.IO_ERROR, AbortReason.NOT_PUBLISHED, AbortReason.TIMEOUT})


class TooManyFailures(QuiesceError):
    """Attempts failed `max_consecutive_failures` times in a row for our own I/O (S9)."""


class Engine(SnapshotEngine):
    """Saves and restores what its participants hold; one owner, one event loop.

    config: deadlines and choices. store: where snapshots go (`FolderStore`). participants: who
    takes part. barrier: the data plane's, held during the cut. anchor: the trainer checkpoint that
    a snapshot taken now would belong to, or None while there is none.
    Raises ValueError at construction for participants that do not fit together.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        participants: Iterable[Participant],
        *,
        barrier: Barrier | None = None,
        anchor: AnchorSource | None = None,
    ) -> None:
        cut = None if barrier is None else barrier.cut
        super().__init__(config, store, participants, barrier=cut, anchor=anchor)
        self._watch = Watch(self)
        self._failures = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Attempts every `snapshot_attempt_interval_s`, counted from the end of the last one.

        A bug, or too many failures in a row, raises here, in the trainer, as a `TaskGroup` does.
        On leaving, an attempt under way is cancelled: it aborts and everyone is released.
        """
        await self.open()
        async with asyncio.TaskGroup() as group:
            timer = group.create_task(self._attempts())
            try:
                yield
            finally:
                timer.cancel()

    async def _attempt(self) -> SaveOutcome:
        async with self._watch.watching():
            outcome = await super()._attempt()
        self._watch.ended(outcome)
        return outcome

    async def restore(self, *, if_none: IfNone = "raise", if_bad: IfBad = "raise") -> Restored:
        async with self._watch.watching():
            restored = await super().restore(if_none=if_none, if_bad=if_bad)
        self._watch.ended(restored)
        return restored

    def status(self) -> dict[str, object]:
        """What is going on, since when, waiting for whom, until when, and what happens then."""
        return self._watch.status()

    async def _attempts(self) -> None:
        interval_s = self.config.snapshot_attempt_interval_s
        if interval_s is None:
            return
        while True:
            await asyncio.sleep(interval_s)
            self._count(await self.save())

    def _count(self, outcome: SaveOutcome) -> None:
        if isinstance(outcome, Saved):
            self._failures = 0
        if not isinstance(outcome, Aborted) or isinstance(outcome, Skipped):
            return
        self._failures += 1
        limit = self.config.max_consecutive_failures
        if self._failures < limit:
            return
        if outcome.reason in OURS:
            raise TooManyFailures(f"{self._failures} attempts failed in a row: {outcome.cause}")
        log.warning("%d attempts failed in a row: %s", self._failures, outcome.cause)

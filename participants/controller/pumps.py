"""The rollout pump: draws prompts, sends rollouts, takes results in, starts over what failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from attrs import frozen

from fsm.outcome import Refused, Unavailable
from participants.controller.controller import ROWS_MISSING, RlController
from participants.gym import wire

_log = logging.getLogger("quiesce.pump")

# A run that ends with one of these can never finish: its history is thrown away.
LOST = frozenset(
    {
        wire.NO_CONTINUATION,
        wire.STALE_ATTEMPT,
        wire.REPLAY_MISMATCH,
        wire.LINEAGE_LOST,
        wire.REVISION_MISMATCH,
        wire.UNCERTAIN,
        ROWS_MISSING,
    }
)
# Says nothing about the run: ask again.
AGAIN = frozenset({wire.BUSY, wire.IO_ERROR, wire.PARKED})
LOOP_FAILED = "loop_failed"
BAD_RESULT = "bad_result"
# A tool that is broken for a second fails every loop at once, as often as they are tried: each
# next try waits longer, or that second would use up all start-overs of every rollout.
OF_THE_LOOP = frozenset({LOOP_FAILED, BAD_RESULT})
NO_ANSWER = "no_answer"
MAX_RETRY_DELAY_S = 30.0


@frozen
class _Failed:
    """Why a run has no result. final: asking again cannot help."""

    reason: str
    final: bool = True


class RolloutPump:
    """Keeps up to `concurrency` rollouts in flight, and at most `max_open_groups` groups that
    are not trained yet (so that generation cannot run away from training).

    A server that is away is asked again `send_attempts` times, `retry_delay_s` apart and
    doubling; then the rollout starts over. So does one whose loop fails, after a pause that doubles
    with each start-over. A repeat of a running run joins it, so asking again is
    safe. Cancel `run` to stop; restore only after that.
    """

    def __init__(
        self,
        rl: RlController,
        *,
        concurrency: int,
        max_open_groups: int,
        send_attempts: int = 8,
        retry_delay_s: float = 0.25,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if min(concurrency, max_open_groups, send_attempts) < 1:
            raise ValueError("concurrency, max_open_groups and send_attempts must be at least 1")
        self.rl, self.concurrency, self.max_open_groups = rl, concurrency, max_open_groups
        self._attempts, self._delay_s, self._sleep = send_attempts, retry_delay_s, sleep
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until the loader is exhausted and no rollout is unfinished. A bug in a rollout's task
        is raised as an ExceptionGroup; the other tasks are cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tending = tasks.create_task(self._tend())
            while True:
                heard = self.rl.bell.heard()
                await self._fill(tasks)
                if self._done():
                    break
                await heard.wait()
            tending.cancel()
        await self.rl.tend()

    def _done(self) -> bool:
        waiting = next(self.rl.ledger.unsent(), None)
        return not self._running and waiting is None and self.rl.loader.exhausted

    async def _fill(self, tasks: asyncio.TaskGroup) -> None:
        """Unsent runs first, those that Gym waits for at their head; then new prompts."""
        self._start(tasks, self.rl.ledger.unsent())
        while len(self._running) < self.concurrency and self._may_draw():
            group = await self.rl.draw()
            if group is not None:
                self._start(tasks, [one.rollout_id for one in self.rl.ledger.group(group)])

    def _start(self, tasks: asyncio.TaskGroup, waiting: Iterable[str]) -> None:
        for rollout_id in waiting:
            if len(self._running) >= self.concurrency:
                return
            if rollout_id not in self._running:
                self._running[rollout_id] = tasks.create_task(self._one(rollout_id))

    def _may_draw(self) -> bool:
        if self.rl.gate.closed or self.rl.loader.exhausted:
            return False
        return self.rl.open_groups < self.max_open_groups

    async def _tend(self) -> None:
        """ACKs and rows that are owed; what fails is tried again, not in a hot circle."""
        while True:
            heard = self.rl.bell.heard()
            await self.rl.tend()
            if self.rl.owes and not self.rl.gate.closed:
                await self._sleep(self._delay_s)
            else:
                await heard.wait()

    async def _one(self, rollout_id: str) -> None:
        """One run, from the gate to its end in the ledger."""
        try:
            request = await self.rl.send(rollout_id)
            if request is not None:
                await self._see_through(request)
        finally:
            del self._running[rollout_id]
            self.rl.bell.ring()

    async def _see_through(self, request: wire.RunRequest) -> None:
        """Until the run is sealed, closed, or has started over."""
        reason = NO_ANSWER
        for attempt in range(self._attempts):
            again = await self._ask(request)
            if again is None:
                return
            if again.final:
                reason = again.reason
                break
            _log.info("%s is asked again: %s", request.rollout_id, again.reason)
            await self._sleep(self._delay(attempt))
        _log.info("%s starts over: %s", request.rollout_id, reason)
        if reason in OF_THE_LOOP and (one := self.rl.in_flight(request)) is not None:
            await self._sleep(self._delay(one.start_overs))
        await self._start_over(request, reason)

    async def _start_over(self, request: wire.RunRequest, reason: str) -> None:
        """Raises the last OSError or TimeoutError of a data plane that stays away."""
        for attempt in range(self._attempts):
            try:
                return await self.rl.start_over(request, reason)
            except (OSError, TimeoutError):
                if attempt + 1 == self._attempts:
                    raise
            await self._sleep(self._delay(attempt))
        return None

    def _delay(self, attempt: int) -> float:
        return float(min(self._delay_s * 2**attempt, MAX_RETRY_DELAY_S))

    async def _ask(self, request: wire.RunRequest) -> _Failed | None:
        """Send the run, wait for its result and take it in. None: nothing more is to be done."""
        one = self.rl.in_flight(request)
        if one is None:
            return None
        await self.rl.gate.passed(one.server)
        try:
            reply = await self.rl.gym.run_rollout(one.server, request)
            if reply.error is not None:
                _log.warning("%s: its loop failed: %s", request.rollout_id, reply.error)
                return _Failed(LOOP_FAILED)
            await self.rl.finish(request, reply)
        except Unavailable as error:
            return _Failed(error.detail, final=False)
        except Refused as refusal:
            if refusal.code not in LOST | AGAIN:
                raise
            return _Failed(refusal.code, final=refusal.code in LOST)
        except (OSError, TimeoutError) as error:  # of the data plane: Gym keeps the result
            return _Failed(repr(error), final=False)
        except ValueError as error:  # never a row with a made-up reward
            _log.warning("%s: %s", request.rollout_id, error)
            return _Failed(BAD_RESULT)
        return None

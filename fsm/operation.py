"""What the steps of one save or restore share: who was told, what they said, who is awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fsm.outcome import (
    AbortReason,
    Cause,
    InvariantError,
    Refused,
    SnapshotRejected,
    Unavailable,
)
from fsm.participant import Attempt, Participant, Restore, hook_of, ranks
from fsm.run import being_cancelled
from fsm.save import CLAIMED, FAILED, HOLD_LOST, LATE
from fsm.storing import Fence
from fsm.trace import Trace

T = TypeVar("T")
Call = Callable[[Participant], Coroutine[Any, Any, Any]]
NAMES_SHOWN = 100
HOLDING_HOOKS = frozenset({"prepare", "fence"})


class HoldLost(Exception):
    """A hold ended, or something moved under it (S4)."""


class NotPublished(Exception):
    """The claim was won: the name will never appear (S2)."""


class TrainerMoved(Exception):
    """The trainer's checkpoint changed between the start of the attempt and its cut."""


class HookFailed(Exception):
    """A participant's hook raised; `__cause__` is what it raised."""

    def __init__(self, participant: str, hook: str, error: BaseException) -> None:
        super().__init__(f"{participant}.{hook}: {error!r}")
        self.participant, self.hook = participant, hook
        self.__cause__ = error


_MEANING: tuple[tuple[type[BaseException], str, AbortReason], ...] = (
    (HoldLost, HOLD_LOST, AbortReason.HOLD_LOST),
    (NotPublished, CLAIMED, AbortReason.NOT_PUBLISHED),
    (TrainerMoved, FAILED, AbortReason.TRAINER_MOVED),
    (Unavailable, FAILED, AbortReason.UNAVAILABLE),
    (Refused, FAILED, AbortReason.REFUSED),
    (SnapshotRejected, FAILED, AbortReason.REFUSED),
    (TimeoutError, FAILED, AbortReason.TIMEOUT),
    (asyncio.CancelledError, FAILED, AbortReason.CANCELLED),
    (OSError, FAILED, AbortReason.IO_ERROR),
)


def judge(step: str, error: BaseException) -> tuple[str, Cause]:
    """Which event an exception of a step means, and why it ended. What nobody raises on purpose
    is a bug (S9)."""
    participant = None
    if isinstance(error, HookFailed) and error.__cause__ is not None:
        participant, error = error.participant, error.__cause__
    code = error.code if isinstance(error, Refused) else ""
    # S2: an error of publish says nothing about the rename; its outcome is unknown.
    failed = LATE if step == "publish" else FAILED
    for kind, event, reason in _MEANING:
        if isinstance(error, kind):
            cause = Cause(step, reason, participant, str(error) or kind.__name__, code)
            return (failed if event == FAILED else event), cause
    return failed, Cause(step, AbortReason.BUG, participant, repr(error), code)


class Operation:
    """One save or restore under way. Participants see it through `Attempt` and `Restore`.

    told: participants in the order in which they were told; entered *before* the call (S6).
    holding: those that confirmed a hold, so that there is a lease to renew.
    waiting: what the running step waits for, participant → names (shown by status).
    kind: `save` or `restore`; label: which one, for people.
    """

    def __init__(self, label: str, participants: Iterable[Participant], trace: Trace) -> None:
        self.kind = self.label = label
        self.trace = trace
        self.ranks = ranks(participants)
        self.fence = Fence("", 0, 0)
        self.lease_s = 0.0
        self.until_s: float | None = None
        self.facts: dict[str, dict[str, Any]] = {}
        self.unreleased: dict[str, frozenset[str]] = {}
        self.told: dict[str, Participant] = {}
        self.holding: dict[str, Participant] = {}
        self.waiting: dict[str, tuple[str, ...]] = {}
        self.bug: BaseException | None = None
        self.rejected: SnapshotRejected | None = None
        self.threads: set[asyncio.Future[Any]] = set()

    # -- what participants see -----------------------------------------------------------------

    def remaining_s(self) -> float:
        if self.until_s is None:
            return self.lease_s
        return max(0.0, self.until_s - self.trace.clock())  # also in a thread

    def waiting_for(self, participant: str, names: Iterable[str]) -> None:
        if participant in self.waiting:  # a renewal may come when no step waits for it
            self.waiting[participant] = tuple(names)[:NAMES_SHOWN]

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run in a daemon thread: one that never ends must not keep the process from exiting."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:  # noqa: BLE001  handed to the awaiting task
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=work, name=f"quiesce {self.label}", daemon=True).start()
        self.threads.add(future)
        future.add_done_callback(self._thread_ended)
        return await asyncio.shield(future)

    def _thread_ended(self, future: asyncio.Future[Any]) -> None:
        self.threads.discard(future)
        if not future.cancelled():
            future.exception()  # seen: nobody may be waiting for it any more

    # -- calling participants ------------------------------------------------------------------

    async def call(
        self, participant: Participant, name: str, seen: Attempt | Restore, *, tell: bool = False
    ) -> Any:
        """One hook, traced. Whatever it raises comes out as `HookFailed`."""
        hook = hook_of(participant, name)
        if hook is None:
            return None
        if tell:
            self.told.setdefault(participant.name, participant)
        waited_for = name != "renew"  # it runs beside the hook that the step waits for
        if waited_for:
            self.waiting[participant.name] = ()
        begun_s = self.trace.clock()
        outcome = "ok"
        try:
            answer = await hook(seen)
            if name in HOLDING_HOOKS:
                self.holding[participant.name] = participant
            return answer
        except BaseException as error:
            # A hook that raises CancelledError by itself has failed; a task group would take it
            # for an answer, and publish without that part.
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                outcome = "cancelled"
                raise
            outcome = repr(error)
            self.note_bug(name, error)
            raise HookFailed(participant.name, name, error) from error
        finally:
            if waited_for:
                self.waiting.pop(participant.name, None)
            took_s = self.trace.clock() - begun_s
            self.trace.add("call", f"{participant.name}.{name}", outcome=outcome, took_s=took_s)

    def note_bug(self, step: str, error: BaseException) -> None:
        """Keep the first one: it is raised once everybody has been released (S9)."""
        if judge(step, error)[1].reason is AbortReason.BUG and self.bug is None:
            self.bug = error

    async def callers_first(self, call: Call) -> None:
        """Stop order (S5): rank by rank, concurrently within one."""
        for rank in self.ranks:
            await together([call(participant) for participant in rank])

    async def callees_first(self, call: Call) -> None:
        """Open order (S5)."""
        for rank in reversed(self.ranks):
            await together([call(participant) for participant in rank])

    def add_facts(self, participant: str, facts: Mapping[str, Any] | None) -> None:
        if facts is None:
            return
        if not isinstance(facts, Mapping):
            self.bug = InvariantError(
                f"{participant} returned {type(facts).__name__} instead of facts (a mapping)"
            )
            raise self.bug
        self.facts.setdefault(participant, {}).update(facts)

    def public_facts(self) -> dict[str, dict[str, Any]]:
        """Facts for the manifest: keys that start with `_` serve this operation only."""
        return {
            name: {key: value for key, value in facts.items() if not key.startswith("_")}
            for name, facts in self.facts.items()
        }


async def together(calls: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all at once; on the first failure cancel the rest, wait for them, raise the failure."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__

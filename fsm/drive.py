"""Performing one operation on its table: budgets, judgement, what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from attrs import evolve, frozen

from fsm.operation import HookFailed, Operation, judge
from fsm.outcome import AbortReason, Cause, SnapshotRejected
from fsm.renewal import Renewal
from fsm.run import Run, Steps
from fsm.table import PARKED, PARKING, Table

UNSTOPPABLE = frozenset({"publish"})


class Performing(Protocol):
    """The steps of one operation: `Saving` or `Restoring`."""

    operation: Operation
    renewal: Renewal
    post: Callable[[str, Cause | None], None]
    let_go: asyncio.Event

    def steps(self) -> Mapping[str, Callable[[], Awaitable[None]]]: ...


@frozen
class Activity:
    """What the engine is doing right now. Times are seconds; waiting: participant → names.

    then: the state that follows at the deadline; the same state where nothing does.
    """

    operation: str
    label: str
    state: str
    step: str | None
    since_s: float
    left_s: float | None
    waiting: Mapping[str, tuple[str, ...]]
    then: str


class Drive:
    """One operation on one table.

    budgets: step → the budget it shares with others; seconds: how long each budget is.
    left_behind: told of what outlived its deadline, with its step ("" for a thread).
    """

    def __init__(
        self,
        table: Table,
        performing: Performing,
        budgets: Mapping[str, str],
        seconds: Callable[[str], float],
        left_behind: Callable[[str, asyncio.Future[Any]], None],
    ) -> None:
        self.performing, self.operation = performing, performing.operation
        self._budgets, self._seconds, self._left_behind = budgets, seconds, left_behind
        self._until_s: dict[str, float] = {}
        steps = Steps(performing.steps(), self._judge, self._deadline, left_behind, UNSTOPPABLE)
        self.run = Run(table, steps, self.operation.trace)
        performing.post = self.run.post
        performing.renewal.left_behind = left_behind

    async def go(self, until: str | None = None) -> None:
        """To the end of the table, or until a state is entered; `go` again goes on from there."""
        try:
            await self.run.drive(until)
        finally:
            if self.run.machine.state != until:
                await self._end()

    def activity(self) -> Activity:
        machine, operation = self.run.machine, self.operation
        now = self.run.trace.clock()
        left = None if operation.until_s is None else max(0.0, operation.until_s - now)
        return Activity(
            operation.kind,
            operation.label,
            machine.state,
            machine.step,
            now - self.run.entered_s,
            left,
            dict(operation.waiting),
            machine.table.next(machine.state, "late") or machine.state,
        )

    def left_s(self, budget: str) -> float:
        """Seconds that are left of a budget; all of them if none of its steps has begun."""
        until_s = self._until_s.get(budget)
        if until_s is None:
            return self._seconds(budget)
        return max(0.0, until_s - asyncio.get_running_loop().time())

    def pause_s(self) -> float:
        """Seconds in which rollouts did not run."""
        states = self.run.machine.table.states
        waiting = [
            event.data["took_s"]
            for event in self.run.trace.events
            if event.kind == "row" and states[_source(event.what)].rollouts in (PARKING, PARKED)
        ]
        return float(sum(waiting))

    async def _end(self) -> None:
        await self.performing.renewal.stop()
        for thread in self.operation.threads:
            self._left_behind("", thread)

    def _deadline(self, step: str) -> float | None:
        budget = self._budgets.get(step)
        if budget is None:
            self.operation.until_s = None
        else:
            now = asyncio.get_running_loop().time()
            self._until_s.setdefault(budget, now + self._seconds(budget))
            self.operation.until_s = self._until_s[budget]
        return self.operation.until_s

    def _judge(self, step: str, error: BaseException) -> tuple[str, Cause]:
        raised = error.__cause__ if isinstance(error, HookFailed) else error
        if isinstance(raised, SnapshotRejected):
            self.operation.rejected = raised
        self.operation.note_bug(step, error)
        event, cause = judge(step, error)
        if cause.reason is AbortReason.TIMEOUT and not str(error):
            cause = evolve(cause, detail=self._waited_for())
        return event, cause

    def _waited_for(self) -> str:
        """Who has not answered, and for which rollouts or servers: what there is to look at."""
        waiting = self.operation.waiting.items()
        named = [f"{who} ({', '.join(names)})" if names else who for who, names in waiting]
        return f"waited for {', '.join(named) or 'the store'}"


def _source(row: str) -> str:
    return row.partition(" --")[0]

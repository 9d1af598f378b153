"""Letting go: the same routine after a save, an abort and a restore (S6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fsm.operation import HookFailed, Operation
from fsm.outcome import NotReleased
from fsm.participant import Attempt, Participant, Restore

RETRY_PAUSE_S = 1.0


class Release:
    """Calls one hook on everyone who was told, callees first, past failures, in bounded rounds.

    After each round `operation.unreleased` names who is still silent. A participant that opened
    while others were silent is called again when that set changes: dispatch opens to those that
    confirmed, then to the rest.
    """

    def __init__(
        self,
        operation: Operation,
        hook: str,
        view: Callable[[Participant], Attempt | Restore],
        timeout_s: float,
    ) -> None:
        self.operation = operation
        self._hook, self._view, self._timeout_s = hook, view, timeout_s
        self._opened: dict[str, frozenset[str]] = {}

    async def rounds(self, count: int) -> None:
        """Up to `count` rounds. Raises `NotReleased` when somebody is silent after the last."""
        for number in range(count):
            if number:
                await asyncio.sleep(RETRY_PAUSE_S)
            if await self.one_round():
                return
        raise NotReleased(frozenset().union(*self.silent().values()))

    def silent(self) -> dict[str, frozenset[str]]:
        """Who has not confirmed: participant → its servers, or itself."""
        unreleased = self.operation.unreleased
        return {
            name: unreleased.get(name, frozenset({name}))
            for name in self.operation.told
            if name in unreleased or name not in self._opened
        }

    async def one_round(self) -> bool:
        silent: frozenset[str] = frozenset()
        for rank in reversed(self.operation.ranks):
            told = [one for one in rank if one.name in self.operation.told]
            await asyncio.gather(*(self._one(one, silent) for one in told))
            silent = silent.union(*self.operation.unreleased.values())
        return not self.operation.unreleased

    async def _one(self, participant: Participant, silent: frozenset[str]) -> None:
        """silent: servers of its callees that have not confirmed in this round."""
        if self._opened.get(participant.name) == silent:
            return
        error = await self._try(participant)
        if error is None:
            self.operation.unreleased.pop(participant.name, None)
            self._opened[participant.name] = silent
        else:
            names = error.names if isinstance(error, NotReleased) else frozenset({participant.name})
            self.operation.unreleased[participant.name] = names

    async def _try(self, participant: Participant) -> BaseException | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.operation.call(participant, self._hook, self._view(participant))
        except HookFailed as failed:
            return failed.__cause__
        except TimeoutError as late:
            return late
        return None

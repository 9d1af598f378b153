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

    timeout_s: of one round. Its ranks share it, so that a silent one uses up its own share and
    not the time of those after it: the last one opens dispatch, which no lease does (S6).
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
        operation, now = self.operation, asyncio.get_running_loop().time
        end_s, step_until_s = now() + self._timeout_s, operation.until_s
        silent: frozenset[str] = frozenset()
        for ranks_left, rank in zip(
            range(len(operation.ranks), 0, -1), reversed(operation.ranks), strict=True
        ):
            # What the hooks see as `remaining_s`: so they can say in time who of theirs is silent.
            operation.until_s = now() + max(0.0, end_s - now()) / ranks_left
            told = [one for one in rank if one.name in operation.told]
            await asyncio.gather(*(self._one(one, silent) for one in told))
            silent = silent.union(*operation.unreleased.values())
        operation.until_s = step_until_s
        return not operation.unreleased

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
            async with asyncio.timeout_at(self.operation.until_s):
                await self.operation.call(participant, self._hook, self._view(participant))
        except HookFailed as failed:
            return failed.__cause__
        except TimeoutError as late:
            return late
        return None

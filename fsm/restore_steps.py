"""What the steps of RESTORE do. Which follows which is in `fsm.restore` (specs/restore.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from attrs import frozen

from fsm.operation import Operation
from fsm.outcome import Cause, SnapshotRejected
from fsm.participant import Participant, Restore
from fsm.release import Release
from fsm.renewal import Renewal
from fsm.save import HOLD_LOST
from fsm.save_steps import Setting
from fsm.storing import SavedSnapshot
from fsm.token import RestoreToken

IfNone = Literal["start", "raise"]
IfBad = Literal["raise", "older"]
IfForeign = Literal["refuse", "take_over"]

BUDGETS = {
    "discover": "restore_timeout_s",
    "fence": "prepare_timeout_s",
    "load_data_plane": "restore_timeout_s",
    "restore_gym": "restore_timeout_s",
    "hand_over": "restore_timeout_s",
    "take_over": "restore_timeout_s",
    "load_controller": "restore_timeout_s",
    "resume": "release_timeout_s",
    "rollback": "release_timeout_s",
}


@frozen
class Choices:
    """What the caller of a restore allows (R2, H1); each is refused unless it says otherwise."""

    if_none: IfNone = "raise"
    if_bad: IfBad = "raise"
    if_foreign: IfForeign = "refuse"


class Restoring:
    """The steps of one restore."""

    def __init__(
        self,
        setting: Setting,
        operation: Operation,
        choices: Choices | None = None,
    ) -> None:
        self.setting, self.operation = setting, operation
        self.choices = choices or Choices()
        self.snapshot: SavedSnapshot | None = None
        self.post: Callable[[str, Cause | None], None] = lambda *_: None
        self.let_go = asyncio.Event()
        config = setting.config
        self.renewal = Renewal(operation, self.view, config.renew_every_s, self._hold_lost)
        self.activation = Release(operation, "resume", self.view, config.resume_timeout_s)
        self.dropping = Release(operation, "rollback", self.view, config.resume_timeout_s)

    def view(self, participant: Participant) -> Restore:
        foreign = self.choices.if_foreign == "take_over"
        return Restore(participant.name, self.operation, self.snapshot, foreign)

    def steps(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        return {
            "discover": self.discover,
            "fence": self.fence,
            "load_data_plane": lambda: self.load("load_data_plane"),
            "restore_gym": lambda: self.load("restore_gym"),
            "hand_over": self.hand_over,
            "take_over": self.take_over,
            "load_controller": self.load_controller,
            "resume": self.resume,
            "rollback": self.rollback,
        }

    async def discover(self) -> None:
        everyone = [one for rank in self.operation.ranks for one in rank]
        topology = await asyncio.gather(*(self._describe(one) for one in everyone))
        formats = {one.name: one.format_version for one in everyone}
        named = {one.name: facts for one, facts in zip(everyone, topology, strict=True)}
        self.snapshot = await self.setting.store.newest(named, formats, if_bad=self.choices.if_bad)
        if self.snapshot is None and self.choices.if_none == "raise":
            raise SnapshotRejected("(none)", "the root", 'holds no snapshot; pass if_none="start"')

    async def fence(self) -> None:
        self.operation.fence = await self.setting.store.fence()
        self.renewal.start()
        await self.operation.callers_first(
            lambda one: self.operation.call(one, "fence", self.view(one), tell=True)
        )

    async def load(self, step: str) -> None:
        if self.snapshot is None:
            return

        async def stage(one: Participant) -> None:
            if one.restore_step != step:
                return
            facts = await self.operation.call(one, "restore", self.view(one), tell=True)
            self.operation.add_facts(one.name, facts)

        await self.operation.callees_first(stage)

    async def hand_over(self) -> None:
        """The renewal goes on until this process is told to stop, or it is too late (R8)."""
        await self.let_go.wait()

    def token(self, left_s: float) -> RestoreToken:
        """All that another process needs to go on from here."""
        operation = self.operation
        return RestoreToken(
            fence=operation.fence,
            label=operation.label,
            snapshot=None if self.snapshot is None else self.snapshot.id,
            formats={one.name: one.format_version for rank in operation.ranks for one in rank},
            told=tuple(operation.told),
            holding=tuple(operation.holding),
            facts=_copy(operation.facts),
            left_s=left_s,
        )

    def go_on_from(self, token: RestoreToken, snapshot: SavedSnapshot | None) -> None:
        """Be where the process that gave the token is."""
        operation, self.snapshot = self.operation, snapshot
        operation.fence, operation.label = token.fence, token.label
        operation.facts = _copy(token.facts)
        by_name = {one.name: one for rank in operation.ranks for one in rank}
        operation.told.update({name: by_name[name] for name in token.told})
        operation.holding.update({name: by_name[name] for name in token.holding})

    async def take_over(self) -> None:
        """Whoever was told by the first process learns of it here; the others are fenced now."""
        told = frozenset(self.operation.told)

        async def take(one: Participant) -> None:
            hook = "take_over" if one.name in told else "fence"
            await self.operation.call(one, hook, self.view(one), tell=True)

        self.renewal.start()
        await self.operation.callers_first(take)
        await self.renewal.check()

    async def load_controller(self) -> None:
        await self.load("load_controller")
        if self.snapshot is not None:
            await self.operation.callers_first(
                lambda one: self.operation.call(one, "reconcile", self.view(one))
            )
        # The last moment at which a lapsed lease may still roll back (R1).
        await self.renewal.check()
        await self.setting.store.restored(self.snapshot)

    async def resume(self) -> None:
        await self.renewal.stop()
        for rank in self.operation.ranks:
            for one in rank:
                self.operation.told.setdefault(one.name, one)
        await self.activation.rounds(self.setting.config.resume_attempts)

    async def rollback(self) -> None:
        await self.renewal.stop()
        await self.dropping.rounds(self.setting.config.resume_attempts)

    # -- helpers -------------------------------------------------------------------------------

    def _hold_lost(self, cause: Cause) -> None:
        self.post(HOLD_LOST, cause)

    async def _describe(self, one: Participant) -> dict[str, Any]:
        return dict(await one.describe())


def _copy(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: dict(said) for name, said in facts.items()}

"""What stands between the engine and the participant under test, and what stands beside it.

A test lets something happen before or after a hook, loses its answer, drops a message, delivers
it twice, or keeps it to deliver it late.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fsm.participant import Facts, Participant, hook_of

HOOKS = (
    "preflight",
    "pause",
    "prepare",
    "drain",
    "commit",
    "cut",
    "renew",
    "resume",
    "fence",
    "restore",
    "take_over",
    "reconcile",
    "rollback",
)
Action = Callable[[], Awaitable[Any]]


class Relay(Participant):
    """Passes hooks on. It overrides exactly those that `inner` overrides: the engine must see the
    same participant. `seen` keeps what each hook was last given."""

    def __init__(self, inner: Participant) -> None:
        self.inner = inner
        self.name, self.format_version = inner.name, inner.format_version
        self.called_by, self.calls = inner.called_by, inner.calls
        self.restore_step = inner.restore_step
        self.before: dict[str, Action] = {}
        self.after: dict[str, Action] = {}
        self.drop: set[str] = set()  # never delivered, and confirmed all the same
        self.twice: set[str] = set()
        self.seen: dict[str, Any] = {}

    async def describe(self) -> Mapping[str, Any]:
        return await self.inner.describe()

    def has(self, hook: str) -> bool:
        return hook_of(self.inner, hook) is not None

    @property
    def writes_in(self) -> str:
        """The hook whose instant the snapshot describes."""
        return "cut" if self.has("cut") else "commit"

    async def pass_on(self, hook: str, given: Any) -> Any:
        self.seen[hook] = given
        if hook in self.before:
            await self.before[hook]()
        if hook in self.drop:
            return None
        answer = await getattr(self.inner, hook)(given)
        if hook in self.twice:
            await getattr(self.inner, hook)(given)
        if hook in self.after:
            await self.after[hook]()
        return answer


def relay_to(inner: Participant) -> Relay:
    hooks = {hook: _passing(hook) for hook in HOOKS if hook_of(inner, hook) is not None}
    made: Relay = type("Relay", (Relay,), hooks)(inner)
    return made


def _passing(hook: str) -> Callable[[Relay, Any], Awaitable[Any]]:
    async def pass_on(self: Relay, given: Any) -> Any:
        return await self.pass_on(hook, given)

    return pass_on


class Witness(Participant):
    """Somebody else in the same snapshot, called by the participant under test: it is told after
    it. `at` says what happens in its hooks."""

    name = "witness"

    def __init__(self, caller: str) -> None:
        self.called_by = frozenset({caller})
        self.at: dict[str, Action] = {}

    async def _reach(self, hook: str) -> None:
        if hook in self.at:
            await self.at[hook]()

    async def pause(self, _: Any) -> None:
        await self._reach("pause")

    async def prepare(self, _: Any) -> None:
        await self._reach("prepare")

    async def drain(self, _: Any) -> None:
        await self._reach("drain")

    async def commit(self, _: Any) -> Facts | None:
        await self._reach("commit")
        return None

    async def cut(self, _: Any) -> Facts | None:
        await self._reach("cut")
        return None

    async def fence(self, _: Any) -> None:
        await self._reach("fence")

    async def restore(self, _: Any) -> Facts | None:
        await self._reach("restore")
        return None

    async def reconcile(self, _: Any) -> None:
        await self._reach("reconcile")

"""A participant in memory, for tests: it obeys every rule, and breaks them when told to.

```python
one = MemoryParticipant("sandboxes", called_by={"gym"})
one.work("a")                                   # changes its state, as a running rollout would
one.fault("commit", Fault.refuse("no_space"))   # the next commit is refused
```

What it did is in `log` (hook, instant); whether anybody is held by it in `is_held`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import frozen

from fsm import hold
from fsm.machine import Machine
from fsm.outcome import Refused, Unavailable
from fsm.participant import Attempt, Participant, Restore
from fsm.storing import Fence, SavedPart


@frozen
class Fault:
    """What goes wrong with one call of a hook.

    refuse: says no. fail: raises OSError. bug: raises an error nobody expects. hang: never
    answers. late: answers after `delay_s`. lost: does its work, and the answer is lost.
    before_s: how long the call takes before it does anything.
    """

    kind: Literal["refuse", "fail", "bug", "hang", "late", "lost"]
    code: str = "refused"
    delay_s: float = 0.0

    @classmethod
    def refuse(cls, code: str = "refused") -> Fault:
        return cls("refuse", code)

    @classmethod
    def fail(cls) -> Fault:
        return cls("fail")

    @classmethod
    def bug(cls) -> Fault:
        return cls("bug")

    @classmethod
    def hang(cls) -> Fault:
        return cls("hang")

    @classmethod
    def late(cls, delay_s: float) -> Fault:
        return cls("late", delay_s=delay_s)

    @classmethod
    def lost(cls) -> Fault:
        return cls("lost")


class MemoryParticipant(Participant):
    """Holds a list of items; a snapshot has to give back exactly those.

    It is a whole server in small: HOLD machine, fence memory, lease, staged state (H1 to H4).
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        called_by: Iterable[str] = (),
        calls: Iterable[str] = (),
        restore_step: str = "restore_gym",
    ) -> None:
        self.name = name
        self.called_by, self.calls = frozenset(called_by), frozenset(calls)
        self.restore_step = restore_step
        self.items: list[str] = []
        self.staged: list[str] | None = None
        self.log: list[tuple[str, float]] = []
        self.closed_fence = Fence("", 0, 0)
        self.active_fence: Fence | None = None
        self._activated_by: Fence | None = None
        self._machine = Machine(hold.HOLD)
        self._moved = False
        self._faults: dict[str, list[Fault | None]] = {}
        self._lease: asyncio.TimerHandle | None = None

    # -- what tests do -------------------------------------------------------------------------

    def fault(self, hook: str, *faults: Fault | None) -> None:
        """The next calls of `hook` meet these, one each; None: that call goes well."""
        self._faults.setdefault(hook, []).extend(faults)

    def work(self, item: str) -> bool:
        """A rollout changes something. False: refused, it is held."""
        if self.phase not in (hold.OPEN, hold.CLOSING):
            return False
        self.items.append(item)
        return True

    def move(self, item: str) -> None:
        """Something changes although it is held: the snapshot under way must not be published."""
        self.items.append(item)
        self._moved = True

    def crash(self) -> None:
        """The process dies and a new one takes its place: no hold, no fence, nothing staged."""
        self._cancel_lease()
        self.__init__(  # type: ignore[misc]
            self.name,
            called_by=self.called_by,
            calls=self.calls,
            restore_step=self.restore_step,
        )

    @property
    def phase(self) -> str:
        return self._machine.state

    @property
    def is_held(self) -> bool:
        return self.phase != hold.OPEN

    def hooks(self) -> list[str]:
        return [hook for hook, _ in self.log]

    # -- save ----------------------------------------------------------------------------------

    async def prepare(self, attempt: Attempt) -> None:
        async with _Call(self, "prepare"):
            self._admit(attempt.fence)
            if self.phase == hold.OPEN:
                self._machine.fire(hold.PREPARE)
            self._moved = False
            self._rearm(attempt.lease_s)

    async def drain(self, attempt: Attempt) -> None:
        async with _Call(self, "drain"):
            self._expect(attempt.fence, hold.CLOSING, hold.HELD)
            if self.phase == hold.CLOSING:
                self._machine.fire(hold.QUIET)

    async def commit(self, attempt: Attempt) -> Mapping[str, int]:
        async with _Call(self, "commit"):
            self._expect(attempt.fence, hold.HELD, hold.COMMITTED)
            async with attempt.part() as part:
                write = part.records("items")
                for item in self.items:
                    write({"item": item})
            self._expect(attempt.fence, hold.HELD, hold.COMMITTED)
            if self.phase == hold.HELD:
                self._machine.fire(hold.COMMIT)
            return {"items": len(self.items)}

    async def renew(self, attempt: Attempt | Restore) -> None:
        async with _Call(self, "renew"):
            self._expect(attempt.fence, *(set(hold.HOLD.states) - {hold.OPEN}))
            if self._moved:
                raise Refused("moved", f"{self.name} changed under the hold")
            self._rearm(attempt.lease_s)

    async def resume(self, attempt: Attempt | Restore) -> None:
        async with _Call(self, "resume"):
            self._close(attempt.fence)
            if isinstance(attempt, Restore):
                self._activate(attempt)
            self._let_go(hold.RESUME if self.phase != hold.FENCED else hold.ROLLBACK)

    # -- restore -------------------------------------------------------------------------------

    async def fence(self, restore: Restore) -> None:
        async with _Call(self, "fence"):
            self._admit(restore.fence)
            if self.phase == hold.OPEN:
                self._machine.fire(hold.FENCE)
                self._machine.fire(hold.QUIET)
            self._moved = False
            self._rearm(restore.lease_s)

    async def restore(self, restore: Restore) -> Mapping[str, int]:
        async with _Call(self, "restore"):
            self._expect(restore.fence, hold.FENCED, hold.STAGED)
            self.staged = [record["item"] for record in restore.saved().records("items")]
            if self.phase == hold.FENCED:
                self._machine.fire(hold.STAGE)
            return {"items": len(self.staged)}

    async def rollback(self, restore: Restore) -> None:
        async with _Call(self, "rollback"):
            self._close(restore.fence)
            self._let_go(hold.ROLLBACK)

    @classmethod
    def inspect(cls, saved: SavedPart) -> Mapping[str, Any]:
        return {"items": sum(1 for _ in saved.records("items"))}

    # -- rules ---------------------------------------------------------------------------------

    def _admit(self, fence: Fence) -> None:
        """H1: older or closed is refused; newer ends the older hold first."""
        if _order(fence) <= _order(self.closed_fence):
            raise Refused("stale_fence", f"{self.name} has closed {self.closed_fence}")
        if self.active_fence is not None and fence != self.active_fence:
            if _order(fence) < _order(self.active_fence):
                raise Refused("stale_fence", f"{self.name} is held by {self.active_fence}")
            self._let_go(hold.NEWER)
        self.active_fence = fence

    def _expect(self, fence: Fence, *phases: str) -> None:
        if fence != self.active_fence or self.phase not in phases:
            raise Refused("invalid_phase", f"{self.name} is {self.phase} for {self.active_fence}")

    def _close(self, fence: Fence) -> None:
        """A release also fences the attempt: its delayed prepare changes nothing any more. One
        that comes after a newer attempt has begun must not end the newer hold."""
        newest = max(self.closed_fence, self.active_fence or self.closed_fence, key=_order)
        if _order(fence) < _order(newest):
            raise Refused("stale_fence", f"{self.name} knows {newest}")
        if self.active_fence is not None and fence != self.active_fence:
            self._let_go(hold.NEWER)
        self.closed_fence = fence

    def _activate(self, restore: Restore) -> None:
        """R1: who has lost what it staged (a lapse, a new process) must not confirm."""
        if restore.snapshot is None or self._activated_by == restore.fence:
            return
        if self.staged is None:
            raise Refused("not_staged", f"{self.name} has nothing of {restore.fence} to activate")
        self.items, self._activated_by = self.staged, restore.fence

    def _let_go(self, event: str) -> None:
        self._machine.fire(event if self.phase != hold.OPEN else hold.RESUME)
        self.staged, self.active_fence = None, None
        self._cancel_lease()

    def _rearm(self, lease_s: float) -> None:
        self._cancel_lease()
        self._lease = asyncio.get_running_loop().call_later(lease_s, self._lapse)

    def _lapse(self) -> None:
        """H3: nobody renewed: open again, and what was staged is dropped."""
        if self.active_fence is not None:
            self.closed_fence = self.active_fence
            self._let_go(hold.LAPSE)

    def _cancel_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def _next_fault(self, hook: str) -> Fault | None:
        faults = self._faults.get(hook)
        return faults.pop(0) if faults else None


class _Call:
    """One call of a hook, with its fault: before the work, or instead of the answer."""

    def __init__(self, owner: MemoryParticipant, hook: str) -> None:
        self.owner, self.hook = owner, hook
        self.fault: Fault | None = None

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        self.owner.log.append((self.hook, loop.time()))
        self.fault = self.owner._next_fault(self.hook)
        if self.fault is None:
            await asyncio.sleep(0)
        elif self.fault.kind == "refuse":
            raise Refused(self.fault.code, f"{self.owner.name} was told to refuse {self.hook}")
        elif self.fault.kind == "fail":
            raise OSError(28, f"no space left for {self.owner.name}")
        elif self.fault.kind == "bug":
            raise ZeroDivisionError(f"a bug in {self.owner.name}.{self.hook}")
        elif self.fault.kind == "hang":
            await loop.create_future()
        elif self.fault.kind == "late":
            await asyncio.sleep(self.fault.delay_s)

    async def __aexit__(self, *_: object) -> None:
        if self.fault is not None and self.fault.kind == "lost":
            raise Unavailable(f"the answer of {self.owner.name}.{self.hook} was lost")


def _order(fence: Fence) -> tuple[int, int]:
    return fence.incarnation, fence.sequence

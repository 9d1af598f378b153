"""Faults for MemoryStore, asked for by tests: fail the Nth operation, hold or bend a publish."""

from __future__ import annotations

import asyncio
from typing import Literal

from attrs import define, field

Operation = Literal[
    "open", "begin", "write", "seal", "discard", "newest", "restored", "prune", "take_over"
]


@define
class PublishFault:
    """How the next publish goes. As it stands: published and durable at once.

    published: False: the claim is won, the snapshot never appears. durable: False: the fsync of
    the parent failed. held: publish does not return before `release`. renamed_early: the
    snapshot is there while publish is still held: the answer got lost.
    """

    published: bool = True
    durable: bool = True
    held: bool = False
    renamed_early: bool = False
    reached: asyncio.Event = field(factory=asyncio.Event)
    _released: asyncio.Event = field(factory=asyncio.Event)

    def release(self, *, published: bool | None = None) -> None:
        """Let a held publish return; `published` decides anew which way it goes."""
        if published is not None:
            self.published = published
        self._released.set()

    async def wait(self) -> None:
        self.reached.set()
        if self.held:
            await self._released.wait()


@define
class _Failure:
    operation: str
    error: Exception
    on: int
    sticky: bool
    fired: bool = False


class Faults:
    """What shall go wrong. `calls` has every operation that ran, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._failures: list[_Failure] = []
        self._publishes: list[PublishFault] = []

    def fail(
        self,
        operation: Operation | Literal["any"],
        error: Exception,
        *,
        on: int = 1,
        sticky: bool = False,
    ) -> None:
        """Raise `error` from the `on`-th such operation from now; sticky: and from later ones.

        "write" is the end of each file of a part, "any" counts all operations.
        """
        self._failures.append(_Failure(operation, error, on, sticky))

    def next_publish(
        self,
        *,
        published: bool = True,
        durable: bool = True,
        held: bool = False,
        renamed_early: bool = False,
    ) -> PublishFault:
        """Decide how the next publish goes; `reached` is set when it gets there."""
        fault = PublishFault(published, durable, held, renamed_early)
        self._publishes.append(fault)
        return fault

    def clear(self) -> None:
        """Heal: nothing fails any more. Held publishes stay held until released."""
        self._failures.clear()
        self._publishes.clear()

    @property
    def fired(self) -> bool:
        """Has every failure asked for happened? A test whose fault never came proves nothing."""
        return all(failure.fired for failure in self._failures)

    def check(self, operation: Operation) -> None:
        self.calls.append(operation)
        for failure in self._failures:
            if failure.operation not in (operation, "any"):
                continue
            failure.on -= 1
            if failure.on == 0 or (failure.sticky and failure.on < 0):
                failure.fired = True
                raise failure.error

    def take_publish(self) -> PublishFault:
        self.calls.append("publish")
        return self._publishes.pop(0) if self._publishes else PublishFault()

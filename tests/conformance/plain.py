"""The least that a participant can be and be right, and its suite."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from quiesce import Attempt, Participant, Restore
from quiesce.testing import IN_PROCESS, Conformance


class Plain(Participant):
    """A list in the trainer's process."""

    name = "plain"

    def __init__(self) -> None:
        self.items: list[str] = []
        self.staged: list[str] | None = None
        self.open = asyncio.Event()
        self.open.set()

    async def add(self, item: str) -> None:
        await self.open.wait()
        self.items.append(item)

    async def prepare(self, attempt: Attempt) -> None:
        self.open.clear()

    async def commit(self, attempt: Attempt) -> Mapping[str, Any] | None:
        async with attempt.part() as part:
            part.document("items", self.items)
        return {"items": len(self.items)}

    async def fence(self, restore: Restore) -> None:
        self.open.clear()

    async def restore(self, restore: Restore) -> Mapping[str, Any] | None:
        self.staged = restore.saved().document("items")
        return None

    async def resume(self, attempt: Attempt | Restore) -> None:
        if isinstance(attempt, Restore) and self.staged is not None:
            self.items, self.staged = self.staged, None
        self.open.set()

    async def rollback(self, restore: Restore) -> None:
        self.staged = None
        self.open.set()


class PlainSuite(Conformance):
    virtual_time = True
    no_lease = no_fence = IN_PROCESS
    plugin: type[Plain] = Plain

    async def make(self) -> Plain:
        return self.plugin()

    async def work(self, one: Plain, number: int) -> None:
        await one.add(f"turn {number}")

    async def observe(self, one: Plain) -> list[str]:
        return list(one.items)

    async def is_held(self, one: Plain) -> bool:
        return not one.open.is_set()

"""The participant in memory, on virtual time: every rule applies to it."""

from __future__ import annotations

from participants.memory import MemoryParticipant
from quiesce.testing import Conformance


class TestMemory(Conformance):
    virtual_time = True

    async def make(self) -> MemoryParticipant:
        return MemoryParticipant("memory", called_by={"trainer"})

    async def work(self, one: MemoryParticipant, number: int) -> None:
        one.work(f"turn {number}")

    async def observe(self, one: MemoryParticipant) -> list[str]:
        return list(one.items)

    async def in_another_process(self, one: MemoryParticipant) -> MemoryParticipant:
        return one  # it is the server: both processes reach it

    async def is_held(self, one: MemoryParticipant) -> bool:
        return one.is_held

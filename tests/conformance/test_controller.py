"""The controller over our own bookkeeping, and over the least that a trainer can have."""

from __future__ import annotations

from typing import Any

from participants.controller.participant import Controller
from participants.controller.state import Found, Loaded, Records, RlCut
from quiesce.testing import IN_PROCESS, Conformance
from tests.controller_support import world


class ControllerConformance(Conformance):
    no_hold = "its instant is the cut: until the release only dispatch stands still"
    no_staging = "books act only when dispatch opens; a rollback puts the old ones back"
    no_lease = no_fence = fresh_only = IN_PROCESS


class TestRlController(ControllerConformance):
    async def make(self) -> Controller:
        return Controller(world(tasks=100).rl)

    async def work(self, one: Any, number: int) -> None:
        await one.rl.draw()

    async def observe(self, one: Any) -> Any:
        """Not the runs: every unfinished rollout has another one after a restore."""
        return one.rl.loader.drawn, sorted(name.rollout_id for name in one.rl.ledger.entries())

    async def is_held(self, one: Any) -> bool:
        closed: bool = one.rl.gate.closed
        return closed

    async def crash_and_replace(self, one: Any) -> Controller:
        return Controller(world(tasks=100, opened=False).rl)


class Least:
    """An `RlState` of a trainer that keeps nothing but the prompts that it has drawn."""

    def __init__(self, *, opened: bool) -> None:
        self.opened = opened
        self.prompts: list[int] = []

    def stop_dispatch(self) -> None:
        self.opened = False

    def open_dispatch(self, unavailable: frozenset[str]) -> None:
        self.opened = True

    async def flush_acks(self, limit_s: float) -> int:
        return 0

    def state(self) -> RlCut:
        return RlCut({"prompts": list(self.prompts)})

    async def load(self, state: Records | None, found: Found | None) -> Loaded:
        self.prompts = [] if state is None else list(state["prompts"])
        return Loaded()


class TestLeastState(ControllerConformance):
    async def make(self) -> Controller:
        return Controller(Least(opened=True), calls=())

    async def work(self, one: Any, number: int) -> None:
        one.rl.prompts.append(number)

    async def observe(self, one: Any) -> Any:
        return list(one.rl.prompts)

    async def is_held(self, one: Any) -> bool:
        return not one.rl.opened

    async def crash_and_replace(self, one: Any) -> Controller:
        return Controller(Least(opened=False), calls=())

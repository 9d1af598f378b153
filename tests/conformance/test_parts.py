"""The protocols that a trainer may implement itself, each with its suite, on our own parts and on
the controller of `examples/own_controller.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

from participants.barrier import AsyncBarrier
from participants.conformance.barrier import BarrierConformance
from participants.conformance.data_plane import CaptureSinkConformance
from participants.conformance.rl_state import RlStateConformance
from participants.controller.controller import RlController
from participants.data_plane import CAPTURE, Row
from participants.memory_data_plane import MemoryDataPlane
from tests.controller_support import world
from tests.examples.program import EXAMPLES


class TestAsyncBarrier(BarrierConformance):
    def make(self) -> AsyncBarrier:
        return AsyncBarrier()


class TestMemorySink(CaptureSinkConformance):
    async def make(self) -> MemoryDataPlane:
        return MemoryDataPlane()

    async def read(self, sink: MemoryDataPlane) -> dict[str, Row]:
        found: Mapping[str, Row] = await sink.get_rows(CAPTURE, await sink.keys(CAPTURE))
        return dict(found)


class TestRlController(RlStateConformance):
    """Prompts that are drawn and not sent: what Gym knows is the join's own matter."""

    async def make(self) -> RlController:
        self.world = world(8, opened=False)
        return self.world.rl

    async def work(self, rl: RlController, number: int) -> None:
        await rl.draw()

    def observe(self, rl: RlController) -> object:
        ledger = [(one.rollout_id, one.prompt, one.state) for one in rl.ledger.entries()]
        return ledger, rl.loader.state_dict()

    def is_open(self, rl: RlController) -> bool:
        return not rl.gate.closed


def own_controller() -> Any:
    spec = importlib.util.spec_from_file_location("own", EXAMPLES / "own_controller.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestOwnController(RlStateConformance):
    async def make(self) -> Any:
        return own_controller().Ledger(MemoryDataPlane(), AsyncBarrier())

    async def work(self, rl: Any, number: int) -> None:
        rl.waiting.append(f"p{rl.drawn}")
        rl.drawn += 1

    def observe(self, rl: Any) -> object:
        return rl.drawn, list(rl.waiting), dict(rl.claimed)

    def is_open(self, rl: Any) -> bool:
        opened: bool = rl.open.is_set()
        return opened


# -- the suites notice ---------------------------------------------------------------------------


class Leaky(MemoryDataPlane):
    """Says yes and writes nothing."""

    async def put(self, key: str, row: Row) -> None:
        pass


def test_a_sink_that_answers_too_early_is_noticed() -> None:
    class Suite(TestMemorySink):
        async def make(self) -> MemoryDataPlane:
            return Leaky()

    with pytest.raises(KeyError):
        Suite().test_a_row_is_there_when_put_returns()


def test_a_barrier_that_lets_everybody_in_is_noticed() -> None:
    class Open(AsyncBarrier):
        cut = AsyncBarrier.mutation  # type: ignore[assignment]

    class Suite(BarrierConformance):
        def make(self) -> Any:
            barrier = Open()
            barrier.cut = lambda: barrier.mutation("cut")  # type: ignore[method-assign]
            return barrier

    with pytest.raises(AssertionError):
        Suite().test_a_cut_waits_for_mutations_and_later_ones_wait_for_it()


def test_records_that_change_with_the_books_are_noticed() -> None:
    class Shared(TestOwnController):
        async def make(self) -> Any:
            rl = await super().make()
            kept = type(rl).state

            def state() -> Any:
                cut = kept(rl)
                cut.records["books"][0] = (rl.drawn, rl.waiting, [])
                return cut

            rl.state = state
            return rl

    with pytest.raises(AssertionError, match="change with the bookkeeping"):
        Shared().test_the_state_is_jsonable_and_a_copy()

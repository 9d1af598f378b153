"""R8 over the whole stack: Gym's wire, a data plane, the controller's join. Two processes, each
with participants of its own; the token crosses the border as JSON."""

from __future__ import annotations

import asyncio

import pytest

from fsm import hold
from fsm.config import EngineConfig
from fsm.engine import SnapshotEngine
from fsm.outcome import Anchor, Restored, RestoreFailed, Saved
from fsm.participant import Elsewhere, Participant
from fsm.token import RestoreToken
from participants.controller.participant import Controller
from participants.data_plane import TRAIN, DataPlanePart
from participants.gym import wire
from participants.gym.fake import Fault
from participants.gym.participant import Gym
from participants.memory_data_plane import MemoryDataPlane
from participants.virtual_time import run
from storage.memory import MemoryDisk, MemoryStore
from tests.controller_support import World, world
from tests.gym_support import actor_of, fake_gym
from tests.unit.test_controller import buffered

CALLS = ("gym", "data_plane")
CONFIG = EngineConfig(lease_s=30, renew_every_s=5)


class Stack:
    """What both processes reach: Gym's servers, a data plane, a disk."""

    def __init__(self) -> None:
        self.gym, self.plane, self.disk = fake_gym(), MemoryDataPlane(), MemoryDisk()

    def engine(self, controller: Participant) -> SnapshotEngine:
        parts = [Gym([actor_of(self.gym)]), DataPlanePart(self.plane), controller]
        store = MemoryStore(self.disk)
        return SnapshotEngine(CONFIG, store, parts, anchor=lambda: Anchor(0, "base"))

    def driver(self) -> SnapshotEngine:
        return self.engine(Elsewhere("controller", calls=CALLS))

    def controller(self) -> tuple[SnapshotEngine, World]:
        made = world(plane=self.plane, opened=False)
        return self.engine(Controller(made.rl, calls=CALLS)), made

    def phases(self) -> set[str]:
        return {fake.phase for fake in self.gym.fakes.values()}


async def saved() -> Stack:
    """A snapshot with two complete groups; then everything but Gym's servers dies."""
    old = Stack()
    engine, made = old.controller()
    made.rl.open_dispatch(frozenset())
    await buffered(made, 2)
    outcome = await engine.save()
    assert isinstance(outcome, Saved), outcome
    await engine.close()
    new = Stack()
    new.gym, new.disk = old.gym, old.disk
    return new


async def handed_over(stack: Stack) -> tuple[SnapshotEngine, RestoreToken]:
    driver = stack.driver()
    token = await driver.restore(until="gym_restored")
    return driver, RestoreToken.from_json(token.to_json())


def test_the_controller_joins_what_the_driver_restored() -> None:
    async def main() -> None:
        stack = await saved()
        driver, token = await handed_over(stack)
        assert stack.phases() == {hold.STAGED}
        assert len(await stack.plane.keys(TRAIN)) == 4
        await asyncio.sleep(3 * CONFIG.lease_s)
        engine, made = stack.controller()
        restored = await engine.restore(token)
        assert isinstance(restored, Restored)
        assert restored.anchor == Anchor(0, "base")
        assert stack.phases() == {hold.OPEN}
        assert {fake.activations for fake in stack.gym.fakes.values()} == {1}
        assert made.rl.conservation()["buffered"] == 2
        assert not made.rl.gate.closed
        assert made.rl.incarnation == token.fence.incarnation
        await driver.let_go()
        assert isinstance(await engine.save(), Saved)

    run(main())


@pytest.mark.parametrize("operation", ["discard", "renew"])
def test_a_server_that_fails_the_controller_rolls_everything_back(operation: str) -> None:
    async def main() -> None:
        stack = await saved()
        _, token = await handed_over(stack)
        stack.gym["a0"].report = wire.Report("", restarts=(wire.Restart("p9_g9", "straggler"),))
        stack.gym["a0"].faults.append(Fault(operation, "refuse", code="busy"))
        token.facts["gym"]["_restarts"] = {"p9_g9": "straggler"}
        engine, made = stack.controller()
        with pytest.raises(RestoreFailed, match="rolled back"):
            await engine.restore(token)
        assert stack.phases() == {hold.OPEN}
        assert {fake.activations for fake in stack.gym.fakes.values()} == {0}
        assert await stack.plane.keys(TRAIN) == {}, "the rows that the driver loaded are gone"
        assert made.rl.gate.closed

        again, made = stack.controller()
        stack.disk.holder = None
        assert (await again.restore()).snapshot == token.snapshot
        assert made.rl.conservation()["buffered"] == 2

    run(main())


def test_a_server_that_restarts_during_the_hand_over_is_noticed() -> None:
    """S4, R1: what it had staged is gone."""

    async def main() -> None:
        stack = await saved()
        _, token = await handed_over(stack)
        stack.gym["p0"].restart()
        engine, _ = stack.controller()
        with pytest.raises(RestoreFailed, match="p0"):
            await engine.restore(token)
        assert stack.phases() == {hold.OPEN}
        assert {fake.activations for fake in stack.gym.fakes.values()} == {0}

    run(main())

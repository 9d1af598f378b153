"""Every message to every Gym server goes wrong once, in every way: the engine over Gym on
virtual time. Whatever happens, everyone who lives runs again at the end (S1, S6)."""

from __future__ import annotations

import pytest

from fsm import hold
from fsm.config import EngineConfig
from fsm.engine import SnapshotEngine
from fsm.outcome import Aborted, Restored, RestoreFailed, Saved
from participants.gym import wire
from participants.gym.fake import FakeGym, Fault
from participants.gym.participant import Gym
from participants.virtual_time import run
from storage.memory import MemoryDisk, MemoryStore
from tests.gym_support import actor_of, continuation, fake_gym

NAMES = ("p0", "p1", "a0", "a1", "tools")
FAULTS = {  # how it goes wrong: does the client's own retry cure it?
    "refuse": Fault("", "refuse"),
    "late": Fault("", "late"),
    "lose": Fault("", "lose", times=3),
    "crash": Fault("", "crash"),
}


def engine_of(gym: FakeGym, disk: MemoryDisk) -> SnapshotEngine:
    """A controller that starts; the one before it has died without closing anything."""
    disk.holder = None
    return SnapshotEngine(EngineConfig(), MemoryStore(disk), [Gym([actor_of(gym)])])


def with_a_rollout(gym: FakeGym) -> FakeGym:
    gym["a0"].report = wire.Report("", continuations=(continuation("p7_g2", tools=3),))
    gym["tools"].report = wire.Report("", revisions={"p7_g2": 3})
    return gym


def break_it(gym: FakeGym, name: str, operation: str, what: str) -> None:
    fault = FAULTS[what]
    gym[name].faults.append(Fault(operation, fault.what, times=fault.times))


def all_run(gym: FakeGym) -> bool:
    return all(fake.phase == hold.OPEN for fake in gym.fakes.values() if fake.alive)


def test_a_snapshot_that_nothing_disturbs() -> None:
    async def main() -> None:
        gym, disk = with_a_rollout(fake_gym()), MemoryDisk()
        outcome = await engine_of(gym, disk).save()
        assert isinstance(outcome, Saved), outcome
        assert outcome.unreleased == {}
        assert outcome.facts["gym"]["continuations"] == 1
        assert "_rows" not in outcome.facts["gym"]
        assert all_run(gym)

        restored = await engine_of(gym, disk).restore()
        assert isinstance(restored, Restored)
        assert restored.snapshot == outcome.snapshot
        assert {fake.activations for fake in gym.fakes.values()} == {1}
        assert all_run(gym)

    run(main())


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("operation", ["prepare", "drain", "commit"])
@pytest.mark.parametrize("name", NAMES)
def test_a_failure_before_publish_ends_with_everyone_running(
    name: str, operation: str, what: str
) -> None:
    async def main() -> None:
        gym, disk = with_a_rollout(fake_gym()), MemoryDisk()
        engine = engine_of(gym, disk)
        break_it(gym, name, operation, what)
        outcome = await engine.save()
        assert isinstance(outcome, Aborted), outcome
        assert name in outcome.cause.detail
        assert disk.snapshots == {}
        assert disk.drafts == {}
        assert all_run(gym)
        silent = frozenset({name}) if what == "crash" else frozenset()
        assert outcome.unreleased.get("gym", frozenset()) == silent

        gym[name].go_on.set()  # what was late arrives after all, and changes nothing
        if what == "crash":
            gym[name].restart()
        again = await engine.save()
        assert isinstance(again, Saved), again
        assert all_run(gym)

    run(main(), seed=1)


@pytest.mark.parametrize("operation", ["drain", "commit", "resume"])
@pytest.mark.parametrize("name", NAMES)
def test_a_lease_that_ends_under_a_save(name: str, operation: str) -> None:
    async def main() -> None:
        gym = with_a_rollout(fake_gym())
        gym[name].faults.append(Fault(operation, "lapse"))
        outcome = await engine_of(gym, MemoryDisk()).save()
        # After the cut the parts describe one instant: the snapshot is good (S4).
        assert isinstance(outcome, Saved if operation == "resume" else Aborted), outcome
        assert outcome.unreleased == {}
        assert all_run(gym)

    run(main(), seed=2)


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_release_that_fails_after_publish(name: str, what: str) -> None:
    async def main() -> None:
        gym = with_a_rollout(fake_gym())
        break_it(gym, name, "resume", what)
        outcome = await engine_of(gym, MemoryDisk()).save()
        assert isinstance(outcome, Saved), outcome
        assert all_run(gym)
        silent = frozenset({name}) if what == "crash" else frozenset()
        assert outcome.unreleased.get("gym", frozenset()) == silent

    run(main(), seed=3)


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("operation", ["fence", "drain", "restore"])
@pytest.mark.parametrize("name", NAMES)
def test_a_restore_that_fails_activates_nothing(name: str, operation: str, what: str) -> None:
    async def main() -> None:
        gym, disk = with_a_rollout(fake_gym()), MemoryDisk()
        assert isinstance(await engine_of(gym, disk).save(), Saved)
        before = {folder: dict(files) for folder, files in disk.snapshots.items()}

        break_it(gym, name, operation, what)
        with pytest.raises(RestoreFailed):
            await engine_of(gym, disk).restore()
        assert {fake.activations for fake in gym.fakes.values()} == {0}
        assert all_run(gym)
        assert disk.snapshots == before

        gym[name].go_on.set()
        if what == "crash":
            gym[name].restart()
        await engine_of(gym, disk).restore()
        assert {fake.activations for fake in gym.fakes.values()} == {1}
        assert all_run(gym)

    run(main(), seed=4)


def test_a_straggler_is_named_in_the_outcome() -> None:
    async def main() -> None:
        gym = fake_gym()
        gym["a0"].blockers = ("p7_g2",)
        outcome = await engine_of(gym, MemoryDisk()).save()
        assert isinstance(outcome, Aborted)
        assert outcome.cause.code == "not_parked"
        assert "p7_g2" in outcome.cause.detail
        assert all_run(gym)

    run(main())


def test_a_start_from_nothing_through_the_engine() -> None:
    async def main() -> None:
        gym = fake_gym()
        restored = await engine_of(gym, MemoryDisk()).restore(if_none="start")
        assert restored.snapshot is None
        assert {fake.activations for fake in gym.fakes.values()} == {1}
        assert all_run(gym)

    run(main())

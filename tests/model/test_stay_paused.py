"""S11: a save that keeps everyone paused, for a job that is about to be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from fsm.outcome import Aborted, InvariantError, Saved, Skipped, SkipReason
from participants.memory import Fault
from participants.virtual_time import run
from tests.model.test_engine import CONFIG, World

LONG_S = 100 * CONFIG.lease_s


def held(world: World) -> list[bool]:
    return [one.is_held for one in world.everyone]


async def staying() -> tuple[World, Saved]:
    world = World()
    world.gym.work("turn 1")
    outcome = await world.engine.save(then="stay_paused")
    assert isinstance(outcome, Saved)
    return world, outcome


def test_leases_are_renewed_until_everyone_is_let_go() -> None:
    async def main() -> None:
        world, outcome = await staying()
        assert world.snapshots() == [outcome.snapshot]
        assert outcome.unreleased == {}
        await asyncio.sleep(LONG_S)
        assert held(world) == [True] * 3
        assert await world.engine.let_go() == {}
        world.assert_all_run()
        assert await world.engine.let_go() == {}, "safe to repeat"
        assert isinstance(await world.engine.save(), Saved)

    run(main())


def test_the_snapshot_can_be_restored_by_the_next_process() -> None:
    async def main() -> None:
        old, outcome = await staying()
        old.store.crash()
        new = World(disk=old.store.disk)
        assert (await new.engine.restore()).snapshot == outcome.snapshot
        assert new.gym.items == ["turn 1"]

    run(main())


def test_attempts_are_skipped_and_a_restore_is_refused_meanwhile() -> None:
    async def main() -> None:
        world, _ = await staying()
        skipped = await world.engine.save()
        assert isinstance(skipped, Skipped)
        assert skipped.reason is SkipReason.STAYING_PAUSED
        with pytest.raises(ValueError, match=r"call let_go\(\) first"):
            await world.engine.restore()
        assert held(world) == [True] * 3

    run(main())


def test_status_says_so() -> None:
    async def main() -> None:
        world, _ = await staying()
        await asyncio.sleep(1)
        activity = world.engine.activity()
        assert activity is not None
        assert (activity.state, activity.step, activity.left_s) == ("staying", "stay", None)
        await world.engine.let_go()
        assert world.engine.activity() is None

    run(main())


def test_a_hold_that_is_lost_releases_the_others() -> None:
    async def main() -> None:
        world, _ = await staying()
        world.gym.crash()
        await asyncio.sleep(2 * CONFIG.renew_every_s)
        world.assert_all_run()
        assert isinstance(await world.engine.save(), Saved)

    run(main())


def test_a_hold_that_was_lost_while_sealing_is_noticed() -> None:
    """After the cut a lost hold spoils nothing, and the renewal has ended with it."""

    async def main() -> None:
        world = World()
        publish = world.store.faults.next_publish(held=True)
        save = asyncio.create_task(world.engine.save(then="stay_paused"))
        await publish.reached.wait()
        world.gym.crash()
        await asyncio.sleep(2 * CONFIG.renew_every_s)
        publish.release()
        assert isinstance(await save, Saved)
        await asyncio.sleep(1)
        world.assert_all_run()

    run(main())


@pytest.mark.parametrize("hook", ["prepare", "commit"])
def test_a_failure_before_publish_releases_everyone(hook: str) -> None:
    async def main() -> None:
        world = World()
        world.gym.fault(hook, Fault.refuse())
        assert isinstance(await world.engine.save(then="stay_paused"), Aborted)
        world.assert_all_run()
        assert world.engine.activity() is None

    run(main())


def test_a_caller_that_is_cancelled_keeps_nobody_paused() -> None:
    async def main() -> None:
        world = World()
        publish = world.store.faults.next_publish(held=True)
        save = asyncio.create_task(world.engine.save(then="stay_paused"))
        await publish.reached.wait()
        save.cancel()
        await asyncio.sleep(1)
        publish.release()
        with pytest.raises(asyncio.CancelledError):
            await save
        world.assert_all_run()

    run(main())


def test_closing_leaves_the_end_of_the_holds_to_their_leases() -> None:
    """What ran now would run without a controller."""

    async def main() -> None:
        world, _ = await staying()
        await world.engine.close()
        assert held(world) == [True] * 3
        assert "resume" not in world.gym.hooks()
        await asyncio.sleep(2 * CONFIG.lease_s)
        world.assert_all_run()

    run(main())


def test_who_does_not_confirm_is_named_and_asked_again_by_the_next_attempt() -> None:
    async def main() -> None:
        world, _ = await staying()
        world.gym.fault("resume", *[Fault.refuse("away")] * CONFIG.resume_attempts)
        silent: Mapping[str, frozenset[str]] = await world.engine.let_go()
        assert silent == {"gym": frozenset({"gym"})}
        assert isinstance(await world.engine.save(), Saved), "the retry reached it"

    run(main())


def test_a_bug_in_the_background_reaches_the_trainer() -> None:
    """S9."""

    async def main() -> None:
        world, _ = await staying()
        world.gym.fault("resume", Fault.bug())
        with pytest.raises(InvariantError, match="ZeroDivisionError"):
            await world.engine.let_go()
        world.assert_all_run()

    run(main())


def test_a_bug_of_a_hold_that_ended_by_itself_is_raised_by_the_next_attempt() -> None:
    async def main() -> None:
        world, _ = await staying()
        world.data_plane.fault("resume", Fault.bug())
        world.gym.crash()
        await asyncio.sleep(2 * CONFIG.renew_every_s)
        with pytest.raises(InvariantError, match="ZeroDivisionError"):
            await world.engine.save()
        world.assert_all_run()

    run(main())


def test_another_word_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="'resume' or 'stay_paused'"):
            await World().engine.save(then="stay")  # type: ignore[arg-type]

    run(main())

"""Whatever is around a save or a restore may stop it, in any state: everyone runs afterwards,
nothing is half published, and the cancellation is passed on (S1, S2, S6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from attrs import evolve

from fsm.outcome import RestoreFailed, Saved, Skipped, SkipReason
from fsm.restore import RESTORE
from fsm.save import SAVE, SAVE_RELEASE_AT_CUT
from fsm.table import Table
from participants.memory import Fault
from participants.virtual_time import run
from storage.memory import MemoryStore
from tests.world import CONFIG, NAMES, World

LATENCY_S = 1.0  # of every answer, so that every state lasts a while
Main = Callable[[], Coroutine[Any, Any, Any]]


class SiblingError(Exception):
    pass


# -- three ways to be stopped from outside -------------------------------------------------------


async def by_cancel(main: Main, reached: Main) -> None:
    task = asyncio.ensure_future(main())
    await reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_timeout(main: Main, reached: Main) -> None:
    async def expires(limit: asyncio.Timeout) -> None:
        await reached()
        limit.reschedule(asyncio.get_running_loop().time())

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            watching = asyncio.ensure_future(expires(limit))
            await main()
    await watching


async def by_task_group(main: Main, reached: Main) -> None:
    async def fails() -> None:
        await reached()
        raise SiblingError

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as group:
            group.create_task(main())
            group.create_task(fails())
    assert [type(error) for error in raised.value.exceptions] == [SiblingError]


WAYS = [by_cancel, by_timeout, by_task_group]


def until(world: World, state: str) -> Main:
    async def reached() -> None:
        for _ in range(1_000):
            activity = world.engine.activity()
            if activity is not None and activity.state == state:
                return
            await asyncio.sleep(LATENCY_S / 4)
        raise AssertionError(f"state {state!r} was not reached")

    return reached


# -- how to come into a state that a healthy run does not enter ----------------------------------


def nothing(_: World) -> None:
    pass


def a_refused_commit(world: World) -> None:
    world.stations["gym"].fault("commit", Fault.refuse())


def a_publish_that_takes_long(world: World) -> None:
    world.controller.memory.faults.next_publish(held=True)


def a_disk_that_is_full(world: World) -> None:
    world.controller.memory.faults.fail("seal", OSError(28, "No space left on device"))


def a_refused_restore(world: World) -> None:
    world.stations["gym"].fault("restore", Fault.refuse())


DETOURS = {
    ("save", "aborting"): a_refused_commit,
    ("save", "unresolved"): a_publish_that_takes_long,
    ("save_release_at_cut", "aborting"): a_refused_commit,
    ("save_release_at_cut", "discarding"): a_disk_that_is_full,
    ("restore", "aborting"): a_refused_restore,
}


def states(*tables: Table) -> list[Any]:
    return [
        pytest.param(table, line.name, id=f"{table.name}-{line.name}")
        for table in tables
        for line in table.lines
        if not line.terminal
    ]


def is_published(table: Table, state: str) -> bool:
    """After a cancellation in `state`. While rollouts are released it is only remembered, and
    with release_at="cut" that comes before publish."""
    if table is SAVE:
        return state in ("sealed", "published")
    return state in ("rl_cut", "sealed")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("table", "state"), states(SAVE, SAVE_RELEASE_AT_CUT))
def test_a_save_stopped_in_any_state(table: Table, state: str, way: Any) -> None:
    async def main() -> None:
        release_at = "publish" if table is SAVE else "cut"
        world = World(evolve(CONFIG, release_at=release_at), LATENCY_S)
        world.work("gym", "turn 1")
        DETOURS.get((table.name, state), nothing)(world)
        await way(world.engine.save, until(world, state))
        assert world.held() == []
        assert len(world.snapshots()) == is_published(table, state)
        assert [world.problems_of(snapshot) for snapshot in world.snapshots()] in ([], [[]])
        assert world.witness.broken == []
        again = await world.engine.save()
        if state == "unresolved":
            assert again == Skipped(SkipReason.PUBLISH_UNRESOLVED)
        else:
            assert world.disk.drafts == {}
            assert isinstance(again, Saved)

    run(main())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("table", "state"), states(RESTORE))
def test_a_restore_stopped_in_any_state(table: Table, state: str, way: Any) -> None:
    """R1: all of it or nothing of it; R5: the next one gives what was saved."""

    async def main() -> None:
        world = World(latency_s=LATENCY_S)
        for name in NAMES:
            world.work(name, f"{name} before")
        saved = await world.engine.save()
        assert isinstance(saved, Saved)
        world.controller.die()
        world.new_controller()
        for name in NAMES:
            world.work(name, f"{name} after")
        before = world.witness.items()
        DETOURS.get((table.name, state), nothing)(world)
        await way(world.engine.restore, until(world, state))
        assert world.held() == []
        whole = world.saved_items(saved.snapshot)
        assert world.witness.items() == (whole if state == "controller_loaded" else before)
        assert world.witness.broken == []
        await world.engine.restore()
        assert world.witness.items() == whole

    run(main())


@pytest.mark.parametrize("release_at", ["publish", "cut"])
def test_a_save_that_is_cancelled_again_and_again(release_at: Any) -> None:
    """An impatient caller does not stop the release either."""

    async def main() -> None:
        world = World(evolve(CONFIG, release_at=release_at), LATENCY_S)
        save = asyncio.ensure_future(world.engine.save())
        await until(world, "drained")()
        while not save.done():
            save.cancel()
            await asyncio.sleep(0.05)
        assert save.cancelled()
        assert world.held() == []
        assert world.snapshots() == []
        assert isinstance(await world.engine.save(), Saved)

    run(main())


@pytest.mark.parametrize("release_at", ["publish", "cut"])
def test_a_save_cancelled_at_any_turn_of_the_loop(release_at: Any) -> None:
    """Not only in every state but at every point where the engine waits."""

    async def cancelled_at(turn: int) -> bool:
        world = World(evolve(CONFIG, release_at=release_at))
        save = asyncio.ensure_future(world.engine.save())
        for _ in range(turn):
            await asyncio.sleep(0)
        save.cancel()
        await asyncio.wait({save})
        assert world.held() == []
        assert len(world.snapshots()) <= 1
        assert [world.problems_of(snapshot) for snapshot in world.snapshots()] in ([], [[]])
        assert isinstance(await world.engine.save(), Saved)
        return save.cancelled()

    turns = 0
    while run(cancelled_at(turns)):
        turns += 1
    assert turns > len(SAVE.states), "it was cancelled in every state on the way"


def test_a_restore_cancelled_at_any_turn_of_the_loop() -> None:
    async def cancelled_at(turn: int) -> bool:
        world = World()
        restore = asyncio.ensure_future(world.engine.restore(if_none="start"))
        for _ in range(turn):
            await asyncio.sleep(0)
        restore.cancel()
        await asyncio.wait({restore})
        assert world.held() == []
        assert (await world.engine.restore(if_none="start")).snapshot is None
        return restore.cancelled()

    turns = 0
    while run(cancelled_at(turns)):
        turns += 1
    assert turns > len(RESTORE.states)


def test_a_cancelled_opening_does_not_lock_the_engine_out() -> None:
    """F6: the root that it took meanwhile is its own."""

    async def main() -> None:
        world = World(latency_s=LATENCY_S)
        restore = asyncio.ensure_future(world.engine.restore(if_none="start"))
        await asyncio.sleep(0.5)
        assert world.disk.holder is not None
        restore.cancel()
        await asyncio.wait({restore})
        assert (await world.engine.restore(if_none="start")).snapshot is None

    run(main())


# -- failures that look like a stop from outside, or like nothing at all -------------------------


@pytest.mark.parametrize("hook", ["pause", "prepare", "drain", "commit", "cut"])
def test_a_hook_that_raises_cancelled_error_has_failed(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task group takes such a child for ended: the part must not be taken for written."""

    async def main() -> None:
        world = World()

        async def gives_up(_: object) -> None:
            raise asyncio.CancelledError

        monkeypatch.setattr(world.stations["gym"], hook, gives_up)
        # Not through the wire, which says "died" for a call that was cancelled over there.
        outcome = await direct(world).save()
        assert (outcome.cause.step, outcome.cause.participant) == (hook, "gym")
        assert world.held() == []
        assert world.snapshots() == []

    run(main())


def test_a_release_that_raises_cancelled_error_keeps_nobody_else_held() -> None:
    async def main() -> None:
        world = World()
        engine = direct(world)

        async def gives_up(_: object) -> None:
            raise asyncio.CancelledError

        world.stations["gym"].resume = gives_up  # type: ignore[method-assign]
        outcome = await engine.save()
        assert outcome.unreleased == {"gym": frozenset({"gym"})}
        assert world.held() == ["gym"]

    run(main())


def direct(world: World) -> Any:
    """An engine that calls the stations without a wire."""
    engine = type(world.engine)
    return engine(world.config, MemoryStore(world.disk), world.stations.values())


def test_silent_servers_do_not_keep_dispatch_from_being_opened() -> None:
    """S6: the release of a rank has its own time, however long the ranks before it took."""

    async def main() -> None:
        world = World(evolve(CONFIG, resume_attempts=1))
        for name in ("gym", "data_plane"):
            world.stations[name].fault("resume", Fault.hang())
        outcome = await world.engine.save()
        assert outcome.unreleased.keys() == {"gym", "data_plane"}
        assert "resume" in world.stations["controller"].hooks()

    run(main())


def test_a_publish_that_raises_is_unknown_and_releases_everyone() -> None:
    """S2: an error says nothing about the rename."""

    async def main() -> None:
        world = World()

        async def raises(_: object) -> None:
            raise OSError(5, "Input/output error")

        world.controller.memory.publish = raises  # type: ignore[method-assign]
        outcome = await world.engine.save()
        assert type(outcome).__name__ == "Unresolved"
        assert world.held() == []

    run(main())


def test_a_restore_that_is_cancelled_and_not_rolled_back_says_which_servers() -> None:
    """The names matter more than the cancellation: these servers must be started afresh."""

    async def main() -> None:
        world = World(latency_s=LATENCY_S)
        assert isinstance(await world.engine.save(), Saved)
        world.stations["gym"].fault("restore", Fault.hang())
        world.stations["gym"].fault("rollback", *[Fault.hang()] * CONFIG.resume_attempts)
        restore = asyncio.ensure_future(world.engine.restore())
        await until(world, "data_plane_loaded")()
        restore.cancel()
        with pytest.raises(RestoreFailed, match="not confirmed by gym"):
            await restore

    run(main())


def test_a_preflight_that_hangs_is_left_out() -> None:
    """S7: nobody is paused yet, but the lock is held."""

    async def main() -> None:
        world = World()
        world.controller.store.slow["begin"] = 10_000.0
        outcome = await world.engine.save()
        assert isinstance(outcome, Skipped)
        assert outcome.reason is SkipReason.PARTICIPANT
        world.controller.store.slow.clear()
        assert isinstance(await world.engine.save(), Saved)

    run(main())

"""The engine as a trainer embeds it: timer, failure limit, locks, anchors, wrong parts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from participants.memory import Fault, MemoryParticipant
from participants.virtual_time import run
from quiesce import (
    Aborted,
    AbortReason,
    Anchor,
    AsyncBarrier,
    Attempt,
    Cause,
    Config,
    Engine,
    InvariantError,
    MemoryStore,
    Participant,
    Saved,
    SaveOutcome,
    Skipped,
    SkipReason,
    TooManyFailures,
    Unresolved,
)
from quiesce.failures import Failures
from storage.manifest import decode

EVERY_S = 10.0
CONFIG = Config(snapshot_attempt_interval_s=EVERY_S, lease_s=30, renew_every_s=5)


def new(config: Config = CONFIG, **more: Any) -> tuple[Engine, MemoryParticipant, MemoryStore]:
    one, store = MemoryParticipant("sandboxes"), MemoryStore()
    return Engine(config, store, [one], **more), one, store


# -- the timer -------------------------------------------------------------------------------------


def test_the_timer_counts_from_the_end_of_the_last_attempt() -> None:
    async def main() -> None:
        engine, one, store = new()
        one.fault("drain", Fault.late(5))
        async with engine.running():
            await asyncio.sleep(EVERY_S + 5 + EVERY_S + 1)
        assert len(store.disk.snapshots) == 2
        await asyncio.sleep(5 * EVERY_S)
        assert len(store.disk.snapshots) == 2, "nothing goes on after leaving"

    run(main())


def test_without_an_interval_nothing_is_attempted() -> None:
    async def main() -> None:
        engine, _, store = new(Config())
        async with engine.running():
            await asyncio.sleep(1000)
        assert store.disk.snapshots == {}

    run(main())


def test_leaving_aborts_the_attempt_under_way_and_releases() -> None:
    async def main() -> None:
        engine, one, store = new()
        one.fault("drain", Fault.hang())
        async with engine.running():
            await asyncio.sleep(EVERY_S + 1)
            assert one.is_held
        assert not one.is_held
        assert store.disk.snapshots == {}

    run(main())


def test_a_bug_is_raised_in_the_trainer_and_cancels_its_body() -> None:
    """S9, as a TaskGroup does."""

    async def main() -> None:
        engine, one, _ = new()
        one.fault("commit", Fault.bug())
        with pytest.raises(ExceptionGroup) as raised:
            async with engine.running():
                await asyncio.sleep(10 * EVERY_S)
        assert [type(error) for error in raised.value.exceptions] == [InvariantError]
        assert not one.is_held

    run(main())


def test_running_twice_is_refused_and_again_is_fine() -> None:
    async def main() -> None:
        engine, _, store = new()
        async with engine.running():
            with pytest.raises(ValueError, match="running already"):
                async with engine.running():
                    pass
        async with engine.running():
            await asyncio.sleep(EVERY_S + 1)
        assert len(store.disk.snapshots) == 1

    run(main())


# -- the failure limit (S9) ------------------------------------------------------------------------


def test_our_own_failures_in_a_row_are_raised() -> None:
    async def main() -> None:
        engine, _, store = new()
        store.faults.fail("seal", OSError(28, "No space left on device"), sticky=True)
        with pytest.raises(ExceptionGroup) as raised:
            async with engine.running():
                await asyncio.sleep(100 * EVERY_S)
        error = raised.value.exceptions[0]
        assert isinstance(error, TooManyFailures)
        assert "3 attempts failed in a row" in str(error)
        assert "No space left on device" in str(error)

    run(main())


@pytest.mark.parametrize(
    "fault", [Fault.lost(), Fault.hang(), Fault.refuse()], ids=lambda f: f.kind
)
def test_servers_that_are_away_are_only_warned_about(
    fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        engine, one, store = new()
        one.fault("drain", *[fault] * 6)
        async with engine.running():
            await asyncio.sleep(7 * (EVERY_S + CONFIG.prepare_timeout_s + 10))
        assert len(store.disk.snapshots) > 0, "it went on to try"

    run(main())
    assert "3 attempts failed in a row" in caplog.text
    assert "2 attempts failed in a row" not in caplog.text


AWAY = Aborted(Cause("drain", AbortReason.UNAVAILABLE, "gym", "away"), {})
STRAGGLER = Aborted(Cause("drain", AbortReason.TIMEOUT, None, "late"), {})
SLOW_DISK = Aborted(Cause("seal", AbortReason.TIMEOUT, None, "late"), {})
SAVED = Saved("snapshot_000001-000001", True, {}, 0.0)
HELD_OFF = Skipped(SkipReason.HELD_OFF)
HANGING = Unresolved("snapshot_000001-000001", {})
STILL_HANGING = Skipped(SkipReason.PUBLISH_UNRESOLVED)


@pytest.mark.parametrize(
    ("outcomes", "raised"),
    [
        ([SLOW_DISK] * 2, False),
        ([SLOW_DISK] * 3, True),
        ([SLOW_DISK, AWAY, SLOW_DISK, HELD_OFF, STRAGGLER, SLOW_DISK], True),
        ([SLOW_DISK, SLOW_DISK, SAVED, SLOW_DISK, SLOW_DISK], False),
        ([AWAY, STRAGGLER] * 9, False),
        ([HANGING, STILL_HANGING, STILL_HANGING], True),
    ],
)
def test_only_our_own_failures_count_and_a_snapshot_forgives(
    outcomes: list[SaveOutcome], raised: bool
) -> None:
    failures = Failures(limit=3)
    for outcome in outcomes:
        failures.check()
        failures.note(outcome)
    with pytest.raises(TooManyFailures) if raised else nullcontext():
        failures.check()


def test_a_snapshot_of_the_trainers_own_forgives_too() -> None:
    async def main() -> None:
        engine, _, store = new()
        full = OSError(28, "No space left on device")
        async with engine.running():
            await asyncio.sleep(1)  # between two attempts of the timer
            for _ in range(4):
                for _ in range(CONFIG.max_consecutive_failures - 1):
                    store.faults.fail("seal", full)
                    await asyncio.sleep(EVERY_S)
                async with engine.exclusive("trainer_save") as outcomes:
                    pass
                assert isinstance(outcomes[0], Saved)

    run(main())


def test_a_root_without_room_is_raised_too() -> None:
    async def main() -> None:
        engine, _, store = new()
        store.faults.fail("begin", OSError(28, "No space left on device"), sticky=True)
        with pytest.raises(ExceptionGroup) as raised:
            async with engine.running():
                await asyncio.sleep(100 * EVERY_S)
        assert raised.group_contains(TooManyFailures, match="No space left")

    run(main())


# -- one at a time (S8) ----------------------------------------------------------------------------


def test_exclusive_takes_the_snapshot_that_belongs_to_its_body() -> None:
    async def main() -> None:
        at = [Anchor(0, "first")]
        engine, _, store = new(anchor=lambda: at[0])
        async with engine.exclusive("trainer_save") as outcomes:
            assert await engine.save() == Skipped(SkipReason.ATTEMPT_IN_PROGRESS)
            at[0] = Anchor(1, "second")
        (outcome,) = outcomes
        assert isinstance(outcome, Saved)
        manifest = decode(store.disk.snapshots[outcome.snapshot]["manifest.json"])
        assert manifest.anchor == Anchor(1, "second")

    run(main())


def test_a_body_that_raises_gets_no_snapshot() -> None:
    async def main() -> None:
        engine, one, store = new()
        with pytest.raises(OSError, match="disk"):
            async with engine.exclusive("trainer_save"):
                raise OSError("the trainer's disk")
        assert store.disk.snapshots == {}
        assert one.hooks() == []
        assert isinstance(await engine.save(), Saved), "the lock is free again"

    run(main())


def test_exclusive_waits_for_an_attempt_under_way() -> None:
    async def main() -> None:
        engine, one, store = new()
        one.fault("drain", Fault.late(5))
        save = asyncio.create_task(engine.save())
        await asyncio.sleep(1)
        async with engine.exclusive("trainer_save"):
            assert save.done()
        assert len(store.disk.snapshots) == 2

    run(main())


@pytest.mark.parametrize("what", ["restore", "close", "exclusive"])
def test_what_would_wait_for_itself_is_refused(what: str) -> None:
    async def main() -> None:
        engine, _, _ = new()
        with pytest.raises(ValueError, match=f"{what} inside of exclusive"):
            async with engine.exclusive("trainer_save"):
                if what == "exclusive":
                    async with engine.exclusive("again"):
                        pass
                else:
                    await getattr(engine, what)()

    run(main())


def test_held_off_during_a_cut_without_a_barrier_aborts() -> None:
    """What the trainer changes inside `hold_off` would be half in the snapshot."""

    async def main() -> None:
        in_cut, go = asyncio.Event(), asyncio.Event()

        class Books(Participant):
            name = "books"

            async def cut(self, attempt: Attempt) -> None:
                in_cut.set()
                await go.wait()

        for barrier, expected in ((None, Aborted), (AsyncBarrier(), Saved)):
            in_cut.clear()
            go.clear()
            engine = Engine(CONFIG, MemoryStore(), [Books()], barrier=barrier)
            save = asyncio.create_task(engine.save())
            await in_cut.wait()
            with engine.hold_off("step"):
                pass
            go.set()
            outcome = await save
            assert isinstance(outcome, expected)
            if isinstance(outcome, Aborted):
                assert outcome.reason is AbortReason.TRAINER_MOVED

    run(main())


# -- anchors ---------------------------------------------------------------------------------------


def test_restore_says_which_weights_to_load() -> None:
    """R6."""

    async def main() -> None:
        engine, one, store = new(anchor=lambda: Anchor(7, "digest"))
        await engine.save()
        await engine.close()
        again = Engine(CONFIG, MemoryStore(store.disk), [one])
        assert (await again.restore()).anchor == Anchor(7, "digest")

    run(main())


def test_pruning_keeps_the_newest_snapshot_of_each_anchor_that_is_kept() -> None:
    async def main() -> None:
        at, kept = [0], [0]
        store, one = MemoryStore(), MemoryParticipant("sandboxes")
        engine = Engine(
            Config(keep_latest=1),
            store,
            [one],
            anchor=lambda: Anchor(at[0], "w"),
            kept_anchors=lambda: kept,
        )
        taken: dict[int, list[str]] = {}
        for step in (0, 0, 1, 2, 2):
            at[0] = step
            outcome = await engine.save()
            assert isinstance(outcome, Saved)
            taken.setdefault(step, []).append(outcome.snapshot)
        assert sorted(store.disk.snapshots) == [taken[0][-1], taken[2][-1]]
        kept.remove(0)
        await engine.save()
        assert len(store.disk.snapshots) == 1

    run(main())


@pytest.mark.parametrize("keep_latest", [1, 3])
def test_the_configuration_says_how_many_snapshots_are_kept(keep_latest: int) -> None:
    async def main() -> None:
        engine, _, store = new(Config(keep_latest=keep_latest))
        for _ in range(5):
            await engine.save()
        assert len(store.disk.snapshots) == keep_latest

    run(main())


def test_kept_anchors_are_steps() -> None:
    async def main() -> None:
        engine, _, _ = new(kept_anchors=lambda: ["step_3"])
        with pytest.raises(ValueError, match=r"trainer steps \(ints\), not 'step_3'"):
            await engine.save()

    run(main())


@pytest.mark.parametrize("step", [None, -1, 1.5, True, "3"])
def test_an_anchor_needs_a_step(step: Any) -> None:
    with pytest.raises(ValueError, match=r"Anchor\.step must be an int"):
        Anchor(step, "digest")


def test_a_source_that_gives_no_anchor_is_a_wrong_call() -> None:
    async def main() -> None:
        engine, one, _ = new(anchor=lambda: {"step": 3})
        with pytest.raises(ValueError, match=r"anchor must give an Anchor\(step, fingerprint\)"):
            await engine.save()
        assert one.hooks() == []

    run(main())


# -- wrong parts -----------------------------------------------------------------------------------


class Sync(Participant):
    name = "sync"

    def commit(self, attempt: Attempt) -> None:  # type: ignore[override]
        pass


class Nameless(Participant):
    pass


def named(name: str, **more: Any) -> MemoryParticipant:
    return MemoryParticipant(name, **more)


def wrong_parts() -> Iterator[tuple[str, dict[str, Any], str]]:
    one = named("one")
    yield "no config", {"config": {"lease_s": 3}}, r"use Config\.from_mapping"
    yield "a path", {"store": "/tmp/root"}, r"use FolderStore\('/tmp/root'\)"
    yield "no store", {"store": object()}, "object is no store: it has no"
    yield "no barrier", {"barrier": object()}, r"without cut\(\)"
    yield "an anchor", {"anchor": Anchor(1, "w")}, "anchor must be a function"
    yield "a list of anchors", {"kept_anchors": [1]}, "kept_anchors must be a function"
    yield "a class", {"participants": [MemoryParticipant]}, "give an instance"
    yield "no name", {"participants": [Nameless()]}, r"Nameless\.name is None"
    yield "a bad name", {"participants": [named("a/b")]}, "it names a folder"
    yield "a bad step", {"participants": [named("a", restore_step="x")]}, "restore_step is 'x'"
    yield "not async", {"participants": [Sync()]}, "write `async def commit`"
    yield "two of a name", {"participants": [one, named("one")]}, "give one another name"
    yield "unknown", {"participants": [named("a", calls={"gmy"})]}, "'gmy', which is not one of: a"
    circle = [named("a", calls={"b"}), named("b", calls={"a"})]
    yield "a circle", {"participants": circle}, "in a circle: a, b"


@pytest.mark.parametrize(
    ("change", "why"), [w[1:] for w in wrong_parts()], ids=[w[0] for w in wrong_parts()]
)
def test_wrong_parts_are_refused_at_once_with_what_to_do(change: dict[str, Any], why: str) -> None:
    parts: dict[str, Any] = {"config": CONFIG, "store": MemoryStore(), "participants": [named("a")]}
    with pytest.raises(ValueError, match=why):
        Engine(**(parts | change))


def test_a_save_before_the_first_restore_says_what_to_do() -> None:
    """F6.3: a history that is not gone on from would be forgotten in silence."""

    async def main() -> None:
        engine, one, store = new()
        await engine.save()
        await engine.close()
        again = Engine(CONFIG, MemoryStore(store.disk), [one])
        with pytest.raises(ValueError, match=r"call Engine\.restore\(\) before the first save"):
            await again.save()
        assert not one.is_held
        await again.restore()
        assert isinstance(await again.save(), Saved)

    run(main())

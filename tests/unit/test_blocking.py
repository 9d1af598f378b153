"""The engine for trainers without an event loop: same words, real threads."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from participants.memory import Fault, MemoryParticipant
from quiesce import (
    Anchor,
    Attempt,
    BlockingEngine,
    Config,
    InvariantError,
    MemoryStore,
    Participant,
    Saved,
    Skipped,
    SkipReason,
    TooManyFailures,
)

PATIENCE_S = 30.0


class Books(Participant):
    """The trainer's own books, read by the engine's thread. `reading` is set while it reads."""

    name = "books"

    def __init__(self) -> None:
        self.pages = 0
        self.read: list[int] = []
        self.reading, self.may_read = threading.Event(), threading.Event()
        self.may_read.set()
        self.threads: set[int] = set()

    async def cut(self, attempt: Attempt) -> None:
        self.threads.add(threading.get_ident())
        self.reading.set()
        await attempt.in_thread(lambda: self.may_read.wait(PATIENCE_S))
        self.read.append(self.pages)


@contextmanager
def engine(config: Config | None = None, **more: Any) -> Iterator[tuple[BlockingEngine, Any, Any]]:
    one, store = MemoryParticipant("sandboxes"), MemoryStore()
    with closing(BlockingEngine(config or Config(), store, [one], **more)) as made:
        yield made, one, store


def ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def quiesce_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "quiesce"]


def test_the_same_words_give_the_same_outcomes() -> None:
    with engine(anchor=lambda: Anchor(3, "w")) as (made, one, store):
        assert made.restore(if_none="start").snapshot is None
        outcome = made.save()
        assert isinstance(outcome, Saved)
        with made.hold_off("evaluation"):
            assert made.save() == Skipped(SkipReason.HELD_OFF, "evaluation")
        with made.exclusive("trainer_save") as outcomes:
            assert made.save() == Skipped(SkipReason.ATTEMPT_IN_PROGRESS)
        assert isinstance(outcomes[0], Saved)
        assert made.restore().anchor == Anchor(3, "w")
        assert isinstance(made.save(then="stay_paused"), Saved)
        assert one.is_held
        assert made.status()["now"] is not None
        assert made.let_go() == {}
        assert not one.is_held
    assert len(store.disk.snapshots) == 2


def test_hooks_run_in_one_thread_that_is_not_the_trainers() -> None:
    books = Books()
    with closing(BlockingEngine(Config(), MemoryStore(), [books])) as made:
        made.save()
        made.save()
    assert len(books.threads) == 1
    assert threading.get_ident() not in books.threads


def test_hold_off_waits_for_the_end_of_a_cut() -> None:
    """What the trainer changes inside is never read half changed."""
    books = Books()
    books.may_read.clear()
    with closing(BlockingEngine(Config(), MemoryStore(), [books])) as made:
        saving = threading.Thread(target=made.save)
        saving.start()
        assert books.reading.wait(PATIENCE_S)
        entering, entered = threading.Event(), threading.Event()

        def step() -> None:
            entering.set()
            with made.hold_off("step"):
                entered.set()
                books.pages += 1

        training = threading.Thread(target=step)
        training.start()
        assert entering.wait(PATIENCE_S)
        assert not entered.is_set()
        books.may_read.set()
        assert ended(saving)
        assert ended(training)
    assert (books.read, books.pages) == ([0], 1)


def test_a_bug_in_the_background_is_raised_in_the_trainers_thread() -> None:
    config = Config(snapshot_attempt_interval_s=0.01)
    with engine(config) as (made, one, _):
        one.fault("commit", Fault.bug())
        with pytest.raises(InvariantError, match="ZeroDivisionError"), made.running():
            wait_for_failure(made)
        made.check()
        assert isinstance(made.save(), Saved), "the engine lives on"


def wait_for_failure(made: BlockingEngine) -> None:
    """Calls `check` as a trainer does, between its steps, until it raises."""
    tick = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        made.check()
        tick.wait(0.01)
    raise AssertionError("check never raised")


@pytest.mark.parametrize("word", ["save", "hold_off", "exclusive"])
def test_every_word_raises_what_the_background_met(word: str) -> None:
    config = Config(snapshot_attempt_interval_s=0.01, max_consecutive_failures=1)
    with engine(config) as (made, _, store):
        store.faults.fail("seal", OSError(28, "No space left on device"), sticky=True)
        with pytest.raises(TooManyFailures, match="No space left"), made.running():
            with pytest.raises(TooManyFailures):
                wait_for_failure(made)
            with pytest.raises(TooManyFailures):
                made.save() if word == "save" else getattr(made, word)("x").__enter__()


def test_a_body_that_raises_gets_no_snapshot_and_the_engine_lives_on() -> None:
    with engine() as (made, _, store):
        with pytest.raises(OSError, match="disk"), made.exclusive("trainer_save"):
            raise OSError("the trainer's disk")
        assert store.disk.snapshots == {}
        with pytest.raises(KeyError), made.hold_off("step"):
            raise KeyError("step")
        assert isinstance(made.save(), Saved)


@pytest.mark.parametrize("what", ["restore", "close", "exclusive"])
def test_what_would_wait_for_itself_is_refused(what: str) -> None:
    with engine() as (made, _, _):
        refused = pytest.raises(ValueError, match=f"{what} inside of exclusive")
        with refused, made.exclusive("trainer_save"):
            if what == "exclusive":
                made.exclusive("again").__enter__()
            else:
                getattr(made, what)()
        assert isinstance(made.save(), Saved)


def test_wrong_parts_are_refused_in_the_trainers_thread_and_leave_no_thread() -> None:
    before = quiesce_threads()
    two = [MemoryParticipant("one"), MemoryParticipant("one")]
    with pytest.raises(ValueError, match="give one another name"):
        BlockingEngine(Config(), MemoryStore(), two)
    assert quiesce_threads() == before


def test_closing_ends_the_thread_and_later_words_are_refused() -> None:
    before = quiesce_threads()
    with engine() as (made, _, _):
        made.save()
    assert quiesce_threads() == before
    made.close()
    with pytest.raises(ValueError, match="closed: make another one"):
        made.save()


def test_a_restore_that_is_split() -> None:
    with engine() as (made, one, store):
        made.save()
        token = made.restore(until="gym_restored")
        assert one.is_held
        with closing(BlockingEngine(Config(), MemoryStore(store.disk), [one])) as second:
            assert second.restore(token).snapshot == token.snapshot
        made.let_go()
        assert not one.is_held


def test_ctrl_c_during_a_save_releases_everyone() -> None:
    """The trainer's thread is interrupted; the attempt is cancelled in the owner's."""

    class Straggler(MemoryParticipant):
        async def drain(self, attempt: Attempt) -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.get_running_loop().create_future()

    one, store = Straggler("sandboxes"), MemoryStore()
    made = BlockingEngine(Config(), store, [one])
    # A shell that starts this in the background has SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), closing(made):
            made.save()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not one.is_held
    assert store.disk.snapshots == {}


def test_closing_ends_a_save_that_goes_on() -> None:
    """An interrupt can come at an instant at which nobody can cancel the call."""
    reached = threading.Event()

    class Straggler(MemoryParticipant):
        async def drain(self, attempt: Attempt) -> None:
            reached.set()
            await asyncio.get_running_loop().create_future()

    one = Straggler("sandboxes")
    made = BlockingEngine(Config(), MemoryStore(), [one])
    raised: list[BaseException] = []

    def save() -> None:
        try:
            made.save()
        except BaseException as error:  # noqa: BLE001  looked at below
            raised.append(error)

    saving = threading.Thread(target=save)
    saving.start()
    assert reached.wait(PATIENCE_S)
    made.close()
    assert ended(saving)
    assert [type(error).__name__ for error in raised] == ["CancelledError"]
    assert not one.is_held

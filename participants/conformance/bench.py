"""The world of one test: an engine around the participant, and what happens to both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest
from attrs import evolve

from fsm.engine import SnapshotEngine
from fsm.outcome import (
    Anchor,
    InvariantError,
    QuiesceError,
    Refused,
    Restored,
    Saved,
    SaveOutcome,
    Skipped,
    SkipReason,
    Unavailable,
)
from fsm.participant import Participant
from fsm.storing import Store
from fsm.token import RestoreToken
from participants.conformance import rules
from participants.conformance.plugin import Plugin
from participants.conformance.relay import Witness, relay_to
from storage.memory import MemoryDisk, MemoryStore
from storage.store import FolderStore

ANCHOR = Anchor(0, "the weights of a test")
POLLS, UNDER_HOLD_S = 100, 0.1


class Bench:
    """One trainer's engine around one participant. Make it with `Benches`.

    first: the bench in the process that began a restore, and instance: what this one has of the
    participant, where it goes on with it. Stand-ins are servers: both processes reach the same.
    """

    def __init__(
        self,
        plugin: Plugin,
        one: Any,
        store: Store,
        first: Bench | None = None,
        instance: Any = None,
        **config: Any,
    ) -> None:
        self.plugin, self.one, self.store = plugin, one, store
        self.relay, self.witness = relay_to(instance or one), Witness(one.name)
        self.others: Iterable[Participant] = (
            list(plugin.others(one)) if first is None else first.others
        )
        self.engine = SnapshotEngine(
            evolve(plugin.config, resume_attempts=1, **config),
            store,
            [self.relay, self.witness, *self.others],
            barrier=plugin.barrier(one),
            anchor=lambda: ANCHOR,
        )

    # -- the engine ----------------------------------------------------------------------------

    async def save(self) -> SaveOutcome:
        while True:
            try:
                outcome = await self.engine.save()
            except InvariantError as bug:
                _bug(bug)
            if outcome != Skipped(SkipReason.PREVIOUS_CUT_RUNNING):
                return outcome
            await asyncio.sleep(0.01)  # a thread that a cancelled hook left behind; `limit_s` ends

    async def saved(self) -> Saved:
        outcome = await self.save()
        rules.SAVES.must(isinstance(outcome, Saved), outcome)
        assert isinstance(outcome, Saved)
        rules.CONFIRMED.must(outcome.unreleased == {}, outcome.unreleased)
        return outcome

    async def restore(self, **options: Any) -> Restored:
        """Raises what the engine raises, but for bugs."""
        try:
            restored: Restored = await self.engine.restore(**options)
            return restored
        except InvariantError as bug:
            _bug(bug)

    async def restored(self, rule: rules.Rule = rules.RESTORES, **options: Any) -> Restored:
        try:
            return await self.restore(**options)
        except QuiesceError as error:
            rule.must(False, error)
            raise

    async def begin_restore(self) -> RestoreToken:
        """Up to where another process may go on."""
        try:
            return await self.engine.restore(until="gym_restored")
        except InvariantError as bug:
            _bug(bug)
        except QuiesceError as error:
            rules.RESTORES.must(False, error)
            raise

    # -- the participant -----------------------------------------------------------------------

    async def work(self, number: int) -> None:
        await self.plugin.work(self.one, number)

    async def observe(self) -> Any:
        return await self.plugin.observe(self.one)

    async def is_held(self) -> bool:
        return await self.plugin.is_held(self.one)

    async def must_go_on(self, number: int) -> None:
        """It runs: not held, and work leaves something behind."""
        rules.RELEASED.must(not await self.is_held())
        before = await self.observe()
        try:
            async with asyncio.timeout(self.plugin.limit_s / 2):
                await self.work(number)
        except (Refused, TimeoutError) as error:
            rules.GOES_ON.must(False, repr(error))
        rules.GOES_ON.must(await self.observe() != before)

    async def must_show(self, rule: rules.Rule, wanted: Any) -> None:
        got = await self.observe()
        rule.must(got == wanted, rules.differ(got, wanted))

    async def becomes_free(self) -> bool:
        """Wait for a lease to end: about ten leases at the most."""
        for _ in range(POLLS):
            if not await self.is_held():
                return True
            await asyncio.sleep(self.engine.config.lease_s / 10)
        return False

    async def work_under_hold(self, number: int) -> asyncio.Task[None]:
        """Begin some work, and give it the time to do harm."""

        async def attempted() -> None:
            try:
                await self.work(number)
            except Refused:
                return

        task = asyncio.create_task(attempted())
        await asyncio.wait({task}, timeout=UNDER_HOLD_S)
        return task


class Benches:
    """Makes benches on one snapshot root, and closes all of them."""

    def __init__(self, plugin: Plugin, *, on_disk: bool) -> None:
        self._plugin = plugin
        self._disk = None if on_disk else MemoryDisk()
        self._engine: SnapshotEngine | None = None
        self._one: Any = None

    async def start(self, **config: Any) -> Bench:
        self._one = await self._plugin.make()
        return self._bench(**config)

    async def replace(self, **config: Any) -> Bench:
        """The trainer and the participant die; both come back with nothing."""
        await self._close_engine()
        one, self._one = self._one, None
        self._one = await self._plugin.crash_and_replace(one)
        return self._bench(**config)

    async def restart(self, **config: Any) -> Bench:
        """Only the trainer dies; the participant lives on."""
        await self._close_engine()
        return self._bench(**config)

    async def hand_over(self, bench: Bench, **config: Any) -> tuple[Bench, RestoreToken]:
        """The trainer begins a restore, hands it to another process, and dies."""
        token = await bench.begin_restore()
        await self._close_engine()
        instance = await self._plugin.in_another_process(self._one)
        return self._bench(first=bench, instance=instance, **config), token

    async def close(self) -> None:
        await self._close_engine()
        if self._one is not None:
            await self._plugin.close(self._one)

    def _bench(self, **how: Any) -> Bench:
        bench = Bench(self._plugin, self._one, self._store(), **how)
        self._engine = bench.engine
        return bench

    def _store(self) -> Store:
        return FolderStore(self._plugin.root) if self._disk is None else MemoryStore(self._disk)

    async def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()


@asynccontextmanager
async def _benches(plugin: Plugin, on_disk: bool) -> AsyncIterator[Benches]:
    benches = Benches(plugin, on_disk=on_disk)
    try:
        yield benches
    finally:
        await benches.close()


def run(
    plugin: Plugin, main: Callable[[Benches], Awaitable[None]], *, on_disk: bool = False
) -> None:
    """Run one test. on_disk: on the real clock and a real folder, whatever the plugin says.

    A broken rule is told without a traceback: it leads into the suite, not into the plugin.
    """
    real = on_disk or not plugin.virtual_time

    async def whole() -> None:
        async with _benches(plugin, real) as benches:
            await main(benches)

    told = None
    try:
        plugin.run(whole(), virtual=not real)
    except rules.Broken as broken:
        told = str(broken)
    if told is not None:
        pytest.fail(told, pytrace=False)


# -- faults ------------------------------------------------------------------------------------


async def refuse() -> None:
    raise Refused("told_to", "the suite makes this step fail")


async def lose() -> None:
    raise Unavailable("the suite loses this message or its answer")


def _bug(bug: InvariantError) -> NoReturn:
    rules.ERRORS.must(False, f"{bug}: {bug.__cause__!r}")
    raise bug

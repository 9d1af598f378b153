"""A `renew` hook that no cancellation ends keeps nobody else held (S6)."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from attrs import evolve

from fsm.engine import SnapshotEngine
from fsm.outcome import Aborted, RestoreFailed, Saved, Skipped, SkipReason
from fsm.participant import Attempt, Restore
from participants.memory import Fault, MemoryParticipant
from participants.virtual_time import run
from storage.memory import MemoryStore
from tests.model.test_engine import CONFIG

# One short round: whoever waits longer than the slack beside it releases nobody.
SHORT = evolve(CONFIG, resume_attempts=1, resume_timeout_s=0.5)
LATE = Fault.late(SHORT.renew_every_s + 1)  # a renewal begins meanwhile


class Stubborn(MemoryParticipant):
    """Its renewals end when `end` is set, whoever cancels them."""

    def __init__(self) -> None:
        super().__init__("stubborn")
        self.end = asyncio.Event()

    async def renew(self, attempt: Attempt | Restore) -> None:
        self.log.append(("renew", 0.0))
        while not self.end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.end.wait()


class Servers:
    def __init__(self) -> None:
        self.gym, self.stubborn = MemoryParticipant("gym"), Stubborn()
        self.everyone = [self.gym, self.stubborn]
        self.engine = SnapshotEngine(SHORT, MemoryStore(), self.everyone)

    def assert_all_run(self) -> None:
        assert "renew" in self.stubborn.hooks(), "the renewal was under way"
        assert [one.name for one in self.everyone if one.is_held] == []

    async def assert_the_next_save_waits_for_the_renewal(self) -> None:
        assert await self.engine.save() == Skipped(SkipReason.PREVIOUS_CUT_RUNNING)
        self.stubborn.end.set()
        await asyncio.sleep(1)
        assert isinstance(await self.engine.save(), Saved)


def test_an_abort_releases_everyone() -> None:
    async def main() -> None:
        servers = Servers()
        servers.gym.fault("drain", LATE)
        servers.gym.fault("commit", Fault.refuse())
        outcome = await servers.engine.save()
        assert isinstance(outcome, Aborted)
        assert outcome.unreleased == {}
        servers.assert_all_run()
        await servers.assert_the_next_save_waits_for_the_renewal()

    run(main())


def test_a_restore_rolls_everyone_back() -> None:
    async def main() -> None:
        servers = Servers()
        servers.gym.fault("fence", LATE)
        with pytest.raises(RestoreFailed, match="rolled back"):
            await servers.engine.restore(if_none="start")
        servers.assert_all_run()
        await servers.assert_the_next_save_waits_for_the_renewal()

    run(main())


def test_whoever_stays_paused_is_let_go() -> None:
    """S11, and closing the engine ends too."""

    async def main() -> None:
        servers = Servers()
        servers.stubborn.end.set()
        assert isinstance(await servers.engine.save(then="stay_paused"), Saved)
        await asyncio.sleep(1)
        servers.stubborn.end.clear()
        await asyncio.sleep(SHORT.renew_every_s + 1)
        assert await servers.engine.let_go() == {}
        servers.assert_all_run()
        await servers.assert_the_next_save_waits_for_the_renewal()
        await servers.engine.close()

    run(main())

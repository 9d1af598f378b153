"""What an author fills in, and the loop that a test runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from fsm.config import EngineConfig
from fsm.participant import Participant
from participants import virtual_time
from participants.memory import MemoryParticipant

# For participants that no message reaches over a network: a call that was cancelled has ended.
IN_PROCESS = "it lives in the trainer's process: nothing arrives late, and it dies with the engine"


class Plugin:
    """Made afresh for each test; everything that it makes is closed at the end of the test.

    A rule that does not apply is switched off by saying why; its tests are skipped with that
    reason:

    no_hold: nothing needs to stand still between `prepare` and `resume`.
    no_lease, no_fence: no message reaches it from another process (`IN_PROCESS`).
    no_hand_over: a restore of it is never finished by another process than the one that began it.
    no_staging: what `restore` reads is in place at once; `rollback` takes it away again.
    fresh_only: it can only be restored into a fresh one, never into one that lived on.

    folder: an empty folder of this test. root: the snapshot root in it.
    virtual_time: time jumps and snapshots are kept in memory; for participants without threads,
    sockets, or files that somebody else writes.
    """

    no_hold = no_lease = no_fence = no_hand_over = no_staging = fresh_only = ""
    virtual_time = False
    # A step that never ends is named by the engine, before `limit_s` ends the whole test.
    config = EngineConfig(
        prepare_timeout_s=15,
        commit_timeout_s=15,
        cut_timeout_s=15,
        resume_timeout_s=15,
        restore_timeout_s=15,
    )
    limit_s = 60.0  # on the real clock
    folder: Path

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @property
    def root(self) -> Path:
        return self.folder / "snapshots"

    # -- the author's --------------------------------------------------------------------------

    async def make(self) -> Any:
        """A fresh participant that nobody has worked with."""
        raise NotImplementedError

    async def work(self, one: Any, number: int) -> None:
        """Change its state as rollouts do; each number leaves something else behind. While it is
        held, wait for the release, or raise Refused, or return without a change."""
        raise NotImplementedError

    async def observe(self, one: Any) -> Any:
        """All that a snapshot must give back, as a value to compare. Also while it is held."""
        raise NotImplementedError

    async def is_held(self, one: Any) -> bool:
        """Does it keep anybody from working?"""
        raise NotImplementedError

    async def crash_and_replace(self, one: Any) -> Any:
        """All its processes die and fresh ones take their place: only a snapshot is left."""
        await self.close(one)
        return await self.make()

    async def in_another_process(self, one: Any) -> Any:
        """The instance that another process has of it: it reaches the same servers, and knows
        nothing that `one` keeps in memory. `one` itself where it is the server."""
        raise NotImplementedError("say how another process reaches it, or why not: no_hand_over")

    async def close(self, one: Any) -> None:
        """End what `make` began. Called once for each; nothing to do where it is all in memory."""

    def others(self, one: Any) -> Iterable[Participant]:
        """Participants that this one needs beside it; by default a stand-in for each name."""
        return [MemoryParticipant(name) for name in sorted(one.called_by | one.calls)]

    def barrier(self, one: Any) -> Callable[[], AbstractAsyncContextManager[None]] | None:  # noqa: ARG002
        """What the engine holds during the cut: `barrier.cut` of a data plane."""
        return None

    # -- the suite's ---------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, None], *, virtual: bool | None = None) -> None:
        """One event loop for each test."""

        async def limited() -> None:
            async with asyncio.timeout(self.limit_s):
                await main

        if self.virtual_time if virtual is None else virtual:
            virtual_time.run(main)
        else:
            asyncio.run(limited())


def skip_because(reason: str) -> None:
    """Leave a test out if the author gave a reason why its rule does not apply."""
    if reason:
        pytest.skip(reason)

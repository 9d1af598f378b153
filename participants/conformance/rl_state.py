"""What every `RlState` must do (`quiesce.testing`): the trainer's own controller, from outside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from participants.controller.state import Found, RlCut, RlState

LIMIT_S = 30.0
FOUND = Found(incarnation=2)


class RlStateConformance:
    """Override `make`, `work`, `observe` and `is_open`; `found` when a restore needs more."""

    async def make(self) -> RlState:
        """A fresh one, as after a start of the trainer."""
        raise NotImplementedError

    async def work(self, rl: Any, number: int) -> None:
        """Change the bookkeeping as training does; each number leaves something else behind."""
        raise NotImplementedError

    def observe(self, rl: Any) -> object:
        """What has to come back, comparable by `==`."""
        raise NotImplementedError

    def is_open(self, rl: Any) -> bool:
        """Would it send a rollout now?"""
        raise NotImplementedError

    def found(self, rl: Any) -> Found:  # noqa: ARG002
        """What a restore finds beside what `rl` saved."""
        return FOUND

    def run(self, main: Callable[[Any], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with asyncio.timeout(LIMIT_S):
                await main(await self.make())

        asyncio.run(whole())

    # -- dispatch ------------------------------------------------------------------------------

    def test_dispatch_is_closed_until_it_is_opened(self) -> None:
        async def main(rl: RlState) -> None:
            assert not self.is_open(rl), "before the first open_dispatch nothing is sent (R1)"
            rl.open_dispatch(frozenset())
            rl.open_dispatch(frozenset())
            assert self.is_open(rl)
            rl.stop_dispatch()
            rl.stop_dispatch()
            assert not self.is_open(rl)

        self.run(main)

    def test_flushing_keeps_its_limit_and_says_what_stays_owed(self) -> None:
        async def main(rl: RlState) -> None:
            rl.open_dispatch(frozenset())
            await self.work(rl, 1)
            rl.stop_dispatch()
            async with asyncio.timeout(LIMIT_S / 2):
                assert await rl.flush_acks(0.05) >= 0

        self.run(main)

    # -- saving --------------------------------------------------------------------------------

    def test_the_state_is_jsonable_and_a_copy(self) -> None:
        async def main(rl: RlState) -> None:
            rl.open_dispatch(frozenset())
            await self.work(rl, 1)
            cut = rl.state()
            before = _text(cut)
            await self.work(rl, 2)
            assert _text(cut) == before, "the records of a cut change with the bookkeeping"
            assert _text(rl.state()) != before, "the bookkeeping changed, its records did not"

        self.run(main)

    # -- restoring -----------------------------------------------------------------------------

    def test_what_was_saved_comes_back_and_nothing_is_sent(self) -> None:
        async def main(rl: RlState) -> None:
            saved, found, expected = await self._saved(rl)
            fresh: Any = await self.make()
            await fresh.load(saved, found)
            assert self.observe(fresh) == expected
            assert not self.is_open(fresh), "load sends nothing: dispatch is opened later (R1)"

        self.run(main)

    def test_it_comes_back_into_one_that_lived_on(self) -> None:
        async def main(rl: RlState) -> None:
            saved, found, expected = await self._saved(rl)
            await self.work(rl, 3)
            rl.stop_dispatch()
            await rl.load(saved, found)
            assert self.observe(rl) == expected

        self.run(main)

    def test_a_rollback_puts_it_back_as_it_was(self) -> None:
        """After a restore that failed: found is None."""

        async def main(rl: RlState) -> None:
            saved, found, _ = await self._saved(rl)
            await self.work(rl, 3)
            rl.stop_dispatch()
            before, seen = rl.state().records, self.observe(rl)
            await rl.load(saved, found)
            await rl.load(before, None)
            assert self.observe(rl) == seen

        self.run(main)

    def test_a_start_from_nothing_is_like_a_fresh_one(self) -> None:
        async def main(rl: RlState) -> None:
            await self._saved(rl)
            rl.stop_dispatch()
            await rl.load(None, FOUND)
            fresh: Any = await self.make()
            await fresh.load(None, FOUND)
            assert self.observe(rl) == self.observe(fresh)

        self.run(main)

    def test_records_that_cannot_be_used_are_refused_and_change_nothing(self) -> None:
        async def main(rl: RlState) -> None:
            _, found, _ = await self._saved(rl)
            rl.stop_dispatch()
            before = self.observe(rl)
            for broken in ({}, {name: [None] for name in rl.state().records}):
                with pytest.raises(ValueError, match=r"\w"):
                    await rl.load(broken, found)
                assert self.observe(rl) == before

        self.run(main)

    async def _saved(self, rl: Any) -> tuple[dict[str, list[Any]], Found, object]:
        rl.open_dispatch(frozenset())
        await self.work(rl, 1)
        await self.work(rl, 2)
        rl.stop_dispatch()
        records = json.loads(_text(rl.state()))
        return records, self.found(rl), self.observe(rl)


def _text(cut: RlCut) -> str:
    return json.dumps({name: list(lines) for name, lines in cut.records.items()})

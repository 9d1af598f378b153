"""Fences: messages that come late, or overtake each other (specs/hold.md, H1)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from fsm.outcome import Aborted, Refused, Saved
from participants.conformance import rules
from participants.conformance.bench import Bench, Benches, lose, run
from participants.conformance.plugin import Plugin, skip_because


class FenceRules(Plugin):
    @pytest.mark.parametrize("hook", ["prepare", "drain", "renew"])
    def test_a_late_message_of_a_save_does_not_hold(self, hook: str) -> None:
        self._needs_fence()

        async def main(benches: Benches) -> None:
            bench = await benches.start()
            if not bench.relay.has(hook):
                pytest.skip(f"it has no hook {hook!r}")
            old = []
            for number in (1, 2):
                await bench.work(number)
                await bench.saved()
                old.append(bench.relay.seen["prepare"])
            for attempt in old:
                await _late(bench, hook, attempt)
                rules.LATE.must(not await bench.is_held(), hook)
            await bench.must_go_on(3)

        run(self, main)

    def test_a_late_fence_of_a_restore_does_not_hold(self) -> None:
        self._needs_fence()

        async def main(benches: Benches) -> None:
            bench = await benches.start()
            await bench.work(1)
            await bench.saved()
            bench = await benches.replace()
            await bench.restored()
            if bench.relay.has("fence"):
                await _late(bench, "fence", bench.relay.seen["fence"])
            rules.LATE.must(not await bench.is_held(), "fence")
            await bench.must_go_on(2)

        run(self, main)

    def test_a_release_may_overtake_its_prepare(self) -> None:
        self._needs_fence()

        async def main(benches: Benches) -> None:
            bench = await benches.start()
            bench.relay.before["prepare"] = lose
            outcome = await bench.save()
            assert isinstance(outcome, Aborted), outcome
            await _late(bench, "prepare", bench.relay.seen["prepare"])
            rules.OVERTAKEN.must(not await bench.is_held())
            bench.relay.before.clear()
            await bench.must_go_on(1)
            await bench.saved()

        run(self, main)

    def test_a_late_release_leaves_a_newer_hold_alone(self) -> None:
        self._needs_fence()

        async def main(benches: Benches) -> None:
            bench = await benches.start()
            await bench.work(1)
            await bench.saved()
            old, held = bench.relay.seen["resume"], []

            async def late() -> None:
                await _late(bench, "resume", old)
                held.append(await bench.is_held())

            await bench.work(2)
            bench.relay.after["prepare"] = late
            await bench.save()
            rules.LATE_RELEASE.must(held == [True], held)
            await bench.must_go_on(3)

        run(self, main)

    def test_a_newer_attempt_takes_over(self) -> None:
        self._needs_fence()

        async def main(benches: Benches) -> None:
            bench = await benches.start()
            await bench.work(1)
            bench.relay.before["resume"] = lose
            await bench.save()
            rules.HELD.must(await bench.is_held())
            bench = await benches.restart()
            await bench.engine.open()
            await bench.store.restored(None)
            outcome = await bench.save()
            rules.NEWER.must(isinstance(outcome, Saved), outcome)
            await bench.must_go_on(2)

        run(self, main)

    def _needs_fence(self) -> None:
        skip_because(self.no_hold)
        skip_because(self.no_fence)


async def _late(bench: Bench, hook: str, given: Any) -> None:
    """Deliver a message after its time. It may be refused."""
    with contextlib.suppress(Refused):
        await getattr(bench.one, hook)(given)

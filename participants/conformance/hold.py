"""The hold: one instant, fences, leases (specs/hold.md)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fsm.outcome import Aborted, QuiesceError, Refused, Saved
from participants.conformance import rules
from participants.conformance.bench import Bench, Benches, lose, run
from participants.conformance.plugin import Plugin, skip_because

# Short enough to wait for on the real clock, long enough for a message to arrive in.
SHORT: dict[str, Any] = {"lease_s": 0.4, "renew_every_s": 0.1}


class HoldRules(Plugin):
    def test_held_from_prepare_to_resume(self) -> None:
        skip_because(self.no_hold)

        async def main(benches: Benches) -> None:
            bench, held = await benches.start(), dict[str, bool]()

            async def look(when: str) -> None:
                held[when] = await bench.is_held()

            bench.relay.after[bench.relay.writes_in] = lambda: look("after it wrote its part")
            bench.relay.before["resume"] = lambda: look("before its resume")
            await bench.work(1)
            await bench.saved()
            rules.HELD.must(len(held) == 2 and all(held.values()), held)
            rules.RELEASED.must(not await bench.is_held())

        run(self, main)

    def test_a_snapshot_is_of_one_instant(self) -> None:
        async def main(benches: Benches) -> None:
            bench = await benches.start()
            await bench.work(1)
            seen: dict[str, Any] = {}
            tasks: list[asyncio.Task[None]] = []

            async def before() -> None:
                tasks.append(await bench.work_under_hold(2))
                seen["written"] = await bench.observe()

            async def after() -> None:
                tasks.append(await bench.work_under_hold(3))

            async def released() -> None:
                seen["released"] = await bench.observe()

            bench.relay.before[bench.relay.writes_in] = before
            bench.relay.after[bench.relay.writes_in] = after
            bench.relay.before["resume"] = released
            outcome = await bench.save()
            await _must_end(bench, tasks)
            if isinstance(outcome, Aborted):
                return  # it noticed that something moved
            rules.SAVES.must(isinstance(outcome, Saved), outcome)
            if not self.no_hold:
                got = seen.get("released", seen["written"])
                rules.MOVED.must(got == seen["written"], rules.differ(got, seen["written"]))
            bench = await benches.replace()
            await bench.restored()
            await bench.must_show(rules.INSTANT, seen["written"])

        run(self, main)

    # -- fences --------------------------------------------------------------------------------

    def test_a_late_prepare_does_not_hold(self) -> None:
        self._needs_fence()

        async def main(benches: Benches) -> None:
            bench = await benches.start()
            old = []
            for number in (1, 2):
                await bench.work(number)
                await bench.saved()
                old.append(bench.relay.seen["prepare"])
            for attempt in old:
                await _late(bench, "prepare", attempt)
                rules.LATE_PREPARE.must(not await bench.is_held())
            await bench.must_go_on(3)

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

    # -- leases --------------------------------------------------------------------------------

    def test_a_hold_ends_with_its_lease(self) -> None:
        self._needs_lease()

        async def main(benches: Benches) -> None:
            bench = await benches.start(**SHORT)
            await bench.work(1)
            bench.relay.before["resume"] = lose
            attempt = asyncio.create_task(bench.save())

            async def die() -> None:
                attempt.cancel()

            bench.relay.after["prepare"] = die
            await asyncio.wait({attempt})
            rules.LEASE.must(await bench.becomes_free())
            await bench.must_go_on(2)

        run(self, main)

    def test_a_lapsed_hold_is_not_published(self) -> None:
        self._needs_lease()

        async def main(benches: Benches) -> None:
            bench, free = await benches.start(**SHORT), []
            await bench.work(1)

            async def wait() -> None:
                free.append(await bench.becomes_free())
                bench.relay.drop.clear()

            bench.relay.drop = {"renew"}
            bench.relay.after["prepare"] = wait
            outcome = await bench.save()
            rules.LEASE.must(free == [True])
            rules.LAPSED.must(isinstance(outcome, Aborted), outcome)
            await bench.must_go_on(2)

        run(self, main)

    def test_a_lapsed_restore_is_not_activated(self) -> None:
        self._needs_lease()

        async def main(benches: Benches) -> None:
            bench = await benches.start()
            await bench.work(1)
            await bench.saved()
            bench = await benches.replace(**SHORT)
            before, free = await bench.observe(), []

            async def wait() -> None:
                free.append(await bench.becomes_free())
                bench.relay.drop.clear()

            bench.relay.drop = {"renew"}
            bench.relay.after["restore"] = wait
            with contextlib.suppress(QuiesceError):
                found = await bench.restore()
                rules.LAPSED_RESTORE.must(False, found)
            rules.LEASE.must(free == [True])
            await bench.must_show(rules.LAPSED_RESTORE, before)
            await bench.must_go_on(2)

        run(self, main)

    # -- which rules apply ---------------------------------------------------------------------

    def _needs_fence(self) -> None:
        skip_because(self.no_hold)
        skip_because(self.no_fence)

    def _needs_lease(self) -> None:
        skip_because(self.no_hold)
        skip_because(self.no_lease)


async def _late(bench: Bench, hook: str, given: Any) -> None:
    """Deliver a message after its time. It may be refused."""
    with contextlib.suppress(Refused):
        await getattr(bench.one, hook)(given)


async def _must_end(bench: Bench, tasks: list[asyncio.Task[None]]) -> None:
    """Work that waited for the release goes on."""
    for task in tasks:
        _, waiting = await asyncio.wait({task}, timeout=bench.plugin.limit_s / 2)
        for one in waiting:
            one.cancel()
        rules.WAITING.must(not waiting)
        await task

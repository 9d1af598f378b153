"""Leases: a hold that nobody renews ends by itself, and what it was for is void
(specs/hold.md, H3)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fsm.outcome import Aborted, QuiesceError, Saved
from participants.conformance import rules
from participants.conformance.bench import Benches, lose, run
from participants.conformance.plugin import Plugin, skip_because

# Short enough to wait for on the real clock, long enough for a message to arrive in.
SHORT: dict[str, Any] = {"lease_s": 0.4, "renew_every_s": 0.1}
# Long enough that a busy machine renews in time.
RENEWED: dict[str, Any] = {"lease_s": 2.0, "renew_every_s": 0.2}


class LeaseRules(Plugin):
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

    def test_a_renewed_hold_stands(self) -> None:
        self._needs_lease()

        async def main(benches: Benches) -> None:
            bench, held = await benches.start(**RENEWED), []
            await bench.work(1)

            async def outlast() -> None:
                await asyncio.sleep(1.5 * bench.engine.config.lease_s)
                held.append(await bench.is_held())

            bench.witness.at["drain"] = outlast
            outcome = await bench.save()
            rules.RENEWED.must(held == [True] and isinstance(outcome, Saved), outcome)

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

    def _needs_lease(self) -> None:
        skip_because(self.no_hold)
        skip_because(self.no_lease)

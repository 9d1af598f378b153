"""The hold: a snapshot is of one instant (specs/save.md, S4)."""

from __future__ import annotations

import asyncio
from typing import Any

from fsm.outcome import Aborted, Saved
from participants.conformance import rules
from participants.conformance.bench import Bench, Benches, run
from participants.conformance.plugin import Plugin, skip_because


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


async def _must_end(bench: Bench, tasks: list[asyncio.Task[None]]) -> None:
    """Work that waited for the release goes on."""
    for task in tasks:
        _, waiting = await asyncio.wait({task}, timeout=bench.plugin.limit_s / 2)
        for one in waiting:
            one.cancel()
        rules.WAITING.must(not waiting)
        await task

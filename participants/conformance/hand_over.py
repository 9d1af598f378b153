"""A restore that one process begins and another one finishes (specs/restore.md, R8)."""

from __future__ import annotations

import asyncio
from typing import Any

from fsm.outcome import QuiesceError
from participants.conformance import rules
from participants.conformance.bench import Bench, Benches, refuse, run
from participants.conformance.leases import RENEWED
from participants.conformance.plugin import Plugin, skip_because


class HandOverRules(Plugin):
    """The first process is gone when the second one begins: whatever an instance kept in memory
    between its hooks is gone too."""

    def test_another_process_renews_and_activates(self) -> None:
        self._needs_hand_over()

        async def main(benches: Benches) -> None:
            bench, wanted = await self._lived_on(benches)
            other, token = await benches.hand_over(bench, **RENEWED)
            held = []

            async def outlast() -> None:
                await asyncio.sleep(1.5 * other.engine.config.lease_s)
                held.append(await other.is_held())

            other.witness.at["reconcile"] = outlast
            await other.restored(rules.TAKEN_OVER, token=token)
            rules.TAKEN_OVER.must(held == [True], f"held after the first lease: {held}")
            await other.must_show(rules.TAKEN_OVER, wanted)
            rules.TAKEN_OVER.must(not await other.is_held(), "held after its activation")
            await other.must_go_on(3)

        run(self, main)

    def test_another_process_rolls_back(self) -> None:
        self._needs_hand_over()

        async def main(benches: Benches) -> None:
            bench, _ = await self._lived_on(benches)
            before = await bench.observe()
            other, token = await benches.hand_over(bench)
            reached = []

            async def fail() -> None:
                reached.append("reconcile")
                await refuse()

            other.witness.at["reconcile"] = fail
            try:
                await other.restore(token=token)
            except QuiesceError as error:
                whole = reached and "everything was rolled back" in str(error)
                rules.TAKEN_BACK.must(bool(whole), error)
            else:
                rules.TAKEN_BACK.must(False, "the restore went on after the failure")
            rules.TAKEN_BACK.must(not await other.is_held(), "it is held")
            await other.must_show(rules.TAKEN_BACK, before)
            await other.must_go_on(3)

        run(self, main)

    async def _lived_on(self, benches: Benches) -> tuple[Bench, Any]:
        """A saved state, and a participant that shows another one."""
        bench = await benches.start()
        await bench.work(1)
        wanted = await bench.observe()
        await bench.saved()
        if self.fresh_only:
            return await benches.replace(), wanted
        await bench.work(2)
        return await benches.restart(), wanted

    def _needs_hand_over(self) -> None:
        for reason in (self.no_hold, self.no_lease, self.no_hand_over):
            skip_because(reason)

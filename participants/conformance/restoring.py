"""Restoring: all or nothing, into a fresh participant and into one that lived on
(specs/restore.md)."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from fsm.outcome import QuiesceError
from participants.conformance import rules
from participants.conformance.bench import Bench, Benches, lose, refuse, run
from participants.conformance.plugin import Plugin, skip_because

STEPS = ("fence", "restore", "reconcile")
Who = Literal["another", "itself"]
WHO: tuple[Who, ...] = ("another", "itself")


class RestoreRules(Plugin):
    def test_round_trip(self) -> None:
        async def main(benches: Benches) -> None:
            _, wanted = await _saved(benches, works=3)
            bench = await benches.replace()
            await bench.restored()
            await bench.must_show(rules.ROUND_TRIP, wanted)
            await bench.must_go_on(4)

        run(self, main)

    def test_round_trip_of_nothing(self) -> None:
        async def main(benches: Benches) -> None:
            _, wanted = await _saved(benches, works=0)
            bench = await benches.replace()
            await bench.restored()
            await bench.must_show(rules.ROUND_TRIP, wanted)
            await bench.must_go_on(1)

        run(self, main)

    def test_save_and_restore_again_and_again(self) -> None:
        async def main(benches: Benches) -> None:
            bench = await benches.start()
            for number in range(1, 4):
                await bench.work(2 * number)
                await bench.saved()
                await bench.work(2 * number + 1)
                wanted = await bench.observe()
                await bench.saved()
                bench = await benches.replace()
                await bench.restored(rules.AGAIN)
                await bench.must_show(rules.AGAIN, wanted)
            bench = await benches.replace()
            await bench.restored(rules.AGAIN)
            await bench.must_show(rules.AGAIN, wanted)

        run(self, main)

    def test_what_is_staged_is_inert(self) -> None:
        skip_because(self.no_staging)

        async def main(benches: Benches) -> None:
            await _saved(benches)
            bench = await benches.replace()
            before, staged = await bench.observe(), []

            async def look() -> None:
                staged.append(await bench.observe())

            bench.relay.after["restore"] = look
            await bench.restored()
            for seen in staged:
                rules.STAGED.must(seen == before, rules.differ(seen, before))

        run(self, main)

    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize("who", WHO)
    def test_a_failed_restore_into_a_fresh_one(self, step: str, who: Who) -> None:
        async def main(benches: Benches) -> None:
            _, wanted = await _saved(benches)
            await _fails_then_succeeds(await benches.replace(), step, who, wanted)

        run(self, main)

    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize("who", WHO)
    def test_a_failed_restore_into_one_that_lived_on(self, step: str, who: Who) -> None:
        skip_because(self.fresh_only)

        async def main(benches: Benches) -> None:
            bench, wanted = await _saved(benches)
            await bench.work(2)
            await _fails_then_succeeds(await benches.restart(), step, who, wanted)

        run(self, main)

    def test_restore_into_one_that_lived_on(self) -> None:
        skip_because(self.fresh_only)

        async def main(benches: Benches) -> None:
            bench, wanted = await _saved(benches)
            await bench.work(2)
            bench = await benches.restart()
            await bench.restored(rules.LIVED_ON)
            await bench.must_show(rules.LIVED_ON, wanted)
            await bench.must_go_on(3)

        run(self, main)

    def test_a_repeated_activation_changes_nothing(self) -> None:
        async def main(benches: Benches) -> None:
            await _saved(benches)
            bench = await benches.replace()
            await bench.restored()
            if "resume" not in bench.relay.seen:
                pytest.skip("it has no hook 'resume'")
            await bench.work(2)
            now = await bench.observe()
            try:
                await bench.one.resume(bench.relay.seen["resume"])
            except QuiesceError as error:
                rules.REPEATED_ACTIVATION.must(False, repr(error))
            await bench.must_show(rules.REPEATED_ACTIVATION, now)
            await bench.must_go_on(3)

        run(self, main)

    def test_start_from_nothing(self) -> None:
        async def main(benches: Benches) -> None:
            bench = await benches.start()
            before = await bench.observe()
            await bench.restored(rules.FROM_NOTHING, if_none="start")
            await bench.must_show(rules.FROM_NOTHING, before)
            rules.FROM_NOTHING.must(not await bench.is_held(), "it is held")
            await bench.must_go_on(1)

        run(self, main)


async def _saved(benches: Benches, works: int = 1) -> tuple[Bench, Any]:
    bench = await benches.start()
    for number in range(1, works + 1):
        await bench.work(number)
    state = await bench.observe()
    await bench.saved()
    return bench, state


async def _fails_then_succeeds(bench: Bench, step: str, who: Who, wanted: Any) -> None:
    if who == "another":
        bench.witness.at[step] = refuse
    elif bench.relay.has(step):
        bench.relay.after[step] = lose
    else:
        pytest.skip(f"it has no hook {step!r}")
    before = await bench.observe(), await bench.is_held()
    try:
        await bench.restore()
    except QuiesceError as error:
        rules.ROLLED_BACK.must("everything was rolled back" in str(error), error)
    else:
        rules.ROLLED_BACK.must(False, "the restore went on after the failure")
    after = await bench.observe(), await bench.is_held()
    rules.ROLLED_BACK.must(after == before, f"(state, held): {rules.differ(after, before)}")
    bench.witness.at.clear()
    bench.relay.after.clear()
    await bench.restored(rules.ROLLED_BACK)
    await bench.must_show(rules.ROLLED_BACK, wanted)
    await bench.must_go_on(9)

"""Saving: names, every way an attempt ends, repeated messages (specs/save.md)."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from fsm.outcome import Aborted, Saved, SaveOutcome
from participants.conformance import rules
from participants.conformance.bench import Bench, Benches, lose, refuse, run
from participants.conformance.plugin import Plugin, skip_because
from storage import names

STEPS = ("pause", "prepare", "drain", "commit", "cut")
How = Literal["refused by another", "answer lost", "cancelled"]
HOW: tuple[How, ...] = ("refused by another", "answer lost", "cancelled")


class SaveRules(Plugin):
    def test_work_can_be_observed(self) -> None:
        async def main(benches: Benches) -> None:
            bench = await benches.start()
            before = await bench.observe()
            await bench.work(1)
            rules.VISIBLE.must(await bench.observe() != before, before)

        run(self, main)

    def test_name_and_version(self) -> None:
        async def main(benches: Benches) -> None:
            one = (await benches.start()).one
            version = one.format_version
            try:
                good = len(names.check_parts(one.name)) == 1
            except (ValueError, TypeError):
                good = False
            rules.NAME.must(good and type(version) is int and version >= 1, (one.name, version))

        run(self, main)

    def test_describe_is_stable(self) -> None:
        async def main(benches: Benches) -> None:
            bench = await benches.start()
            first = await bench.one.describe()
            await bench.work(1)
            rules.DESCRIBE.must(await bench.one.describe() == first, first)
            bench = await benches.replace()
            again = await bench.one.describe()
            rules.DESCRIBE.must(again == first, rules.differ(again, first))

        run(self, main)

    def test_a_save_changes_nothing(self) -> None:
        async def main(benches: Benches) -> None:
            bench = await benches.start()
            await bench.work(1)
            before = await bench.observe()
            await bench.saved()
            await bench.must_show(rules.HARMLESS, before)
            await bench.must_go_on(2)

        run(self, main)

    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize("how", HOW)
    def test_abort_from_every_phase(self, step: str, how: How) -> None:
        async def main(benches: Benches) -> None:
            bench = await benches.start()
            if how != "refused by another" and not bench.relay.has(step):
                pytest.skip(f"it has no hook {step!r}")
            await bench.work(1)
            before = await bench.observe()
            outcome = await _failed(bench, step, how)
            _check_outcome(outcome, how)
            await bench.must_show(rules.UNCHANGED, before)
            await bench.must_go_on(2)
            await self._must_be_whole(benches, bench)

        run(self, main)

    def test_a_repeated_release_changes_nothing(self) -> None:
        async def main(benches: Benches) -> None:
            bench = await benches.start()
            await bench.work(1)
            bench.relay.twice = {"resume"}
            outcome = await bench.save()
            released = isinstance(outcome, Saved) and not outcome.unreleased
            rules.REPEATED_RELEASE.must(released, outcome)
            await bench.work(2)
            if "resume" not in bench.relay.seen:
                pytest.skip("it is never told, so never released")
            now = await bench.observe()
            await _again(bench, "resume", rules.REPEATED_RELEASE)
            await bench.must_show(rules.REPEATED_RELEASE, now)
            await bench.must_go_on(3)

        run(self, main)

    def test_messages_may_arrive_twice(self) -> None:
        skip_because(self.no_fence)

        async def main(benches: Benches) -> None:
            bench = await benches.start()
            await bench.work(1)
            wanted = await bench.observe()
            bench.relay.twice = {"pause", "prepare", "drain", "renew", "resume"}
            outcome = await bench.save()
            rules.REPEATED.must(not isinstance(outcome, Aborted), outcome)
            await bench.must_show(rules.REPEATED, wanted)
            bench = await benches.replace()
            bench.relay.twice = {"fence", "restore", "reconcile", "renew", "resume"}
            await bench.restored(rules.REPEATED)
            await bench.must_show(rules.REPEATED, wanted)

        run(self, main)

    async def _must_be_whole(self, benches: Benches, bench: Bench) -> None:
        """The attempt after a failed one saves everything, and it can be restored."""
        wanted = await bench.observe()
        await bench.saved()
        left = [path.name for path in self.root.glob("tmp_*")]
        rules.SWEPT.must(not left, left)
        bench = await benches.replace()
        await bench.restored()
        await bench.must_show(rules.ROUND_TRIP, wanted)


async def _failed(bench: Bench, step: str, how: How) -> SaveOutcome | None:
    """One attempt that fails in `step`; None when it was cancelled."""
    if how == "refused by another":
        bench.witness.at[step] = refuse
    elif how == "answer lost":
        bench.relay.after[step] = lose
    attempt = asyncio.create_task(bench.save())

    async def cancel() -> None:
        asyncio.get_running_loop().call_soon(attempt.cancel)

    if how == "cancelled":
        bench.relay.before[step] = cancel
    await asyncio.wait({attempt})
    bench.witness.at.clear()
    bench.relay.after.clear()
    bench.relay.before.clear()
    return None if attempt.cancelled() else attempt.result()


def _check_outcome(outcome: SaveOutcome | None, how: How) -> None:
    if how == "cancelled":
        assert outcome is None, outcome
        return
    assert isinstance(outcome, Aborted), outcome
    rules.CONFIRMED.must(outcome.unreleased == {}, outcome.unreleased)


async def _again(bench: Bench, hook: str, rule: rules.Rule) -> Any:
    """The last message of `hook` once more."""
    try:
        return await getattr(bench.one, hook)(bench.relay.seen[hook])
    except Exception as error:  # noqa: BLE001  whatever it is, it must not come
        rule.must(False, repr(error))

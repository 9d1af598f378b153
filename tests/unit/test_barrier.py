"""participants/barrier.py: many mutations, or one cut (S3)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fsm.outcome import InvariantError
from participants.barrier import AsyncBarrier, CutTimes


async def settle() -> None:
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


class Mutator:
    """A task inside one mutation until told to finish."""

    def __init__(self, barrier: AsyncBarrier, kind: str = "put") -> None:
        self.inside, self.finish = asyncio.Event(), asyncio.Event()
        self._barrier, self._kind = barrier, kind
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._barrier.mutation(self._kind):
            self.inside.set()
            await self.finish.wait()


class Cutter:
    """A task inside one cut until told to finish."""

    def __init__(self, barrier: AsyncBarrier) -> None:
        self.inside, self.finish = asyncio.Event(), asyncio.Event()
        self._barrier = barrier
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._barrier.cut():
            self.inside.set()
            await self.finish.wait()


def run(main: Callable[[AsyncBarrier], Awaitable[None]]) -> None:
    async def whole() -> None:
        barrier = AsyncBarrier()
        await main(barrier)
        async with asyncio.timeout(5), barrier.cut():  # nothing is left inside
            assert barrier.running == ()

    asyncio.run(whole())


def test_mutations_run_together_and_a_cut_waits_for_them() -> None:
    async def main(barrier: AsyncBarrier) -> None:
        one, two = Mutator(barrier, "seal"), Mutator(barrier, "claim")
        await settle()
        assert barrier.running == ("claim", "seal")
        cut = Cutter(barrier)
        await settle()
        assert not cut.inside.is_set()
        one.finish.set()
        await settle()
        assert not cut.inside.is_set()
        two.finish.set()
        await settle()
        assert cut.inside.is_set()
        cut.finish.set()
        await cut.task

    run(main)


def test_a_waiting_cut_keeps_new_mutations_out() -> None:
    async def main(barrier: AsyncBarrier) -> None:
        first = Mutator(barrier)
        await settle()
        cut = Cutter(barrier)
        await settle()
        late = Mutator(barrier)
        await settle()
        assert not late.inside.is_set()
        first.finish.set()
        await settle()
        assert cut.inside.is_set()
        assert not late.inside.is_set()
        cut.finish.set()
        await settle()
        assert late.inside.is_set()
        late.finish.set()
        await asyncio.gather(first.task, cut.task, late.task)

    run(main)


def test_back_to_back_cuts_do_not_starve_a_mutation() -> None:
    async def main(barrier: AsyncBarrier) -> None:
        order = []

        async def mutate() -> None:
            async with barrier.mutation("put"):
                order.append("mutation")

        async with barrier.cut():
            order.append("cut 1")
            task = asyncio.create_task(mutate())
            await settle()
        async with barrier.cut():  # asked for before the mutation's task could run again
            order.append("cut 2")
        await task
        assert order == ["cut 1", "mutation", "cut 2"]

    run(main)


def test_cuts_do_not_nest() -> None:
    async def main(barrier: AsyncBarrier) -> None:
        async with barrier.cut():
            with pytest.raises(InvariantError, match="cuts do not nest"):
                async with barrier.cut():
                    pytest.fail("entered")
            with pytest.raises(InvariantError, match="'put' inside a cut"):
                async with barrier.mutation("put"):
                    pytest.fail("entered")
        waiting = Mutator(barrier)
        await settle()
        cut = Cutter(barrier)
        await settle()
        with pytest.raises(InvariantError, match="another cut waits or runs"):
            async with barrier.cut():
                pytest.fail("entered")
        waiting.finish.set()
        cut.finish.set()
        await cut.task

    run(main)


def test_a_cut_inside_a_mutation_is_refused_with_its_kind() -> None:
    async def main(barrier: AsyncBarrier) -> None:
        async with barrier.mutation("seal"):
            with pytest.raises(InvariantError, match="inside mutation 'seal'"):
                async with barrier.cut():
                    pytest.fail("entered")

    run(main)


def test_a_mutation_inside_a_mutation_joins_it_even_while_a_cut_waits() -> None:
    async def main(barrier: AsyncBarrier) -> None:
        async with barrier.mutation("outer"):
            cut = Cutter(barrier)
            await settle()
            async with barrier.mutation("inner"):
                assert barrier.running == ("outer",)
            await settle()
            assert not cut.inside.is_set()
        assert barrier.mutations == 1
        cut.finish.set()
        await cut.task

    run(main)


def test_a_child_task_does_not_inherit_the_place_inside() -> None:
    async def main(barrier: AsyncBarrier) -> None:
        async with barrier.mutation("outer"):
            cut = Cutter(barrier)
            await settle()
            child = Mutator(barrier, "child")
            await settle()
            assert not child.inside.is_set()
        cut.finish.set()
        child.finish.set()
        await asyncio.gather(cut.task, child.task)
        assert barrier.mutations == 2

    run(main)


def test_a_failed_mutation_counts_and_leaves() -> None:
    async def main(barrier: AsyncBarrier) -> None:
        with pytest.raises(OSError, match="disk"):
            async with barrier.mutation("put"):
                raise OSError("disk")
        assert barrier.mutations == 1

    run(main)


@pytest.mark.parametrize("who", ["running", "waiting", "cut_waiting", "cut_running"])
def test_cancellation_leaves_nothing_behind(who: str) -> None:
    async def main(barrier: AsyncBarrier) -> None:
        running = Mutator(barrier)
        await settle()
        cut = Cutter(barrier)
        await settle()
        waiting = Mutator(barrier)
        await settle()
        if who == "cut_running":
            running.finish.set()
            await settle()
            assert cut.inside.is_set()
        victim = {"running": running, "waiting": waiting}.get(who, cut)
        victim.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim.task
        for each in (running, cut, waiting):
            each.finish.set()
        await asyncio.gather(running.task, cut.task, waiting.task, return_exceptions=True)
        assert barrier.mutations == (1 if who == "waiting" else 2)

    run(main)


def test_a_mutation_cancelled_in_the_instant_it_is_let_in_gives_its_place_back() -> None:
    async def main(barrier: AsyncBarrier) -> None:
        async with barrier.cut():
            waiting = Mutator(barrier)
            await settle()
        waiting.task.cancel()  # let in by the cut's end, but its task has not run yet
        with pytest.raises(asyncio.CancelledError):
            await waiting.task
        assert barrier.mutations == 0

    run(main)


def test_waiting_and_holding_are_measured() -> None:
    now = 0.0

    async def main() -> None:
        nonlocal now
        barrier = AsyncBarrier(clock=lambda: now)
        running = Mutator(barrier)
        await settle()
        cut = Cutter(barrier)
        await settle()
        now = 3.0
        running.finish.set()
        await settle()
        late = Mutator(barrier)
        await settle()
        now = 10.0
        cut.finish.set()
        late.finish.set()
        await asyncio.gather(cut.task, late.task)
        assert barrier.last_cut == CutTimes(waited_s=3.0, held_s=10.0, delayed=1)

    asyncio.run(main())

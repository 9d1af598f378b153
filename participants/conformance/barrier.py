"""What every `Barrier` must do (`quiesce.testing`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from participants.data_plane import Barrier

LIMIT_S = 10.0
ROUNDS = 20  # of the loop: who can go on has gone on


class BarrierConformance:
    """Override `make`: many mutations at once, or one cut (S3)."""

    def make(self) -> Barrier:
        raise NotImplementedError

    def run(self, main: Callable[[Barrier], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with asyncio.timeout(LIMIT_S):
                barrier = self.make()
                await main(barrier)
                async with barrier.cut():
                    pass  # nothing is left inside

        asyncio.run(whole())

    def test_mutations_run_together(self) -> None:
        async def main(barrier: Barrier) -> None:
            both = asyncio.Barrier(2)
            await asyncio.gather(_mutate(barrier, both.wait), _mutate(barrier, both.wait))

        self.run(main)

    def test_a_cut_waits_for_mutations_and_later_ones_wait_for_it(self) -> None:
        async def main(barrier: Barrier) -> None:
            said: list[str] = []
            go = asyncio.Event()
            tasks = [
                asyncio.create_task(_mutate(barrier, go.wait, said, "first")),
                asyncio.create_task(_cut(barrier, said)),
                asyncio.create_task(_mutate(barrier, None, said, "second")),
            ]
            await _settle()
            assert said == []
            go.set()
            await asyncio.gather(*tasks)
            assert said == ["first", "cut", "second"]

        self.run(main)

    def test_an_error_inside_lets_the_others_in(self) -> None:
        async def main(barrier: Barrier) -> None:
            for inside in (barrier.mutation("put"), barrier.cut()):
                with pytest.raises(OSError, match="disk"):
                    async with inside:
                        raise OSError("disk")
            async with barrier.mutation("put"):
                pass

        self.run(main)

    def test_one_that_is_cancelled_while_waiting_lets_the_others_in(self) -> None:
        async def main(barrier: Barrier) -> None:
            go = asyncio.Event()
            running = asyncio.create_task(_mutate(barrier, go.wait))
            await _settle()
            waiting = asyncio.create_task(_cut(barrier, []))
            await _settle()
            waiting.cancel()
            await asyncio.wait({waiting})
            await asyncio.wait_for(_mutate(barrier, None), LIMIT_S / 2)
            go.set()
            await running

        self.run(main)

    def test_the_count_of_mutations_says_whether_anything_changed(self) -> None:
        async def main(barrier: Barrier) -> None:
            before = barrier.mutations
            async with barrier.cut():
                pass
            assert barrier.mutations == before
            await _mutate(barrier, None)
            assert barrier.mutations > before

        self.run(main)


async def _mutate(
    barrier: Barrier,
    inside: Callable[[], Awaitable[object]] | None,
    said: list[str] | None = None,
    what: str = "",
) -> None:
    async with barrier.mutation("put"):
        if inside is not None:
            await inside()
        if said is not None:
            said.append(what)


async def _cut(barrier: Barrier, said: list[str]) -> None:
    async with barrier.cut():
        said.append("cut")


async def _settle() -> None:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)

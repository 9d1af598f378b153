"""Virtual time: it jumps, it shuffles by seed, and it says when nothing can happen any more."""

from __future__ import annotations

import asyncio

import pytest

from participants.virtual_time import Deadlock, VirtualTimeLoop, run


def test_hours_pass_at_once_and_only_when_everybody_waits() -> None:
    async def main() -> list[float]:
        loop, seen = asyncio.get_running_loop(), []
        for _ in range(3):
            await asyncio.sleep(0)
            seen.append(loop.time())
        await asyncio.sleep(3600)
        seen.append(loop.time())
        return seen

    assert run(main()) == [0.0, 0.0, 0.0, 3600.0]


def test_timeouts_and_timers_keep_their_order() -> None:
    async def main() -> list[str]:
        order: list[str] = []

        async def says(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            order.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(says("last", 30))
            group.create_task(says("first", 10))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(20):
                    await asyncio.sleep(1000)
            order.append("timeout")
        return order

    assert run(main()) == ["first", "timeout", "last"]


def test_a_cancelled_timer_does_not_move_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(5, lambda: None).cancel()
        await asyncio.sleep(7)
        return loop.time()

    assert run(main()) == 7.0


def test_a_seed_repeats_a_schedule_and_seeds_differ() -> None:
    async def main() -> tuple[int, ...]:
        order: list[int] = []

        async def says(number: int) -> None:
            await asyncio.sleep(1)
            order.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(says(number))
        return tuple(order)

    assert run(main()) == run(main())
    assert run(main(), seed=1) == run(main(), seed=1)
    assert len({run(main(), seed=seed) for seed in range(8)}) > 1


def test_a_deadlock_is_raised_not_waited_for() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="no timer is set"):
        run(main())


def test_a_deadlock_leaves_the_loop_usable() -> None:
    """A test may want to say what was stuck, and clean up."""
    loop = VirtualTimeLoop()
    try:
        stuck = loop.create_future()
        with pytest.raises(Deadlock):
            loop.run_until_complete(stuck)
        stuck.set_result("not any more")
        assert loop.run_until_complete(stuck) == "not any more"
        loop.run_until_complete(asyncio.sleep(1))
    finally:
        loop.close()


def test_the_private_names_of_asyncio_that_it_uses_exist() -> None:
    """They are not promised to stay: a new Python must fail here, by name, and not by hanging."""
    loop = VirtualTimeLoop()
    try:
        timer = loop.call_later(5, lambda: None)
        assert list(loop._ready) == []  # type: ignore[attr-defined]
        assert list(loop._scheduled) == [timer]  # type: ignore[attr-defined]
        assert loop._stopping is False  # type: ignore[attr-defined]
        assert callable(asyncio.SelectorEventLoop._run_once)  # type: ignore[attr-defined]
        assert (timer._when, timer._scheduled) == (5.0, True)  # type: ignore[attr-defined]
        timer.cancel()
        assert timer._cancelled is True  # type: ignore[attr-defined]
        soon = loop.call_soon(lambda: None)
        assert list(loop._ready) == [soon]  # type: ignore[attr-defined]
    finally:
        loop.close()

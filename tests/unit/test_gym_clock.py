"""H6: parked time is invisible to a loop's own time-outs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from participants.gym.servers.clock import ParkingLoop, ParkingTimers, RunTimers
from participants.virtual_time import VirtualTimeLoop
from tests.gym_world import World, fence


class Loop(ParkingTimers, VirtualTimeLoop):
    """As in a server's process, with time that jumps."""


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)


async def impatient(task: dict[str, Any], http: httpx.AsyncClient) -> list[str]:
    """Gives each model call 10 seconds, in the three ways that people write it."""
    body = {"messages": [{"role": "user", "content": "go"}]}
    said = []
    async with asyncio.timeout(10):
        said.append((await http.post("http://policy/v1/chat/completions", json=body)).text)
    ask = http.post("http://policy/v1/chat/completions", json={**body, "n": 1})
    said.append((await asyncio.wait_for(ask, 10)).text)
    ask = http.post("http://policy/v1/chat/completions", json={**body, "n": 2})
    asked = asyncio.ensure_future(ask)
    done, _ = await asyncio.wait({asked}, timeout=10)
    assert done, "its time was up"
    said.append(asked.result().text)
    return said


def test_a_pause_longer_than_the_time_out_of_a_model_call_kills_no_rollout(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, impatient)
        for sequence in (1, 2, 3):  # one pause per call, each longer than its time-out
            await world.close(fence(sequence))
            if sequence == 1:
                running = world.start()
                await asyncio.sleep(1)
            await asyncio.sleep(40)
            await world.release(fence(sequence))
            await asyncio.sleep(0.5)
        reply = (await running).json()
        assert reply["error"] is None, reply["error"]
        assert len(reply["result"]) == 3

    run(main())


def test_timers_stand_still_and_go_on_with_what_was_left() -> None:
    async def main() -> None:
        loop, timers, rang = asyncio.get_running_loop(), RunTimers(), list[float]()

        async def sleeper() -> None:
            timers.adopt_this_task()
            await asyncio.sleep(10)
            rang.append(loop.time())

        task = asyncio.create_task(sleeper())
        await asyncio.sleep(4)
        timers.stop()
        timers.stop()
        await asyncio.sleep(100)
        assert rang == []
        timers.go_on()
        timers.go_on()
        await task
        assert rang == [pytest.approx(110)]

    run(main())


def test_a_timer_set_while_time_stands_still_waits_too() -> None:
    async def main() -> None:
        loop, timers = asyncio.get_running_loop(), RunTimers()
        timers.stop()

        async def sleeper() -> float:
            timers.adopt_this_task()
            await asyncio.sleep(1)
            return loop.time()

        task = asyncio.create_task(sleeper())
        await asyncio.sleep(50)
        timers.go_on()
        assert await task == pytest.approx(51)

    run(main())


def test_timers_of_others_are_not_touched() -> None:
    async def main() -> None:
        timers = RunTimers()
        timers.stop()
        await asyncio.sleep(1)

    run(main())


def test_a_cancelled_timer_never_rings() -> None:
    async def main() -> None:
        timers, rang = RunTimers(), list[int]()

        async def cancels() -> None:
            timers.adopt_this_task()
            timer = asyncio.get_running_loop().call_later(1, rang.append, 1)
            assert not timer.cancelled()
            timer.cancel()
            assert timer.cancelled()

        await asyncio.create_task(cancels())
        timers.stop()
        timers.go_on()
        await asyncio.sleep(5)
        assert rang == []

    run(main())


def test_the_servers_loop_is_a_real_one() -> None:
    """Under `serve` time is real; `asyncio.sleep(0)` and timers of nobody work as ever."""
    with asyncio.Runner(loop_factory=ParkingLoop) as runner:
        runner.run(asyncio.sleep(0.001))

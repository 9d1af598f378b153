"""The NemoGym actor as a real Ray actor, against fake servers over real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from fsm import hold
from fsm.outcome import NotReleased, Refused, Unavailable
from participants.gym import wire
from participants.gym.actor import start_actor
from participants.gym.client import GymServer
from participants.gym.fake import TOKEN, FakeGym, Fault
from participants.gym.participant import Gym
from participants.gym.remote import in_reach
from tests.gym_support import (
    FENCE,
    Draft,
    Operation,
    Snapshot,
    attempt_of,
    continuation,
    entry,
    fake_gym,
    restore_of,
    run,
    until,
)
from tests.integration.http_support import serving

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init(num_cpus=12, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def gym() -> Iterator[tuple[FakeGym, list[GymServer]]]:
    fake = fake_gym()
    with serving({name: fake.app(name) for name in fake.fakes}) as urls:
        yield fake, [GymServer(one.kind, one.name, urls[one.name]) for one in fake.servers]


def test_a_save_and_a_restore_through_handles(
    ray: Any, gym: tuple[FakeGym, list[GymServer]]
) -> None:
    fake, servers = gym
    fake["a0"].report = wire.Report(
        "",
        files=(entry("gym/agent/a0/continuations.jsonl"),),
        continuations=(continuation("p7_g2", tools=3),),
    )
    fake["tools"].report = wire.Report("", revisions={"p7_g2": 3})
    handle = start_actor(servers, TOKEN)
    participant, draft = Gym([handle]), Draft()

    async def main() -> None:
        assert (await participant.describe())["a0"]["kind"] == "agent"
        attempt = attempt_of(Operation(left_s=30.0), draft)
        await participant.prepare(attempt)
        await participant.drain(attempt)
        facts = await participant.commit(attempt)
        assert facts["continuations"] == 1
        await participant.renew(attempt)
        await participant.resume(attempt)
        assert {one.phase for one in fake.fakes.values()} == {hold.OPEN}

        operation = Operation(fence=type(FENCE)("root", 4, 1), left_s=30.0)
        restore = restore_of(operation, Snapshot(tuple(draft.files)))
        await participant.fence(restore)
        facts = await participant.restore(restore)
        assert list(facts["_continuations"]) == ["p7_g2"]
        operation.facts |= {"gym": facts, "controller": {"discard": ["p7_g2"]}}
        await participant.reconcile(restore)
        await participant.resume(restore)
        assert {one.activations for one in fake.fakes.values()} == {1}

    run(main)
    ray.kill(handle)


def test_refusals_come_across_as_they_were_raised(
    ray: Any, gym: tuple[FakeGym, list[GymServer]]
) -> None:
    fake, servers = gym
    handle = start_actor(servers, TOKEN)
    participant = Gym([handle])

    async def main() -> None:
        attempt = attempt_of(Operation(left_s=30.0))
        fake["a0"].faults.append(Fault("prepare", "refuse", code=wire.BUSY))
        with pytest.raises(Refused, match="a0") as caught:
            await participant.prepare(attempt)
        assert type(caught.value) is Refused
        assert caught.value.code == wire.BUSY
        fake["p0"].faults.append(Fault("resume", "refuse"))
        with pytest.raises(NotReleased) as silent:
            await participant.resume(attempt)
        assert silent.value.names == {"p0"}
        await participant.resume(attempt)

    run(main)
    ray.kill(handle)


def test_a_rollout_runs_through_a_handle(ray: Any, gym: tuple[FakeGym, list[GymServer]]) -> None:
    _, servers = gym
    handle = start_actor(servers, TOKEN)
    request = wire.RunRequest(
        rollout_id="p7_g2", attempt_index=0, incarnation=3, lineage=0, expect="fresh"
    )

    async def main() -> None:
        reply = await in_reach(handle).run_rollout("a1", request)
        assert reply.result == {"reward": 1.0}

    run(main)
    ray.kill(handle)


def test_a_cancelled_call_leaves_the_actor_in_order(
    ray: Any, gym: tuple[FakeGym, list[GymServer]]
) -> None:
    fake, servers = gym
    handle = start_actor(servers, TOKEN)
    fake["a0"].blockers = ("p7_g2",)

    async def main() -> None:
        participant, attempt = Gym([handle]), attempt_of(Operation(left_s=30.0))
        await participant.prepare(attempt)
        draining = asyncio.create_task(participant.drain(attempt))
        await until(lambda: ("a0", "drain") in fake.log)
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        await participant.resume(attempt)
        assert {one.phase for one in fake.fakes.values()} == {hold.OPEN}

    run(main)
    ray.kill(handle)


def test_a_dead_actor_is_unavailable_and_a_fresh_one_releases(
    ray: Any, gym: tuple[FakeGym, list[GymServer]]
) -> None:
    fake, servers = gym
    handle = start_actor(servers, TOKEN)

    async def main() -> None:
        participant, attempt = Gym([handle]), attempt_of(Operation(left_s=30.0))
        await participant.prepare(attempt)
        ray.kill(handle)
        with pytest.raises(Unavailable, match="start it again"):
            await participant.drain(attempt)
        with pytest.raises(NotReleased):
            await participant.resume(attempt)
        fresh = start_actor(servers, TOKEN)
        await Gym([fresh]).resume(attempt)
        assert {one.phase for one in fake.fakes.values()} == {hold.OPEN}
        ray.kill(fresh)

    run(main)

"""The three servers together: save, crash, restore, continue."""

from __future__ import annotations

import asyncio

from tests.gym_world import World, fence, lines, until


async def _parked_after(world: World, calls: int, rollout: str = "p7_g2") -> None:
    """Start a run, and hold the servers with `calls` model calls finished."""
    world.upstream.open.clear()
    task = world.start(rollout)
    for done in range(calls + 1):
        await until(lambda n=done: len(world.upstream.asked) > n)
        if done == calls:
            break
        world.upstream.open.set()
        await until(lambda n=done: len(world.upstream.asked) > n + 1 or task.done())
        world.upstream.open.clear()


def test_a_run_without_snapshots(tmp_path):
    async def main():
        world = World(tmp_path)
        reply = await world.run()
        assert [count for _, count in reply.result] == [1, 3, 6]
        assert reply.rows == ("p7_g2/call-1", "p7_g2/call-2", "p7_g2/call-3")
        assert (reply.turns, reply.replayed, reply.error) == (3, 0, None)
        assert world.sink.rows["p7_g2/call-2"]["token_ids"] == [7]
        assert world.sink.rows["p7_g2/call-2"]["logprobs"] == [-0.5]
        assert world.sink.rows["p7_g2/call-2"]["policy_version"] == 3

    asyncio.run(main())


def test_a_restored_run_continues_as_if_nothing_had_happened(tmp_path):
    async def main():
        whole = await World(tmp_path).run()

        old = World(tmp_path)
        old.upstream.open.clear()
        old.start()
        await until(lambda: old.upstream.asked)
        save = asyncio.create_task(old.save(fence(1)))
        await until(lambda: old.agent.gate.closed and old.resource.gate.closed)
        old.upstream.open.set()
        snapshot, saved = await save
        (line,) = lines(tmp_path / snapshot / "gym/agent/agent0/continuations.jsonl")
        assert line == {
            "schema_version": 1, "rollout_id": "p7_g2", "attempt_index": 0,
            "capture_key": "p7_g2", "last_committed_model_call_id": "call-1",
            "resource_state_revisions": {"tools": 1},
        }  # fmt: skip

        for incarnation in (2, 3):  # the same snapshot twice gives run 1 twice (R3)
            new = World(tmp_path)
            await new.stage(fence(1, incarnation), snapshot, saved)
            await new.release(fence(1, incarnation))
            reply = await new.run(
                attempt_index=1, incarnation=incarnation, expect="continuation",
                expect_call="call-1",
            )  # fmt: skip
            assert reply.result == whole.result
            assert reply.rows == ("p7_g2/call-1", "p7_g2-a1/call-2", "p7_g2-a1/call-3")
            assert (reply.turns, reply.replayed) == (3, 1)
            assert len(new.upstream.asked) == 2
            assert new.counter.applied == ["p7_g2", "p7_g2"]

    asyncio.run(main())

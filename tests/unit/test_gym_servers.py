"""The three servers together: save, crash, restore, continue."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from attrs import evolve

from participants.gym import wire
from tests.gym_world import KINDS, World, code, fence, lines, release, send, until


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


@pytest.mark.parametrize("drain", ["calls", "none"])
@pytest.mark.parametrize("seed", range(8))
def test_crashes_at_any_turn_change_no_history(tmp_path, seed, drain):
    """Several rollouts, snapshots at random moments, a crash after each, work after each
    snapshot lost: the histories and rows are those of a run that nobody interrupted."""

    async def main():
        random = Random(seed)
        names = [f"p{n}_g0" for n in range(5)]
        tasks = {name: {"turns": random.randint(1, 5), "say": name} for name in names}
        calm = World(tmp_path)
        expected = {name: (await calm.run(name, task=tasks[name])).result for name in names}

        world, starts = World(tmp_path), {name: {"task": tasks[name]} for name in names}
        for incarnation in (1, 2, 3):
            enough = len(world.upstream.asked) + random.randint(1, 6)
            running = [world.start(name, **starts[name]) for name in names]
            await until(
                lambda w=world, n=enough, r=running: (
                    len(w.upstream.asked) >= n or all(t.done() for t in r)
                )
            )
            snapshot, saved = await world.save(fence(2, incarnation), drain=drain)
            await world.release(fence(2, incarnation))
            for _ in range(random.randint(0, 200)):
                await asyncio.sleep(0)  # work that the crash loses
            rows = world.sink.rows
            world = World(tmp_path)
            kept = {row for named in saved["agent"].rows.values() for row in named}
            world.sink.rows = {key: row for key, row in rows.items() if key in kept}
            assert set(world.sink.rows) == kept
            await world.stage(fence(1, incarnation + 1), snapshot, saved)
            await world.release(fence(1, incarnation + 1))
            starts = _next_starts(saved["agent"], incarnation, starts)
        replies = {name: await world.run(name, **starts[name]) for name in names}
        assert {name: reply.result for name, reply in replies.items()} == expected
        rows = [row for reply in replies.values() for row in reply.rows]
        assert len(rows) == len(set(rows)) == sum(task["turns"] for task in tasks.values())
        assert set(rows) == set(world.sink.rows)
        assert world.counter.counts == calm.counter.counts

    asyncio.run(main())


def _next_starts(saved: wire.Report, incarnation: int, starts: dict) -> dict:
    """What a controller re-sends: run n+1, with what it knows that the agent has (R7)."""
    places = {line.rollout_id: line.last_committed_model_call_id for line in saved.continuations}
    finished = {result.rollout_id for result in saved.finished}
    result = {}
    for name, start in starts.items():
        common = {
            "task": start["task"], "attempt_index": incarnation, "incarnation": incarnation + 1,
        }  # fmt: skip
        lineage = start.get("lineage", 0)
        if name in finished:
            result[name] = common | {"expect": "finished", "lineage": lineage}
        elif name in places:
            expect = {"expect": "continuation", "expect_call": places[name]}
            result[name] = common | expect | {"lineage": lineage}
        else:
            result[name] = common | {"expect": "fresh", "lineage": incarnation}
    return result


def test_a_server_started_after_the_restore_began_refuses_to_activate(tmp_path):
    """R1: it has nothing staged; answering 200 would make the restore look whole."""

    async def main():
        world = World(tmp_path)
        resume = evolve(release(fence(2)), activate=True)
        for kind in KINDS:
            answer = await send(world.clients[kind], "resume", resume)
            assert code(answer) == (409, wire.INVALID_PHASE), kind

    asyncio.run(main())

"""RlController: each change whole or not at all, and its bookkeeping across restores."""

from __future__ import annotations

import asyncio

import pytest

from fsm.outcome import InvariantError, Refused, Unavailable
from participants.controller.join import BEGAN_AFTER, CAPTURE_MISSING
from participants.controller.restoring import GAVE_UP
from participants.data_plane import CAPTURE, TRAIN
from tests.controller_support import World, play, restore, send_all, settle, world


async def nothing() -> None:
    """An anchor that is durable at once."""


async def buffered(one: World, groups: int = 1) -> None:
    """Draw, play and seal whole groups."""
    for _ in range(groups):
        await one.rl.draw()
    for request in await send_all(one):
        assert await play(one, request)


def test_a_rollout_from_its_prompt_to_a_trained_step() -> None:
    async def main() -> None:
        one = world()
        await buffered(one, 2)
        rows = await one.plane.get_rows(TRAIN, ["p0_g1"])
        assert rows["p0_g1"]["tokens"] == [0, 7, 1, 7]
        assert rows["p0_g1"]["version"] == [0, 0]
        assert rows["p0_g1"]["model"] == '["tiny", "tiny"]'
        assert rows["p0_g1"]["reward"] == 1.0
        assert await one.plane.keys(CAPTURE) == {}
        assert one.rl.conservation()["buffered"] == 2

        assert await one.rl.claim(1, 1) == ("p0",)
        assert set(await one.rl.rows(1)) == {"p0_g0", "p0_g1"}
        await one.rl.commit(1, nothing)
        assert (one.rl.step, set(await one.plane.keys(TRAIN))) == (1, {"p1_g0", "p1_g1"})
        counts = one.rl.conservation()
        assert (counts["drawn"], counts["trained"], counts["buffered"]) == (2, 1, 1)

    asyncio.run(main())


def test_siblings_are_spread_and_told_apart() -> None:
    async def main() -> None:
        one = world(group_size=3)
        await one.rl.draw()
        await one.rl.draw()
        servers = [entry.server for entry in one.rl.ledger.entries()]
        assert servers == ["agent-0", "agent-1"] * 3
        requests = await send_all(one)
        assert [request.task for request in requests[:3]] == [
            {"seed": 0, "generation": n} for n in range(3)
        ]

    asyncio.run(main())


def test_a_row_that_could_not_be_put_seals_nothing() -> None:
    async def main() -> None:
        one = world()
        await one.rl.draw()
        (request, _) = await send_all(one)
        await one.gym.turn(request.rollout_id)
        one.gym.end(request.rollout_id)
        one.plane.lose_next_tag()
        with pytest.raises(OSError, match="before the tag"):
            await one.rl.finish(request, one.gym.reply(request))
        assert one.rl.ledger.get(request.rollout_id).state == "dispatched"
        assert one.rl.ledger.owed() == ()
        assert await one.rl.finish(request, one.gym.reply(request)), "again, and it is taken in"
        assert await one.rl.finish(request, one.gym.reply(request)) is False, "once"

    asyncio.run(main())


def test_capture_rows_that_could_not_be_cleared_stay_owed() -> None:
    async def main() -> None:
        one = world()
        await one.rl.draw()
        first, second = await send_all(one)
        await one.gym.turn(first.rollout_id)
        one.gym.end(first.rollout_id)
        one.plane.fail(3)  # get, put, clear
        assert await one.rl.finish(first, one.gym.reply(first))
        assert set(await one.plane.keys(CAPTURE)) == {"p0_g0/call-0"}
        await play(one, second)
        assert await one.plane.keys(CAPTURE) == {}
        assert one.rl.ledger.uncleared() == ()

    asyncio.run(main())


def test_a_missing_capture_row_is_refused_by_name() -> None:
    async def main() -> None:
        one = world()
        await one.rl.draw()
        (request, _) = await send_all(one)
        await one.gym.turn(request.rollout_id)
        await one.plane.clear(CAPTURE, ["p0_g0/call-0"])
        one.gym.end(request.rollout_id)
        with pytest.raises(Refused, match=r"rows_missing: p0_g0.*p0_g0/call-0"):
            await one.rl.finish(request, one.gym.reply(request))
        assert await one.plane.keys(TRAIN) == {}

    asyncio.run(main())


@pytest.mark.parametrize("reward", [None, "1", True])
def test_a_result_without_a_reward_makes_no_row(reward: object) -> None:
    async def main() -> None:
        one = world()
        await one.rl.draw()
        (request, _) = await send_all(one)
        await one.gym.turn(request.rollout_id)
        one.gym.end(request.rollout_id, reward)
        with pytest.raises(ValueError, match="p0_g0: the result has no numeric `reward`"):
            await one.rl.finish(request, one.gym.reply(request))
        assert await one.plane.keys(TRAIN) == {}

    asyncio.run(main())


def test_an_anchor_that_failed_leaves_the_step_claimed() -> None:
    async def main() -> None:
        one = world()
        await buffered(one)
        await one.rl.claim(1, 1)

        async def full() -> None:
            assert one.rl.committing
            raise OSError("no space left")

        with pytest.raises(OSError, match="no space"):
            await one.rl.commit(1, full)
        assert not one.rl.committing
        assert one.rl.conservation()["claimed"] == 1
        assert len(await one.rl.rows(1)) == 2
        assert await one.rl.claim(1, 5) == ("p0",), "the same groups again"
        await one.rl.commit(1, nothing)
        assert one.rl.conservation()["trained"] == 1
        with pytest.raises(InvariantError, match="step 1 has claimed nothing"):
            await one.rl.commit(1, nothing)

    asyncio.run(main())


def test_while_stopped_nothing_is_sent_dropped_acknowledged_or_cleared() -> None:
    async def main() -> None:
        one = world()
        await one.rl.draw()
        first, second = await send_all(one)
        await one.rl.draw()
        await play(one, first)
        one.rl.stop_dispatch()
        sending = asyncio.create_task(one.rl.send("p1_g0"))
        dropping = asyncio.create_task(one.rl.drop("p1", "stale"))
        assert await play(one, second), "a reply that is on the wire is taken in"
        await one.rl.tend()
        await settle()
        assert not sending.done()
        assert not dropping.done()
        assert one.gym.retired == []
        assert one.gym.acknowledged == []
        assert set(await one.plane.keys(CAPTURE)) == {"p0_g1/call-0", "p0_g1/call-1"}, (
            "Gym's part may name these rows"
        )
        one.rl.open_dispatch(frozenset())
        await dropping
        assert await sending is None or one.rl.ledger.get("p1_g0") is None
        await one.rl.tend()
        assert len(one.gym.acknowledged) == 2
        assert await one.plane.keys(CAPTURE) == {}

    asyncio.run(main())


def test_waiting_at_the_gate_may_be_cancelled_and_a_silent_server_gets_nothing() -> None:
    async def main() -> None:
        one = world(opened=False)
        await one.rl.draw()
        sending = asyncio.create_task(one.rl.send("p0_g0"))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert one.rl.ledger.get("p0_g0").state == "reserved"
        one.rl.open_dispatch(frozenset({"agent-0"}))
        waiting = asyncio.create_task(one.rl.send("p0_g0"))
        assert (await one.rl.send("p0_g1")).rollout_id == "p0_g1"
        assert not waiting.done()
        one.rl.open_dispatch(frozenset())
        assert (await waiting).rollout_id == "p0_g0"

    asyncio.run(main())


def test_acks_that_do_not_go_through_stay_owed() -> None:
    async def main() -> None:
        one = world()
        await buffered(one)
        one.rl.stop_dispatch()
        one.gym.ack_failures.append(Unavailable("agent-0 is away"))
        assert await one.rl.flush_acks(1.0) == 2
        again = await restore(one.save())
        assert {ack.rollout_id for ack in again.rl.ledger.owed()} == {"p0_g0", "p0_g1"}
        assert await again.rl.flush_acks(1.0) == 0
        assert len(again.gym.acknowledged) == 2

    asyncio.run(main())


def test_a_flush_is_given_up_when_dispatch_stops() -> None:
    async def main() -> None:
        one = world()
        await buffered(one)
        asked = asyncio.Event()

        async def hang(results: object, timeout_s: float) -> None:
            asked.set()
            await asyncio.Event().wait()

        one.rl.outbox._send = hang
        tending = asyncio.create_task(one.rl.tend())
        await asked.wait()
        one.rl.stop_dispatch()
        await settle()
        assert tending.done(), "it does not wait for Gym"
        assert len(one.rl.ledger.owed()) == 2

    asyncio.run(main())


def test_start_overs_are_bounded_and_the_group_is_dropped_then() -> None:
    async def main() -> None:
        one = world(max_start_overs=1)
        await one.rl.draw()
        first, second = await send_all(one)
        await one.gym.turn(first.rollout_id)
        await one.rl.start_over(first, "lineage_lost")
        assert await one.plane.keys(CAPTURE) == {}
        (again,) = await send_all(one)
        assert (again.rollout_id, again.attempt_index, again.lineage) == ("p0_g0", 1, 1)
        assert await one.rl.finish(first, one.gym.reply(first)) is False, "run 0 is closed"
        await play(one, second)
        await one.rl.start_over(again, "lineage_lost")
        assert one.rl.ledger.totals.dropped == {GAVE_UP: 1}
        assert one.rl.conservation()["dropped"] == 1
        assert one.gym.retired == ["p0_g0"]
        assert await one.plane.keys(TRAIN) == {}, "its sibling's row leaves too"
        await one.rl.start_over(again, "late")  # its group is gone: nothing happens
        await one.rl.drop("p0", "late")

    asyncio.run(main())


def test_a_prompt_that_is_put_back_is_drawn_again() -> None:
    async def main() -> None:
        one = world(tasks=2)
        await one.rl.draw()
        await one.rl.drop("p0", "stale", put_back=True)
        again = await restore(one.save(), tasks=2)
        drawn = [await again.rl.draw() for _ in range(3)]
        assert drawn == ["p1", "p2", None]
        assert [entry.prompt for entry in again.rl.ledger.entries()] == [0, 0, 1, 1]

    asyncio.run(main())


def test_capture_rows_that_no_history_names_leave_with_their_group() -> None:
    async def main() -> None:
        one = world()
        await buffered(one, 2)
        await one.plane.put("p0_g0/call-9", {"tokens": [1]})  # of a call that was given up
        await one.plane.put("p1_g0-a3/call-0", {"tokens": [1]})
        await one.rl.claim(1, 1)
        await one.rl.commit(1, nothing)
        assert set(await one.plane.keys(CAPTURE)) == {"p1_g0-a3/call-0"}, "p1 is not trained yet"

    asyncio.run(main())


def test_a_buffered_group_that_is_dropped_is_not_claimed() -> None:
    async def main() -> None:
        one = world()
        await buffered(one, 2)
        await one.rl.drop("p0", "stale")
        assert one.rl.conservation()["dropped"] == 1
        assert await one.rl.claim(1, 2) is None
        assert await one.rl.claim(1, 1) == ("p1",)
        with pytest.raises(InvariantError, match="p1_g0 is claimed"):
            await one.rl.drop("p1", "stale")

    asyncio.run(main())


def test_a_row_of_a_group_dropped_meanwhile_does_not_stay() -> None:
    async def main() -> None:
        one = world()
        await one.rl.draw()
        (request, _) = await send_all(one)
        await one.gym.turn(request.rollout_id)
        one.gym.end(request.rollout_id)
        reply, put = one.gym.reply(request), one.plane.put_rows

        async def slow(*args: object) -> None:
            await one.rl.drop("p0", "stale")
            await put(*args)

        one.plane.put_rows = slow
        assert await one.rl.finish(request, reply) is False
        assert await one.plane.keys(TRAIN) == {}

    asyncio.run(main())


# -- restore -----------------------------------------------------------------------------------


def test_each_part_of_a_snapshot_comes_back_and_restoring_twice_gives_the_same_run() -> None:
    async def main() -> None:
        one = world(tasks=4)
        await buffered(one)
        await one.rl.draw()
        parked, ended = await send_all(one)
        await one.gym.turn(parked.rollout_id)
        await one.gym.turn(ended.rollout_id)
        one.gym.end(ended.rollout_id)
        await one.rl.draw()
        saved = one.save()
        for incarnation in (2, 3):
            again = await restore(saved, incarnation, tasks=4)
            assert again.loaded.decisions == (
                "p0_g0: finished, kept",
                "p0_g1: finished, kept",
                "p1_g0: run 0 → run 1, continues after call-0",
                "p1_g1: run 0 → run 1, finished in Gym, answered at once",
                f"p2_g0: starts over, {BEGAN_AFTER}",
                f"p2_g1: starts over, {BEGAN_AFTER}",
            )
            requests = {request.rollout_id: request for request in await send_all(again)}
            first = requests["p1_g0"]
            assert (first.incarnation, first.attempt_index, first.lineage) == (incarnation, 1, 0)
            assert (first.expect, first.expect_call) == ("continuation", "call-0")
            assert requests["p1_g1"].expect == "finished"
            assert (requests["p2_g0"].expect, requests["p2_g0"].lineage) == ("fresh", 1)
            assert list(requests)[:2] == ["p1_g0", "p1_g1"], "those that Gym waits for go first"
            for request in requests.values():
                assert await play(again, request)
            rows = await again.plane.get_rows(TRAIN, ["p1_g0"])
            assert rows["p1_g0"]["tokens"] == [0, 7, 1, 7, 2, 7]
            assert again.rl.conservation()["buffered"] == 3

    asyncio.run(main())


def test_three_restores_in_a_row_keep_the_history() -> None:
    async def main() -> None:
        one = world()
        await one.rl.draw()
        await send_all(one)
        for cycle in range(1, 4):
            await one.gym.turn("p0_g0")
            one = await restore(one.save(), incarnation=cycle + 1)
            request = (await send_all(one))[0]
            assert (request.attempt_index, request.lineage) == (cycle, 0)
            assert request.expect_call == f"call-{cycle - 1}"
        assert await play(one, request, turns=1)
        row = (await one.plane.get_rows(TRAIN, ["p0_g0"]))["p0_g0"]
        assert row["tokens"] == [0, 7, 1, 7, 2, 7, 3, 7]

    asyncio.run(main())


def test_a_snapshot_before_the_runs_are_sent_again_loses_no_continuation() -> None:
    async def main() -> None:
        one = world()
        await one.rl.draw()
        await send_all(one)
        await one.gym.turn("p0_g0")
        second = await restore(one.save())
        for run in second.gym.runs.values():
            run.attempt_index = 1  # as Gym sets them up
        third = await restore(second.save(), incarnation=3)
        assert third.loaded.answered == ()
        assert third.loaded.continued == ("p0_g0", "p0_g1")
        assert third.rl.ledger.get("p0_g0").attempt_index == 2
        assert third.rl.ledger.get("p0_g0").start_overs == 0

    asyncio.run(main())


def test_claims_that_the_anchor_does_not_contain_are_buffered_again() -> None:
    async def main() -> None:
        one = world(tasks=4)
        await buffered(one, 3)
        await one.rl.claim(1, 1)
        await one.rl.claim(2, 1)
        saved = one.save(anchor_step=1)
        again = await restore(saved, tasks=4)
        counts = again.rl.conservation()
        assert (counts["trained"], counts["claimed"], counts["buffered"]) == (1, 0, 2)
        assert set(again.loaded.keep_train) == {"p1_g0", "p1_g1", "p2_g0", "p2_g1"}
        assert again.rl.step == 1
        assert await again.rl.claim(2, 2) == ("p1", "p2"), "the undone claim is first"

    asyncio.run(main())


@pytest.mark.parametrize("save_period", [1, 2, 3])
def test_any_save_period(save_period: int) -> None:
    """R6: rows stay until a checkpoint has their step; whichever step the trainer is at, a restore
    gives back exactly the rows of steps that the checkpoint does not contain."""

    async def main() -> None:
        one = world(tasks=7)
        await buffered(one, 7)
        for step in range(1, 6):
            await one.rl.claim(step, 1)
            if step % save_period == 0:
                await one.rl.commit(step, nothing)
            anchor = step - step % save_period
            assert one.rl.step == anchor
            again = await restore(one.save(anchor_step=anchor), tasks=7)
            counts = again.rl.conservation()
            assert (counts["trained"], counts["claimed"]) == (anchor, 0)
            assert counts["buffered"] == 7 - anchor
            following = [await again.rl.claim(number, 1) for number in range(anchor + 1, 8)]
            assert following == [(f"p{number}",) for number in range(anchor, 7)], "in their order"

    asyncio.run(main())


def test_a_checkpoint_of_steps_that_claimed_nothing_is_a_bug() -> None:
    async def main() -> None:
        one = world()
        await buffered(one)
        await one.rl.claim(1, 1)
        for step in (0, 2):
            with pytest.raises(InvariantError, match="claimed nothing"):
                await one.rl.commit(step, nothing)
        await one.rl.commit(1, nothing)
        with pytest.raises(InvariantError, match="claimed nothing"):
            await one.rl.commit(1, nothing)

    asyncio.run(main())


def test_a_checkpoint_behind_the_ledger_is_refused_and_changes_nothing() -> None:
    async def main() -> None:
        one = world()
        await buffered(one)
        await one.rl.claim(1, 1)
        await one.rl.commit(1, nothing)
        with pytest.raises(ValueError, match=r"trained step 1.*checkpoint is of step 0"):
            await restore(one.save(anchor_step=0))

    asyncio.run(main())


def test_a_rollout_whose_rows_are_gone_starts_over_and_is_counted() -> None:
    async def main() -> None:
        one = world()
        await one.rl.draw()
        await send_all(one)
        await one.gym.turn("p0_g0")
        await one.plane.clear(CAPTURE, ["p0_g0/call-0"])
        again = await restore(one.save())
        assert again.loaded.started_over == {"p0_g0": CAPTURE_MISSING}
        assert again.loaded.discard == ("p0_g0",)
        assert again.rl.ledger.get("p0_g0").start_overs == 1
        assert again.rl.ledger.get("p0_g1").start_overs == 0

    asyncio.run(main())


def test_a_restore_gives_up_a_group_that_started_over_too_often() -> None:
    async def main() -> None:
        one = world(max_start_overs=0)
        await one.rl.draw()
        first, second = await send_all(one)
        await play(one, second)
        one.gym.runs.pop(first.rollout_id)
        again = await restore(one.save(), max_start_overs=0)
        assert again.loaded.decisions[0] == "p0_g0: dropped, its group started over too often"
        assert again.rl.ledger.totals.dropped == {GAVE_UP: 1}
        assert again.loaded.keep_train == ()
        assert await again.rl.draw() == "p1"

    asyncio.run(main())


def test_a_lost_training_row_is_made_again() -> None:
    async def main() -> None:
        one = world()
        await buffered(one)
        await one.plane.clear(TRAIN, ["p0_g1"])
        again = await restore(one.save())
        assert again.loaded.started_over == {"p0_g1": "its training row is missing"}
        assert again.rl.conservation()["in_flight"] == 1
        (request,) = await send_all(again)
        assert await play(again, request)
        assert await again.rl.claim(1, 1) == ("p0",)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["ledger", "totals", "loader", "replay"])
def test_records_that_cannot_be_used_change_nothing(name: str) -> None:
    async def main() -> None:
        one = world()
        await buffered(one, 2)
        saved = one.save()
        del saved.records[name]
        fresh = world()
        with pytest.raises(ValueError, match=name):
            await fresh.rl.load(saved.records, None)
        assert fresh.rl.conservation()["drawn"] == 0

    asyncio.run(main())


def test_books_that_do_not_balance_are_refused() -> None:
    async def main() -> None:
        one = world()
        await buffered(one, 2)
        saved = one.save()
        del saved.records["ledger"][:2]
        fresh = world()
        with pytest.raises(ValueError, match="2 prompts were drawn, the ledger has 1"):
            await fresh.rl.load(saved.records, None)
        assert (fresh.rl.loader.drawn, fresh.rl.ledger.entries()) == (0, ())
        saved = one.save()
        saved.records["replay"][0]["buffered"] = ["p0"]
        with pytest.raises(ValueError, match=r"replay index \(buffered, claimed\) \(1, 0\)"):
            await fresh.rl.load(saved.records, None)

    asyncio.run(main())


def test_changes_know_what_is_worth_a_snapshot() -> None:
    async def main() -> None:
        one, turns = world(), [0]
        quiet = one.rl.changes()
        await one.rl.draw()
        assert one.rl.changes() != quiet
        await send_all(one)
        assert one.rl.changes() is None, "turns may have finished in Gym"
        counted = world(turns=lambda: turns[0])
        before = counted.rl.changes()
        turns[0] += 1
        assert counted.rl.changes() != before

    asyncio.run(main())


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="group_size"):
        world(group_size=0)

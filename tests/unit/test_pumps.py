"""The pumps: everything drawn is trained once, whatever the servers answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fsm.outcome import Anchor, Refused, Unavailable
from participants.controller.pumps import AGAIN, BAD_RESULT, LOST, NO_ANSWER, RolloutPump
from participants.controller.restoring import GAVE_UP
from participants.data_plane import CAPTURE, TRAIN
from participants.gym.wire import RunReply, RunRequest
from quiesce.demo.anchors import Anchors
from quiesce.demo.pumps import TrainPump, advantages
from tests.controller_support import World, restore, settle, until, world


async def at_once(seconds: float) -> None:
    await asyncio.sleep(0)


def rollout_pump(one: World, **options: int) -> RolloutPump:
    limits = {"concurrency": 4, "max_open_groups": 2} | options
    return RolloutPump(one.rl, **limits, sleep=at_once)


async def run_all(one: World, anchors: Anchors, **options: int) -> TrainPump:
    """Until everything is drawn, played and trained."""
    trainer = TrainPump(one.rl, anchors, groups_per_step=2)
    trainer.load(None)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(rollout_pump(one, **options).run())
        tasks.create_task(trainer.run())
    return trainer


def trained(anchors: Anchors) -> list[str]:
    return [name for step in anchors.steps() for name in anchors.read(step)["rows"]]


def names(groups: range, size: int = 2) -> list[str]:
    return [f"p{group}_g{number}" for group in groups for number in range(size)]


async def assert_clean(one: World) -> None:
    assert await one.plane.keys(TRAIN) == {}
    assert await one.plane.keys(CAPTURE) == {}
    assert one.rl.ledger.entries() == ()
    assert one.gym.runs == {}


def test_everything_drawn_is_trained_once(tmp_path: Path) -> None:
    async def main() -> None:
        one, anchors = world(tasks=5), Anchors(tmp_path)
        one.gym.auto = True
        trainer = await run_all(one, anchors)
        assert sorted(trained(anchors)) == names(range(5))
        assert anchors.steps() == [1, 2, 3], "the last step takes what is left"
        assert trainer.version == one.rl.step == 3
        assert one.rl.conservation()["trained"] == 5
        await assert_clean(one)

    asyncio.run(main())


@pytest.mark.parametrize("code", sorted(LOST))
def test_a_lost_run_starts_over_with_a_new_number(code: str, tmp_path: Path) -> None:
    async def main() -> None:
        one = world(tasks=1)
        one.gym.auto, one.gym.failures = True, [Refused(code)]
        await run_all(one, Anchors(tmp_path))
        runs = [(ask.rollout_id, ask.attempt_index, ask.lineage) for ask in one.gym.asked]
        assert sorted(runs) == [("p0_g0", 0, 0), ("p0_g0", 1, 1), ("p0_g1", 0, 0)]
        await assert_clean(one)

    asyncio.run(main())


def test_a_server_that_is_away_is_asked_again_for_the_same_run(tmp_path: Path) -> None:
    async def main() -> None:
        one = world(tasks=1, group_size=1)
        one.gym.auto = True
        one.gym.failures = [Unavailable("agent-0"), Unavailable("agent-0")]
        await run_all(one, Anchors(tmp_path))
        assert [ask.attempt_index for ask in one.gym.asked] == [0, 0, 0]

    asyncio.run(main())


def test_nobody_is_asked_again_while_dispatch_is_stopped() -> None:
    async def main() -> None:
        one = world(tasks=1, group_size=1)
        one.gym.failures = [Unavailable("agent-0")]
        pump = asyncio.create_task(rollout_pump(one).run())
        await until(lambda: one.gym.asked)
        one.rl.stop_dispatch()
        await settle()
        assert len(one.gym.asked) == 1
        one.gym.auto = True
        one.rl.open_dispatch(frozenset())
        await pump
        assert [ask.attempt_index for ask in one.gym.asked] == [0, 0]

    asyncio.run(main())


def test_no_answer_for_too_long_starts_over_and_then_gives_up() -> None:
    async def main() -> None:
        one = world(tasks=1, group_size=1, max_start_overs=1)
        one.gym.failures = [Unavailable("agent-0")] * 4
        await rollout_pump(one, send_attempts=2).run()
        assert [ask.attempt_index for ask in one.gym.asked] == [0, 0, 1, 1]
        assert one.rl.ledger.totals.dropped == {GAVE_UP: 1}

    asyncio.run(main())


def test_loops_that_fail_start_over_more_and_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that is broken for a moment must not cost every group its start-overs."""
    waited_s: list[float] = []

    async def failing(_: str, request: RunRequest) -> RunReply:
        return RunReply(
            rollout_id=request.rollout_id,
            attempt_index=request.attempt_index,
            result=None,
            result_digest="",
            rows=(),
            turns=0,
            replayed=0,
            error="HTTPStatusError: 500",
        )

    async def wait(seconds: float) -> None:
        waited_s.append(seconds)

    async def main() -> None:
        one = world(tasks=1, group_size=1, max_start_overs=3)
        monkeypatch.setattr(one.gym, "run_rollout", failing)
        await RolloutPump(one.rl, concurrency=1, max_open_groups=1, sleep=wait).run()
        assert one.rl.ledger.totals.dropped == {GAVE_UP: 1}

    asyncio.run(main())
    assert waited_s == [0.25, 0.5, 1.0, 2.0]


def test_reasons_of_a_start_over_are_kept() -> None:
    async def main() -> None:
        one = world(tasks=1, group_size=1)
        one.gym.failures = [Unavailable("agent-0")]
        pump = asyncio.create_task(rollout_pump(one, send_attempts=1).run())
        await until(lambda: len(one.gym.asked) >= 2)
        assert one.rl.ledger.get("p0_g0").reason == NO_ANSWER
        await one.gym.turn("p0_g0")
        one.gym.end("p0_g0", reward="high")
        await until(lambda: len(one.gym.asked) >= 3)
        assert one.rl.ledger.get("p0_g0").reason == BAD_RESULT
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)

    asyncio.run(main())


def test_a_failing_data_plane_loses_no_result(tmp_path: Path) -> None:
    async def main() -> None:
        one = world(tasks=2)
        one.gym.auto = True
        put, failures = one.plane.put_rows, [OSError("away"), TimeoutError()]

        async def put_rows(partition: str, *args: object) -> None:
            if partition == TRAIN and failures:
                raise failures.pop()
            await put(partition, *args)

        one.plane.put_rows = put_rows
        await run_all(one, Anchors(tmp_path))
        assert [ask.attempt_index for ask in one.gym.asked] == [0] * 6, "the same runs, asked again"
        await assert_clean(one)

    asyncio.run(main())


@pytest.mark.parametrize("code", sorted(AGAIN))
def test_a_busy_server_is_asked_again(code: str, tmp_path: Path) -> None:
    async def main() -> None:
        one = world(tasks=1, group_size=1)
        one.gym.auto, one.gym.failures = True, [Refused(code)]
        await run_all(one, Anchors(tmp_path))
        assert [ask.attempt_index for ask in one.gym.asked] == [0, 0]

    asyncio.run(main())


def test_a_start_over_waits_for_the_data_plane() -> None:
    async def main() -> None:
        one = world(tasks=1, group_size=1)
        one.gym.auto, one.gym.failures = True, [Refused("lineage_lost")]
        one.plane.fail(1)  # the listing of its rows
        await rollout_pump(one).run()
        assert [ask.attempt_index for ask in one.gym.asked] == [0, 1]
        one = world(tasks=1, group_size=1)
        one.gym.failures = [Refused("lineage_lost")]
        one.plane.fail(1)
        with pytest.raises(ExceptionGroup) as raised:
            await rollout_pump(one, send_attempts=1).run()
        assert raised.group_contains(OSError)

    asyncio.run(main())


def test_an_unknown_refusal_is_raised() -> None:
    async def main() -> None:
        one = world(tasks=1)
        one.gym.failures = [Refused("unauthorized")]
        with pytest.raises(ExceptionGroup) as raised:
            await rollout_pump(one).run()
        assert raised.group_contains(Refused, match="unauthorized")

    asyncio.run(main())


def test_in_flight_and_open_groups_are_bounded() -> None:
    async def main() -> None:
        one = world(tasks=9)
        pump = asyncio.create_task(rollout_pump(one, concurrency=3, max_open_groups=4).run())
        await until(lambda: len(one.gym.runs) >= 3)
        await settle()
        assert len(one.gym.runs) == 3
        one.gym.auto = True
        for name in list(one.gym.runs):
            await one.gym.turn(name)
            one.gym.end(name)
        await until(lambda: one.rl.replay.buffered >= 4)
        await settle()
        assert one.rl.loader.drawn == 4, "nobody trains: generation waits"
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)

    asyncio.run(main())


def test_a_stopped_pump_sends_nothing_and_goes_on_when_opened(tmp_path: Path) -> None:
    async def main() -> None:
        one = world(tasks=2, opened=False)
        one.gym.auto = True
        everything = asyncio.create_task(run_all(one, Anchors(tmp_path)))
        await settle()
        assert (one.gym.asked, one.rl.loader.drawn) == ([], 0)
        one.rl.open_dispatch(frozenset())
        await everything
        await assert_clean(one)

    asyncio.run(main())


def test_crash_and_restore_train_everything_once(tmp_path: Path) -> None:
    async def main() -> None:
        one, anchors = world(tasks=6), Anchors(tmp_path)
        one.gym.auto = True
        trainer = TrainPump(one.rl, anchors, groups_per_step=2)
        pump = asyncio.create_task(rollout_pump(one, max_open_groups=4).run())
        await trainer.run(steps=1)
        await until(lambda: one.rl.replay.buffered >= 1)
        saved, anchor = one.save(), trainer.anchor
        await trainer.run(steps=2)  # lost by the crash: the snapshot's anchor is step 1
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)

        again = await restore(saved, tasks=6)
        again.gym.auto = True
        after = Anchors(tmp_path)
        TrainPump(again.rl, after, groups_per_step=2).load(anchor)
        assert after.steps() == [1]
        await run_all(again, after)
        assert sorted(trained(after)) == names(range(6))
        assert after.read(1)["parent"] == "bootstrap"
        await assert_clean(again)

    asyncio.run(main())


def test_advantages_are_relative_to_the_group() -> None:
    assert advantages([1.0, 1.0]) == [0.0, 0.0]
    assert advantages([0.0, 1.0]) == [-1.0, 1.0]
    assert sum(advantages([0.0, 0.5, 2.5])) == pytest.approx(0.0)


def test_anchors_are_whole_or_refused(tmp_path: Path) -> None:
    anchors = Anchors(tmp_path)
    assert anchors.newest() == Anchor(0, "bootstrap")
    first = anchors.write(1, {"rows": {}})
    assert anchors.write(1, {"rows": {}}) == first, "writing the same again is fine"
    with pytest.raises(FileExistsError, match="another step 1"):
        anchors.write(1, {"rows": {"p0_g0": {}}})
    with pytest.raises(ValueError, match="is not the checkpoint"):
        anchors.load(Anchor(1, "another"))
    with pytest.raises(ValueError, match="step_000007"):
        anchors.read(7)
    path = next(tmp_path.glob("step_*.json"))
    path.write_bytes(path.read_bytes().replace(b"rows", b"cows"))
    with pytest.raises(ValueError, match="digest does not match"):
        anchors.newest()


def test_a_half_written_anchor_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "tmp_step_000001.json").write_text("{")
    anchors = Anchors(tmp_path)
    assert (anchors.steps(), list(tmp_path.iterdir())) == ([], [])
    assert anchors.write(1, {}).step == 1


def test_setting_aside_twice_keeps_both(tmp_path: Path) -> None:
    anchors = Anchors(tmp_path)
    for body in ({"n": 1}, {"n": 2}):
        anchors.write(1, body)
        anchors.load(Anchor(0, "bootstrap"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "aside_000001_1.json",
        "aside_000001_2.json",
    ]


def test_a_trainer_refuses_a_checkpoint_of_another_step(tmp_path: Path) -> None:
    anchors = Anchors(tmp_path)
    anchors.write(1, {})
    trainer = TrainPump(world().rl, anchors, groups_per_step=1)
    with pytest.raises(ValueError, match="checkpoint is of step 1, the ledger of step 0"):
        trainer.load(None)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RolloutPump(world().rl, concurrency=0, max_open_groups=1)
    with pytest.raises(ValueError, match="groups_per_step"):
        TrainPump(world().rl, Anchors(tmp_path), groups_per_step=0)

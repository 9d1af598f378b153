"""The Gym participant: hooks, facts, holds that do not stand, several actors."""

from __future__ import annotations

from typing import Any

import pytest

from fsm import hold
from fsm.outcome import NotReleased, Refused, SnapshotRejected
from participants.gym import wire
from participants.gym.fake import TOKEN, FakeGym, Fault
from participants.gym.participant import Gym
from tests.gym_support import (
    FENCE,
    Draft,
    Operation,
    Snapshot,
    actor_of,
    attempt_of,
    continuation,
    entry,
    fake_gym,
    restore_of,
    run,
)

A0_FILE, TOOLS_FILE = "gym/agent/a0/continuations.jsonl", "gym/resource/tools/sessions.jsonl"


def phases(gym: FakeGym) -> set[str]:
    return {fake.phase for fake in gym.fakes.values()}


def with_state(gym: FakeGym) -> FakeGym:
    gym["a0"].report = wire.Report(
        "",
        files=(entry(A0_FILE),),
        continuations=(continuation("p7_g2", tools=3), continuation("p8_g0", None)),
        finished=(wire.Finished("p9_g1", 0, "digest"),),
        restarts=(wire.Restart("p1_g1", "straggler"),),
    )
    gym["p0"].report = wire.Report(
        "", rows={"p7_g2": ("p7_g2/call-1", "p7_g2/call-2"), "p1_g1": ("p1_g1/call-1",)}
    )
    gym["tools"].report = wire.Report("", files=(entry(TOOLS_FILE),), revisions={"p7_g2": 3})
    return gym


async def saved_until_commit(gym: FakeGym, draft: Draft) -> tuple[Gym, Any, Any]:
    participant, attempt = Gym([actor_of(gym)]), attempt_of(Operation(), draft)
    await participant.prepare(attempt)
    await participant.drain(attempt)
    return participant, attempt, await participant.commit(attempt)


def test_topology_leaves_out_what_lives() -> None:
    async def main() -> None:
        gym = fake_gym()
        before = await Gym([actor_of(gym)]).describe()
        gym["a0"].capabilities = {"phase": "held", "instance": "two", "live_runs": 9}
        assert await Gym([actor_of(gym)]).describe() == before
        assert list(before) == ["a0", "a1", "p0", "p1", "tools"]
        assert before["tools"] == {
            "kind": "resource",
            "mode": "export",
            "isolation": "per_session",
        }

    run(main)


def test_a_save_notes_files_and_says_what_is_in_it() -> None:
    async def main() -> None:
        draft, gym = Draft(), with_state(fake_gym())
        participant, attempt, facts = await saved_until_commit(gym, draft)
        assert draft.files == [entry(A0_FILE), entry(TOOLS_FILE)]
        assert facts == {
            "continuations": 2,
            "finished": 1,
            "sessions": 1,
            "restarts": {"p1_g1": "straggler"},
            "servers": ["a0", "a1", "p0", "p1", "tools"],
            "_rows": {"p7_g2": ["p7_g2/call-1", "p7_g2/call-2"]},
        }
        assert gym["a0"].received[-1].folder == "tmp_1"
        await participant.renew(attempt)
        await participant.resume(attempt)
        assert phases(gym) == {hold.OPEN}

    run(main)


def test_a_message_carries_what_the_attempt_says() -> None:
    async def main() -> None:
        gym = fake_gym()
        await Gym([actor_of(gym)]).prepare(attempt_of(Operation(left_s=100.0, lease_s=42.0)))
        message = gym["p0"].received[-1]
        assert (message.fence, message.lease_s) == (FENCE, 42.0)
        # A little less than the step has, so that the answer still arrives in time.
        assert message.timeout_s == pytest.approx(99.0, abs=0.5)

    run(main)


def test_a_hold_that_moved_after_its_commit_is_lost() -> None:
    async def main() -> None:
        gym = with_state(fake_gym())
        participant, attempt, _ = await saved_until_commit(gym, Draft())
        gym["tools"].moved = True
        with pytest.raises(Refused, match="moved on tools") as caught:
            await participant.renew(attempt)
        assert caught.value.code == "hold_lost"

    run(main)


def test_a_hold_that_lapsed_is_lost() -> None:
    async def main() -> None:
        gym = fake_gym()
        participant, attempt, _ = await saved_until_commit(gym, Draft())
        gym["a1"].lapse()
        with pytest.raises(Refused, match="a1") as caught:
            await participant.renew(attempt)
        assert caught.value.code == wire.LEASE_EXPIRED

    run(main)


def test_a_server_that_started_afresh_has_lost_its_hold() -> None:
    async def main() -> None:
        gym = fake_gym()
        participant, attempt, _ = await saved_until_commit(gym, Draft())
        gym["a1"].restart()
        with pytest.raises(Refused, match="a1 is open, not committed"):
            await participant.renew(attempt)

    run(main)


def test_an_abort_reports_the_silent_of_every_actor() -> None:
    async def main() -> None:
        gyms = [FakeGym(("policy", f"p{i}"), ("agent", f"a{i}")) for i in range(2)]
        participant = Gym([actor_of(gym) for gym in gyms])
        attempt = attempt_of(Operation())
        await participant.prepare(attempt)
        gyms[0]["a0"].alive = False
        gyms[1]["p1"].faults.append(Fault("resume", "refuse"))
        with pytest.raises(NotReleased) as caught:
            await participant.resume(attempt)
        assert caught.value.names == {"a0", "p1"}
        assert gyms[1]["a1"].phase == hold.OPEN
        gyms[0]["a0"].restart()
        await participant.resume(attempt)
        assert phases(gyms[0]) | phases(gyms[1]) == {hold.OPEN}

    run(main)


def test_a_server_of_two_actors_is_refused() -> None:
    async def main() -> None:
        gym = fake_gym()
        with pytest.raises(Refused, match="two actors have 'a0'"):
            await Gym([actor_of(gym), actor_of(gym)]).describe()

    run(main)


def test_no_actor_is_a_wrong_call() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Gym([])


# -- restore -----------------------------------------------------------------------------------


def test_a_restore_stages_then_discards_then_activates() -> None:
    async def main() -> None:
        gym = with_state(fake_gym())
        operation = Operation()
        snapshot = Snapshot(
            (entry(A0_FILE), entry(TOOLS_FILE)), {"gym": {"restarts": {"p2_g0": "uncertain"}}}
        )
        participant, restore = Gym([actor_of(gym)]), restore_of(operation, snapshot)
        await participant.fence(restore)
        facts = await participant.restore(restore)
        assert facts == {
            "continuations": 2,
            "finished": 1,
            "restarts": 2,
            "_continuations": {
                "p7_g2": {
                    "attempt_index": 0,
                    "server": "a0",
                    "capture_key": "p7_g2",
                    "last_call": "call-2",
                },
                "p8_g0": {
                    "attempt_index": 0,
                    "server": "a0",
                    "capture_key": "p8_g0",
                    "last_call": None,
                },
            },
            "_finished": {"p9_g1": {"attempt_index": 0, "server": "a0", "result_digest": "digest"}},
            "_rows": {"p7_g2": ["p7_g2/call-1", "p7_g2/call-2"]},
            "_restarts": {"p1_g1": "straggler", "p2_g0": "uncertain"},
        }
        await participant.renew(restore)

        operation.facts |= {"gym": facts, "controller": {"discard": ["p8_g0"]}}
        await participant.reconcile(restore)
        for fake in gym.fakes.values():
            assert fake.received[-1].rollouts == ("p1_g1", "p2_g0", "p8_g0")
        assert {fake.activations for fake in gym.fakes.values()} == {0}

        await participant.resume(restore)
        assert {fake.activations for fake in gym.fakes.values()} == {1}
        assert phases(gym) == {hold.OPEN}

    run(main)


def test_nothing_left_over_means_no_message() -> None:
    async def main() -> None:
        gym = fake_gym()
        participant, restore = Gym([actor_of(gym)]), restore_of(Operation(), Snapshot())
        await participant.fence(restore)
        await participant.restore(restore)
        await participant.reconcile(restore)
        assert gym.order(["discard"]) == []

    run(main)


def test_a_part_that_no_server_owns_is_refused() -> None:
    async def main() -> None:
        gym = fake_gym()
        snapshot = Snapshot((entry(A0_FILE), entry("gym/agent/gone/continuations.jsonl")))
        participant, restore = Gym([actor_of(gym)]), restore_of(Operation(), snapshot)
        await participant.fence(restore)
        with pytest.raises(SnapshotRejected, match="gym/agent/gone/"):
            await participant.restore(restore)
        await participant.rollback(restore)
        assert phases(gym) == {hold.OPEN}
        assert {fake.activations for fake in gym.fakes.values()} == {0}

    run(main)


def test_a_part_that_a_server_cannot_use_rejects_the_snapshot() -> None:
    async def main() -> None:
        gym = fake_gym()
        gym["a0"].faults.append(Fault("restore", "refuse", code=wire.BAD_STATE))
        participant, restore = Gym([actor_of(gym)]), restore_of(Operation(), Snapshot())
        await participant.fence(restore)
        with pytest.raises(SnapshotRejected, match=r"snapshot_1.*a0"):
            await participant.restore(restore)

    run(main)


def test_a_start_from_nothing_closes_older_runs_and_leaves_servers_open() -> None:
    async def main() -> None:
        gym = fake_gym()
        participant, restore = Gym([actor_of(gym)]), restore_of(Operation())
        await participant.fence(restore)
        assert await participant.restore(restore) == {}
        await participant.reconcile(restore)
        await participant.resume(restore)
        assert {fake.activations for fake in gym.fakes.values()} == {1}
        assert phases(gym) == {hold.OPEN}

    run(main)


def test_a_restore_whose_lease_ended_is_not_taken_for_activated() -> None:
    async def main() -> None:
        gym = fake_gym()
        participant, restore = Gym([actor_of(gym)]), restore_of(Operation(), Snapshot())
        await participant.fence(restore)
        await participant.restore(restore)
        gym["a0"].faults.append(Fault("resume", "lapse"))
        with pytest.raises(NotReleased) as caught:
            await participant.resume(restore)
        assert caught.value.names == {"a0"}

    run(main)


# -- Ray handles -------------------------------------------------------------------------------


def test_status_is_told_who_is_waited_for() -> None:
    async def main() -> None:
        gym, operation = fake_gym(), Operation()
        gym["a0"].blockers = ("p7_g2",)
        participant, attempt = Gym([actor_of(gym)]), attempt_of(operation)
        await participant.prepare(attempt)
        await participant.renew(attempt)
        assert operation.waited_for == ["a0: p7_g2"]

    run(main)


def test_the_token_is_not_in_what_an_actor_shows() -> None:
    assert TOKEN not in repr(actor_of(fake_gym()))

"""NemoGymActor against fake servers: orders, who is told, deadlines, releases past failures."""

from __future__ import annotations

import asyncio

import pytest
from attrs import evolve

from fsm import hold
from fsm.outcome import NotReleased, Refused, Unavailable
from fsm.storing import Fence
from participants.gym import merge, wire
from participants.gym.fake import FakeGym, Fault
from tests.gym_support import (
    FENCE,
    actor_of,
    commit,
    continuation,
    control,
    drain,
    entry,
    fake_gym,
    prepare,
    release,
    run,
    until,
)

KINDS = {"p0": "policy", "p1": "policy", "a0": "agent", "a1": "agent", "tools": "resource"}
SECOND = Fence("root", 3, 8)


def kinds_of(log: list[tuple[str, str]]) -> list[str]:
    """Kinds in the order in which they were first called, each once."""
    return list(dict.fromkeys(KINDS[name] for name, _ in log))


def phases(gym: FakeGym) -> dict[str, str]:
    return {name: fake.phase for name, fake in gym.fakes.items()}


async def held(gym: FakeGym):  # type: ignore[no-untyped-def]
    actor = actor_of(gym)
    await actor.prepare_checkpoint(prepare())
    await actor.drain(drain())
    return actor


# -- capabilities ------------------------------------------------------------------------------


def test_capabilities_of_every_server() -> None:
    async def main() -> None:
        found = await actor_of(fake_gym()).discover_checkpoint_capabilities(5.0)
        assert {name: one.kind for name, one in found.items()} == KINDS

    run(main)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"schema_version": 2}, "speaks version 2 of the protocol"),
        ({"num_workers": 4}, "has 4 workers, and state in each of them: start it with one"),
        ({"name": "a1"}, "says that it is agent server 'a1': correct the list"),
        ({"kind": "policy"}, "says that it is policy server 'a0'"),
    ],
)
def test_a_server_that_cannot_be_saved_is_named_with_the_way_out(
    said: dict[str, object], words: str
) -> None:
    async def main() -> None:
        gym = fake_gym()
        gym["a0"].capabilities = said
        with pytest.raises(Refused, match=words) as caught:
            await actor_of(gym).discover_checkpoint_capabilities(5.0)
        assert caught.value.code == "not_checkpointable"
        assert "'a0' (http://a0)" in caught.value.detail

    run(main)


def test_every_problem_is_named_at_once() -> None:
    async def main() -> None:
        gym = FakeGym(("agent", "a0"))
        gym["a0"].capabilities = {"num_workers": 2, "schema_version": 3}
        with pytest.raises(Refused) as caught:
            await actor_of(gym).discover_checkpoint_capabilities(5.0)
        for words in ("2 workers", "version 3", "no policy server"):
            assert words in caught.value.detail

    run(main)


# -- save --------------------------------------------------------------------------------------


def test_stop_order_then_quiet_then_frozen() -> None:
    async def main() -> None:
        gym = fake_gym()
        await held(gym)
        assert kinds_of(gym.order(["prepare"])) == ["policy", "agent", "resource"]
        drained = [KINDS[name] for name, _ in gym.order(["drain"])]
        assert drained[-1] == "resource"
        assert drained.count("resource") == 1
        assert set(phases(gym).values()) == {hold.HELD}

    run(main)


def test_resources_freeze_only_after_the_agents_are_quiet() -> None:
    async def main() -> None:
        gym = fake_gym()
        gym["a1"].blockers = ("p7_g2",)
        actor = actor_of(gym)
        await actor.prepare_checkpoint(prepare())
        with pytest.raises(Refused):
            await actor.drain(drain(0.05))
        assert gym["tools"].phase == hold.CLOSING
        assert ("tools", "drain") not in gym.log

    run(main)


def test_not_parked_names_servers_and_rollouts() -> None:
    async def main() -> None:
        gym = fake_gym()
        gym["a0"].blockers = ("p7_g2", "p8_g0")
        gym["a1"].blockers = ("p9_g1",)
        actor = actor_of(gym)
        await actor.prepare_checkpoint(prepare())
        with pytest.raises(Refused) as caught:
            await actor.drain(drain(0.05))
        assert caught.value.code == "not_parked"
        assert "a0 waits for 2: p7_g2, p8_g0" in caught.value.detail
        assert "a1 waits for 1: p9_g1" in caught.value.detail

    run(main)


def test_not_parked_names_at_most_a_hundred() -> None:
    names = tuple(f"r{number:04}" for number in range(250))
    report = wire.Report(hold.CLOSING, quiet=False, blockers=names, blocker_count=250)
    text = merge.blockers({"a0": report})
    assert "a0 waits for 250" in text
    assert text.count("r0") == 100


def test_a_straggler_that_parks_in_time_is_waited_for() -> None:
    async def main() -> None:
        gym = fake_gym()
        gym["a0"].blockers = ("p7_g2",)
        actor = actor_of(gym)
        await actor.prepare_checkpoint(prepare())
        draining = asyncio.create_task(actor.drain(drain()))
        await until(lambda: gym.log.count(("a0", "drain")) >= 2)
        gym["a0"].blockers = ()
        await draining
        assert set(phases(gym).values()) == {hold.HELD}

    run(main)


def test_commit_gives_the_agents_indexes_to_the_policy() -> None:
    first, second = continuation("p7_g2", tools=3), continuation("p8_g0", None)

    async def main() -> None:
        gym = fake_gym()
        gym["a0"].report = wire.Report("", continuations=(first,))
        gym["a1"].report = wire.Report("", continuations=(second,))
        gym["tools"].report = wire.Report("", revisions={"p7_g2": 3})
        actor = await held(gym)
        await actor.commit_checkpoint(commit())
        assert kinds_of(gym.order(["commit"])) == ["agent", "policy", "resource"]
        for name in ("p0", "p1"):
            assert gym[name].received[-1].continuations == (first, second)
        assert gym["tools"].received[-1].continuations == ()

    run(main)


@pytest.mark.parametrize("saved", [{"p7_g2": 4}, {}])
def test_a_session_at_another_revision_is_refused(saved: dict[str, int]) -> None:
    async def main() -> None:
        gym = fake_gym()
        gym["a0"].report = wire.Report("", continuations=(continuation("p7_g2", tools=3),))
        gym["tools"].report = wire.Report("", revisions=saved)
        actor = await held(gym)
        with pytest.raises(Refused, match="p7_g2 needs revision 3 of 'tools'") as caught:
            await actor.commit_checkpoint(commit())
        assert caught.value.code == wire.REVISION_MISMATCH

    run(main)


def test_a_rollout_that_starts_over_needs_no_revision() -> None:
    async def main() -> None:
        gym = fake_gym()
        gym["a0"].report = wire.Report("", continuations=(continuation("p7_g2", tools=3),))
        gym["tools"].report = wire.Report("", restarts=(wire.Restart("p7_g2", "restart_only"),))
        actor = await held(gym)
        reports = await actor.commit_checkpoint(commit())
        assert merge.restarts(reports) == {"p7_g2": "restart_only"}

    run(main)


def test_a_rollout_of_two_agents_starts_over() -> None:
    async def main() -> None:
        gym = fake_gym()
        for name in ("a0", "a1"):
            gym[name].report = wire.Report("", continuations=(continuation("p7_g2"),))
        actor = await held(gym)
        reports = await actor.commit_checkpoint(commit())
        assert gym["p0"].received[-1].continuations == ()
        facts = merge.commit_facts(reports)
        assert facts["restarts"] == {"p7_g2": merge.TWO_OWNERS}
        assert facts["continuations"] == 0

    run(main)


def test_a_history_that_one_policy_server_has_is_not_lost() -> None:
    lost = (wire.Restart("p7_g2", wire.LINEAGE_LOST), wire.Restart("p8_g0", wire.LINEAGE_LOST))

    async def main() -> None:
        gym = fake_gym()
        gym["a0"].report = wire.Report(
            "", continuations=(continuation("p7_g2"), continuation("p8_g0"))
        )
        gym["p0"].report = wire.Report(
            "", rows={"p7_g2": ("p7_g2/call-1", "p7_g2/call-2")}, restarts=lost[1:]
        )
        gym["p1"].report = wire.Report("", restarts=lost)
        actor = await held(gym)
        facts = merge.commit_facts(await actor.commit_checkpoint(commit()))
        assert facts["restarts"] == {"p8_g0": wire.LINEAGE_LOST}
        assert list(facts["_rows"]) == ["p7_g2"]

    run(main)


def test_renew_asks_those_who_confirmed() -> None:
    async def main() -> None:
        gym = fake_gym()
        gym["a0"].faults.append(Fault("prepare", "refuse"))
        actor = actor_of(gym)
        with pytest.raises(Refused):
            await actor.prepare_checkpoint(prepare())
        renewed = await actor.renew(wire.Renew(**control(), lease_s=60.0))
        assert {"p0", "p1"} <= renewed.keys()
        assert not {"a0", "tools"} & renewed.keys()

    run(main)


# -- release -----------------------------------------------------------------------------------


def test_open_order_is_callees_first() -> None:
    async def main() -> None:
        gym = fake_gym()
        actor = await held(gym)
        await actor.abort_checkpoint(release())
        assert kinds_of(gym.order(["resume"])) == ["resource", "policy", "agent"]
        assert set(phases(gym).values()) == {hold.OPEN}

    run(main)


def test_a_server_whose_prepare_got_no_answer_is_released_too() -> None:
    """S6: it was told before its prepare was sent; those after it were not told."""

    async def main() -> None:
        gym = fake_gym()
        gym["a0"].faults.append(Fault("prepare", "lose", times=3))
        actor = actor_of(gym)
        with pytest.raises(Unavailable):
            await actor.prepare_checkpoint(prepare())
        assert gym["a0"].phase == hold.CLOSING
        await actor.abort_checkpoint(release())
        assert set(phases(gym).values()) == {hold.OPEN}
        assert ("tools", "resume") not in gym.log

    run(main)


def test_a_prepare_that_comes_after_its_abort_closes_nothing() -> None:
    async def main() -> None:
        gym = FakeGym(("policy", "p0"), ("agent", "a0"))
        gym["a0"].faults.append(Fault("prepare", "late"))
        actor = actor_of(gym)
        with pytest.raises(Unavailable, match="a0"):
            await actor.prepare_checkpoint(prepare(0.05))
        await actor.abort_checkpoint(release())
        gym["a0"].go_on.set()
        with pytest.raises(Refused) as caught:
            await gym["a0"].answer(*_message("prepare", prepare()))
        assert caught.value.code == wire.STALE_FENCE
        assert gym["a0"].phase == hold.OPEN

    run(main)


def test_a_release_goes_past_failures_and_names_the_silent() -> None:
    async def main() -> None:
        gym = fake_gym()
        actor = await held(gym)
        gym["tools"].alive = False
        gym["p1"].faults.append(Fault("resume", "refuse", code="busy"))
        with pytest.raises(NotReleased) as caught:
            await actor.resume_checkpoint(release())
        assert caught.value.names == {"tools", "p1"}
        assert "could not be reached" in caught.value.detail
        assert phases(gym) | {"tools": "", "p1": ""} == dict.fromkeys(phases(gym), hold.OPEN) | {
            "tools": "",
            "p1": "",
        }

    run(main)


def test_a_repeated_release_asks_only_the_silent() -> None:
    async def main() -> None:
        gym = fake_gym()
        actor = await held(gym)
        gym["p1"].faults.append(Fault("resume", "refuse"))
        with pytest.raises(NotReleased):
            await actor.resume_checkpoint(release())
        gym.log.clear()
        await actor.resume_checkpoint(release())
        assert gym.log == [("p1", "resume")]

    run(main)


def test_a_silent_kind_leaves_time_for_the_others() -> None:
    async def main() -> None:
        gym = fake_gym()
        actor = await held(gym)
        gym["tools"].faults.append(Fault("resume", "late"))
        with pytest.raises(NotReleased) as caught:
            await actor.resume_checkpoint(release(0.3))
        assert caught.value.names == {"tools"}
        assert gym["a0"].phase == hold.OPEN

    run(main)


def test_an_actor_that_started_afresh_releases_everybody() -> None:
    async def main() -> None:
        gym = fake_gym()
        await held(gym)
        await actor_of(gym).abort_checkpoint(release())
        assert set(phases(gym).values()) == {hold.OPEN}

    run(main)


def test_a_lapsed_hold_is_released_for_a_save_but_not_activated_for_a_restore() -> None:
    async def main() -> None:
        gym = fake_gym()
        actor = await held(gym)
        gym["a0"].lapse()
        await actor.resume_checkpoint(release())

        await actor.fence(wire.FenceOff(**control(fence=SECOND), lease_s=60.0))
        await actor.restore_checkpoint(_stage())
        gym["a0"].lapse()
        with pytest.raises(NotReleased) as caught:
            await actor.resume_checkpoint(evolve(release(fence=SECOND), activate=True))
        assert caught.value.names == {"a0"}
        assert gym["a1"].activations == 1

    run(main)


def test_a_server_that_restarts_before_activation_is_named() -> None:
    """R1: not every server was restored, so the restore must not look whole."""

    async def main() -> None:
        gym = fake_gym()
        actor = actor_of(gym)
        await actor.fence(wire.FenceOff(**control(fence=SECOND), lease_s=60.0))
        await actor.restore_checkpoint(_stage())
        gym["tools"].restart()
        with pytest.raises(NotReleased) as caught:
            await actor.resume_checkpoint(evolve(release(fence=SECOND), activate=True))
        assert caught.value.names == {"tools"}

    run(main)


# -- restore -----------------------------------------------------------------------------------


def _stage() -> wire.Stage:
    paths = ("gym/agent/a0/x.jsonl", "gym/agent/a1/x.jsonl", "gym/policy/p0/ledger.jsonl")
    return wire.Stage(
        **control(fence=SECOND), snapshot="snapshot_1", files=tuple(map(entry, paths))
    )


def _message(operation: str, message: wire.Control):  # type: ignore[no-untyped-def]
    from fsm import strict
    from participants.gym.fake import TOKEN

    return f"{wire.CHECKPOINT}/{operation}", f"Bearer {TOKEN}", strict.write(message)


def test_restore_stages_each_part_where_it_belongs() -> None:
    async def main() -> None:
        gym = fake_gym()
        actor = actor_of(gym)
        await actor.fence(wire.FenceOff(**control(fence=SECOND), lease_s=60.0))
        await actor.restore_checkpoint(_stage())
        assert kinds_of(gym.order(["fence"])) == ["policy", "agent", "resource"]
        assert kinds_of(gym.order(["restore"])) == ["policy", "agent", "resource"]
        assert set(phases(gym).values()) == {hold.STAGED}
        staged = {name: fake.received[-1].files for name, fake in gym.fakes.items()}
        assert staged["a0"] == (entry("gym/agent/a0/x.jsonl"),)
        assert staged["p1"] == staged["tools"] == ()
        assert all(fake.activations == 0 for fake in gym.fakes.values())

    run(main)


def test_what_does_not_end_before_a_restore_is_busy() -> None:
    async def main() -> None:
        gym = fake_gym()
        gym["p0"].blockers = ("p7_g2/call-3",)
        with pytest.raises(Refused, match="p0 waits for 1: p7_g2/call-3") as caught:
            await actor_of(gym).fence(wire.FenceOff(**control(0.05), lease_s=60.0))
        assert caught.value.code == wire.BUSY

    run(main)


def test_discard_and_rollback_reach_every_server() -> None:
    async def main() -> None:
        gym = fake_gym()
        actor = actor_of(gym)
        await actor.fence(wire.FenceOff(**control(fence=SECOND), lease_s=60.0))
        await actor.restore_checkpoint(_stage())
        await actor.discard_continuations(
            wire.Discard(**control(fence=SECOND), rollouts=("p7_g2",))
        )
        assert {fake.received[-1].rollouts for fake in gym.fakes.values()} == {("p7_g2",)}
        await actor.rollback(release(fence=SECOND))
        assert set(phases(gym).values()) == {hold.OPEN}
        assert all(fake.activations == 0 for fake in gym.fakes.values())

    run(main)


# -- at any time -------------------------------------------------------------------------------


def test_acknowledge_and_retire_go_to_the_agents_alone() -> None:
    result = wire.Finished("p7_g2", 1, "digest")

    async def main() -> None:
        gym = fake_gym()
        actor = actor_of(gym)
        await actor.acknowledge([result], 5.0)
        await actor.retire(["p8_g0"], 5.0)
        for name in ("a0", "a1"):
            assert gym[name].received == [
                wire.Acknowledge(results=(result,)),
                wire.Retire(rollouts=("p8_g0",)),
            ]
        assert {name for name, _ in gym.log} == {"a0", "a1"}

    run(main)


def test_a_rollout_runs_on_the_agent_named() -> None:
    request = wire.RunRequest(
        rollout_id="p7_g2", attempt_index=0, incarnation=3, lineage=0, expect="fresh"
    )

    async def main() -> None:
        gym = fake_gym()
        actor = actor_of(gym)
        reply = await actor.run_rollout("a1", request)
        assert reply.rollout_id == "p7_g2"
        assert gym.log == [("a1", "run")]
        for wrong in ("p0", "a9"):
            with pytest.raises(Refused, match=r"known: a0, a1"):
                await actor.run_rollout(wrong, request)

    run(main)


def test_hundreds_of_runs_do_not_hold_up_control_messages() -> None:
    request = wire.RunRequest(
        rollout_id="r", attempt_index=0, incarnation=3, lineage=0, expect="fresh"
    )

    async def main() -> None:
        gym = fake_gym()
        gym["a0"].faults.append(Fault("run", "late", times=300))
        actor = actor_of(gym)
        requests = (evolve(request, rollout_id=f"r{number}") for number in range(300))
        runs = [asyncio.create_task(actor.run_rollout("a0", one)) for one in requests]
        await until(lambda: gym.log.count(("a0", "run")) == 300)
        reports = await actor.prepare_checkpoint(prepare())
        assert reports["a0"].fence == FENCE
        gym["a0"].go_on.set()
        replies = await asyncio.gather(*runs)
        assert len({reply.rollout_id for reply in replies}) == 300

    run(main)

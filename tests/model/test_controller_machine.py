"""The controller under random turns, results, steps, cuts, crashes and restores.

Whatever the order: every drawn prompt is in exactly one place, no row is lost, none is trained
twice, and whatever was lost by a crash is done again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fsm.outcome import Unavailable
from participants.controller.ledger import HELD, UNFINISHED, Rollout
from participants.controller.rows import owner
from participants.data_plane import CAPTURE, TRAIN
from participants.gym.wire import RunReply, RunRequest
from tests.controller_support import Saved, World, restore, world

TASKS, GROUP = 6, 2
picks = st.integers(0, 1_000)


class ControllerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.one: World = world(TASKS, group_size=GROUP, max_start_overs=3)
        self.requests: dict[str, RunRequest] = {}  # runs that are out
        self.stale: list[tuple[RunRequest, RunReply]] = []  # answers that may come once more
        self.anchors: dict[int, tuple[str, ...]] = {}  # durable steps, outside of the process
        self.saved: Saved | None = None
        self.incarnation = 1

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def entries(self, *states: str) -> list[Rollout]:
        return [one for one in self.one.rl.ledger.entries() if one.state in states]

    # -- rollouts ------------------------------------------------------------------------------

    @rule()
    def draw(self) -> None:
        self.do(self.one.rl.draw())

    @precondition(lambda self: not self.one.rl.gate.closed and self.entries("reserved"))
    @rule(pick=picks)
    def send(self, pick: int) -> None:
        waiting = list(self.one.rl.ledger.unsent())
        name = waiting[pick % len(waiting)]
        request = self.do(self.one.rl.send(name))
        self.one.gym.accept(self.one.rl.ledger.get(name).server, request)
        self.requests[name] = request

    def playing(self) -> list[str]:
        runs = self.one.gym.runs
        return [name for name in self.requests if name in runs and runs[name].result is None]

    def ended(self) -> list[str]:
        runs = self.one.gym.runs
        return [name for name in self.requests if name in runs and runs[name].result is not None]

    @precondition(lambda self: self.playing() and not self.one.rl.gate.closed)
    @rule(pick=picks, ends=st.booleans())
    def turn(self, pick: int, ends: bool) -> None:
        name = self.playing()[pick % len(self.playing())]
        self.do(self.one.gym.turn(name))
        if ends:
            self.one.gym.end(name)

    @precondition(lambda self: self.ended())
    @rule(pick=picks, fails=st.integers(0, 4))
    def finish(self, pick: int, fails: int) -> None:
        """fails: the nth call to the data plane fails (0: none)."""
        name = self.ended()[pick % len(self.ended())]
        request = self.requests[name]
        reply = self.one.gym.reply(request)
        if fails:
            self.one.plane.fail(fails)
        try:
            taken = self.do(self.one.rl.finish(request, reply))
        except OSError:
            return
        finally:
            self.one.plane._fail_at = 0
        assert taken
        del self.requests[name]
        self.stale.append((request, reply))

    @precondition(lambda self: self.stale)
    @rule(pick=picks)
    def answer_once_more(self, pick: int) -> None:
        request, reply = self.stale[pick % len(self.stale)]
        assert self.do(self.one.rl.finish(request, reply)) is False

    @precondition(lambda self: self.playing() and not self.one.rl.gate.closed)
    @rule(pick=picks)
    def start_over(self, pick: int) -> None:
        name = self.playing()[pick % len(self.playing())]
        request = self.requests[name]
        self.stale.append((request, self.one.gym.reply(request)))
        self.do(self.one.rl.start_over(request, "lineage_lost"))
        self.forget_closed()

    @precondition(lambda self: not self.one.rl.gate.closed and self.entries(*UNFINISHED, "sealed"))
    @rule(pick=picks, put_back=st.booleans())
    def drop(self, pick: int, put_back: bool) -> None:
        open_ones = self.entries(*UNFINISHED, "sealed")
        group = open_ones[pick % len(open_ones)].group
        self.do(self.one.rl.drop(group, "stale", put_back=put_back))
        self.forget_closed()

    def forget_closed(self) -> None:
        for name, request in list(self.requests.items()):
            if self.one.rl.in_flight(request) is None:
                del self.requests[name]

    @precondition(lambda self: not self.one.rl.gate.closed)
    @rule(works=st.booleans())
    def acknowledge(self, works: bool) -> None:
        if not works:
            self.one.gym.ack_failures = [Unavailable("agent-0")]
        self.do(self.one.rl.tend())
        self.one.gym.ack_failures = []

    # -- training ------------------------------------------------------------------------------

    @rule(groups=st.integers(1, 2))
    def claim(self, groups: int) -> None:
        self.do(self.one.rl.claim(self.one.rl.step + 1, groups))

    @precondition(lambda self: self.one.rl.replay.claimed)
    @rule(works=st.booleans())
    def commit(self, works: bool) -> None:
        step = self.one.rl.step + 1
        rows = self.do(self.one.rl.rows(step))

        async def write_anchor() -> None:
            if not works:
                raise OSError("no space left")
            self.anchors[step] = tuple(rows)

        try:
            self.do(self.one.rl.commit(step, write_anchor))
        except OSError:
            assert not works

    # -- snapshots -----------------------------------------------------------------------------

    @rule()
    def stop(self) -> None:
        self.one.rl.stop_dispatch()
        self.do(self.one.rl.flush_acks(1.0))

    @rule()
    def open(self) -> None:
        self.one.rl.open_dispatch(frozenset())

    @rule()
    def cut(self) -> None:
        self.one.rl.stop_dispatch()
        self.saved = self.one.save()

    @precondition(lambda self: self.saved)
    @rule()
    def crash_and_restore(self) -> None:
        self.incarnation += 1
        options = {"tasks": TASKS, "group_size": GROUP, "max_start_overs": 3}
        self.one = self.do(restore(self.saved, self.incarnation, **options))
        self.requests.clear()
        step = self.saved.anchor_step
        self.anchors = {n: rows for n, rows in self.anchors.items() if n <= step}
        assert self.one.rl.step == step
        for record in self.saved.records["ledger"]:
            now = self.one.rl.ledger.get(record["rollout_id"])
            if record["state"] in UNFINISHED and now is not None and now.state in UNFINISHED:
                assert now.attempt_index == record["attempt_index"] + 1

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def every_prompt_is_in_one_place(self) -> None:
        counts = self.one.rl.conservation()
        trained = [name for rows in self.anchors.values() for name in rows]
        assert len(trained) == len(set(trained)), "trained twice"
        assert counts["trained"] * GROUP == len(trained)
        alive = {one.rollout_id for one in self.entries(*UNFINISHED, *HELD)}
        assert not alive & set(trained), "trained, and still to be trained"
        dropped = counts["dropped"] * GROUP
        assert len(alive) + len(trained) + dropped == counts["drawn"] * GROUP

    @invariant()
    def every_row_is_there_and_has_an_owner(self) -> None:
        train = set(self.do(self.one.plane.keys(TRAIN)))
        capture = set(self.do(self.one.plane.keys(CAPTURE)))
        held = {one.rollout_id for one in self.entries(*HELD)}
        assert held <= train, "a finished rollout without its row"
        owing = {one.rollout_id for one in self.one.rl.ledger.uncleared()}
        attempted = {name for name in train if self.one.rl.ledger.get(name) is not None}
        assert train <= held | owing | attempted, "a row that nobody owns"
        for name in self.playing() + self.ended():
            assert set(self.one.gym.runs[name].rows) <= capture, "a history with a hole"
        known = {one.rollout_id for one in self.one.rl.ledger.entries()}
        assert {owner(key) for key in capture} <= known, "a capture row that nobody owns"

    def teardown(self) -> None:
        try:
            self.do(self.to_the_end())
        finally:
            self.loop.close()

    async def to_the_end(self) -> None:
        """Whatever happened, the rest can be played and trained, and nothing is left over."""
        rl, gym = self.one.rl, self.one.gym
        rl.open_dispatch(frozenset())
        while await rl.draw() is not None:
            pass
        for name in list(rl.ledger.unsent()):
            self.requests[name] = await rl.send(name)
            gym.accept(rl.ledger.get(name).server, self.requests[name])
        for name, request in self.requests.items():
            if gym.runs[name].result is None:
                gym.end(name)
            assert await rl.finish(request, gym.reply(request))
        while await rl.claim(rl.step + 1, 1) is not None:
            step, rows = rl.step + 1, await rl.rows(rl.step + 1)

            async def write_anchor(step: int = step, rows: Any = rows) -> None:
                self.anchors[step] = tuple(rows)

            await rl.commit(step, write_anchor)
        await rl.tend()
        self.every_prompt_is_accounted_for(rl.conservation())
        assert rl.ledger.entries() == ()
        assert await self.one.plane.keys(TRAIN) == {}
        assert await self.one.plane.keys(CAPTURE) == {}

    def every_prompt_is_accounted_for(self, counts: dict[str, int]) -> None:
        trained = [name for rows in self.anchors.values() for name in rows]
        assert len(trained) == len(set(trained))
        assert counts["drawn"] == counts["trained"] + counts["dropped"]
        assert len(trained) == counts["trained"] * GROUP


ControllerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestController = ControllerMachine.TestCase

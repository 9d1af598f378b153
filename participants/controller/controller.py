"""Our own `RlState`: ledger, loader, replay index, dispatch gate and ACK outbox over a data plane.

Each public change is one barrier mutation, never split:
{prompt drawn + group reserved}, {training row put + ledger sealed + ACK owed + capture rows
cleared}, {claim}, {optimizer commit}, {group dropped + cleared}.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fsm.outcome import InvariantError, Refused
from participants.controller import restoring
from participants.controller.acks import AckOutbox
from participants.controller.dispatch import Bell, DispatchGate
from participants.controller.ledger import OVER, UNFINISHED, Ledger, Rollout, Slot
from participants.controller.loader import Loader
from participants.controller.replay import ReplayIndex
from participants.controller.restoring import GAVE_UP, Books
from participants.controller.rows import assemble, digest, owned
from participants.controller.state import Found, Loaded, Records, RlCut
from participants.data_plane import CAPTURE, TRAIN, Barrier, DataPlane, Row
from participants.gym.wire import Finished, RunReply, RunRequest

_log = logging.getLogger("quiesce.controller")
RETIRE_TIMEOUT_S = 30.0
ROWS_MISSING = "rows_missing"

Assemble = Callable[[Sequence[Row], RunReply], dict[str, Any]]


class GymCalls(Protocol):
    """What the controller asks of the NemoGym actor. Raises Refused(code) and Unavailable."""

    async def run_rollout(self, server_name: str, request: RunRequest) -> RunReply: ...
    async def acknowledge(self, results: Sequence[Finished], timeout_s: float) -> None: ...
    async def retire(self, rollouts: Sequence[str], timeout_s: float) -> None: ...


class RlController:
    """The bookkeeping of one trainer. Dispatch is closed until the first `open_dispatch`.

    servers: agent servers; siblings are spread over them in turn. group_size: rollouts per
    prompt. max_start_overs: of one rollout, then its group is dropped as `gave_up`.
    turns: a count that grows with every finished turn in Gym; without it a snapshot is always
    worth taking while rollouts are in flight.
    """

    def __init__(
        self,
        plane: DataPlane,
        barrier: Barrier,
        gym: GymCalls,
        loader: Loader,
        *,
        servers: Sequence[str],
        group_size: int,
        max_start_overs: int = 8,
        assemble: Assemble = assemble,
        turns: Callable[[], int] | None = None,
    ) -> None:
        if not servers or group_size < 1 or max_start_overs < 0:
            raise ValueError("RlController needs an agent server and a group_size of at least 1")
        self.plane, self.barrier, self.gym, self.loader = plane, barrier, gym, loader
        self.servers, self.group_size = tuple(servers), group_size
        self.max_start_overs, self._assemble, self._turns = max_start_overs, assemble, turns
        self._first = loader.state_dict()  # where a start from nothing begins
        self.ledger, self.replay = Ledger(), ReplayIndex()
        self.incarnation = 0
        self.gate, self.bell = DispatchGate(), Bell()
        self.outbox = AckOutbox(self._owed, gym.acknowledge, self._acknowledged)
        self.committing = False

    @property
    def step(self) -> int:
        """The last trained step that is durable."""
        return self.ledger.totals.trained_step

    @property
    def open_groups(self) -> int:
        """Groups that are neither trained nor dropped."""
        totals = self.ledger.totals
        return self.loader.drawn - totals.trained - sum(totals.dropped.values())

    @property
    def owes(self) -> bool:
        """There are ACKs to be sent or rows to be cleared."""
        return bool(self.ledger.owed() or self.ledger.uncleared())

    # -- RlState -------------------------------------------------------------------------------

    def stop_dispatch(self) -> None:
        self.gate.close()

    def open_dispatch(self, unavailable: frozenset[str]) -> None:
        self.gate.open(unavailable)
        self.bell.ring()

    async def flush_acks(self, limit_s: float) -> int:
        return await self.outbox.flush(limit_s)

    def state(self) -> RlCut:
        counts = self.conservation()
        records = {
            "ledger": self.ledger.records(),
            "totals": [self.ledger.totals_record()],
            "loader": [self.loader.state_dict()],
            "replay": [self.replay.record()],
        }
        finished = (o.rollout_id for o in self.ledger.entries() if o.state not in UNFINISHED)
        return RlCut(records, counts, tuple(finished))

    async def load(self, state: Records | None, found: Found | None) -> Loaded:
        books = Books.read(state) if state is not None else Books(loader=self._first)
        loaded = Loaded()
        if found is not None:
            capture, train = await self.plane.keys(CAPTURE), await self.plane.keys(TRAIN)
            books, loaded = restoring.resolve(books, found, capture, train, self.max_start_overs)
        self._replace(books)
        if found is not None:
            self.incarnation = found.incarnation
        return loaded

    # -- Watched -------------------------------------------------------------------------------

    def changes(self) -> object:
        in_flight = any(one.state == "dispatched" for one in self.ledger.entries())
        if self._turns is None:
            return None if in_flight else self.barrier.mutations
        return self.barrier.mutations, self._turns()

    # -- rollouts ------------------------------------------------------------------------------

    @asynccontextmanager
    async def mutation(self, kind: str) -> AsyncIterator[Slot]:
        """The proof that the ledger's methods demand, valid inside."""
        async with self.barrier.mutation(kind):
            slot = Slot(kind)
            try:
                yield slot
            finally:
                slot.close()
                self.bell.ring()

    async def draw(self) -> str | None:
        """Reserve a group for the next prompt; None when there is none."""
        if self.loader.exhausted:
            return None
        async with self.mutation("draw") as slot:
            number = self.loader.drawn
            prompt = self.loader.draw()
            if prompt is None:
                return None
            first = number * self.group_size
            turn = range(first, first + self.group_size)
            servers = [self.servers[index % len(self.servers)] for index in turn]
            self.ledger.reserve(slot, f"p{number}", prompt, servers)
            return f"p{number}"

    async def send(self, rollout_id: str) -> RunRequest | None:
        """Wait at the gate, then enter the run as sent. None: it is not to be sent any more."""
        one = self.ledger.get(rollout_id)
        if one is None:
            return None
        await self.gate.passed(one.server)
        async with self.mutation("dispatch") as slot:
            one = self.ledger.get(rollout_id)
            if one is None or one.state != "reserved":
                return None
            return self._request(self.ledger.dispatch(slot, rollout_id))

    def in_flight(self, request: RunRequest) -> Rollout | None:
        """The entry of this run; None when the run is closed: dropped, replaced, restored."""
        one = self.ledger.get(request.rollout_id)
        if one is None or one.state != "dispatched":
            return None
        same = (self.incarnation, one.attempt_index) == (request.incarnation, request.attempt_index)
        return one if same else None

    async def finish(self, request: RunRequest, reply: RunReply) -> bool:
        """Take a result in: row put, sealed, ACK owed, capture rows cleared. False: a stale run.

        Raises Refused("rows_missing") when a capture row is not there, ValueError for a result
        that makes no training row, OSError or TimeoutError of the data plane (nothing happened).
        """
        async with self.mutation("finish") as slot:
            one = self.in_flight(request)
            if one is None:
                return False
            row = self._assemble(await self._captured(reply), reply)
            row |= {"rollout": one.rollout_id, "group": one.group, "prompt": one.prompt}
            tag = {"group": one.group, "run": one.attempt_index}
            await self.plane.put_rows(TRAIN, {one.rollout_id: row}, tag)
            if self.in_flight(request) is None:
                await self.plane.clear(TRAIN, [one.rollout_id])  # its group was dropped meanwhile
                return False
            self.ledger.seal(slot, one.rollout_id, reply.result_digest, digest(row), reply.rows)
            if all(sibling.state == "sealed" for sibling in self.ledger.group(one.group)):
                self.replay.add(one.group)
            await self._clear(slot)
            return True

    async def start_over(self, request: RunRequest, reason: str) -> None:
        """Throw the history away: run n+1 begins anew; beyond the limit the group is dropped."""
        one = self.in_flight(request)
        if one is None:
            return
        if one.start_overs >= self.max_start_overs:
            _log.warning("%s: gave up after %d start-overs: %s", one.group, one.start_overs, reason)
            await self.drop(one.group, GAVE_UP)
            return
        async with self.mutation("start_over") as slot:
            rows = owned(await self.plane.keys(CAPTURE), [one.rollout_id])
            if self.in_flight(request) is not None:
                self.ledger.restart(slot, one.rollout_id, reason, rows[one.rollout_id])
                await self._clear(slot)

    async def tend(self) -> None:
        """Acknowledge and clear what is owed, while dispatch is open."""
        await self.outbox.flush_while_open(self.gate)
        if self.ledger.uncleared() and not self.gate.closed:
            async with self.mutation("clear") as slot:
                await self._clear(slot)

    async def drop(self, group: str, reason: str, *, put_back: bool = False) -> None:
        """Give a group up, on Gym too. Waits while dispatch is stopped. An unknown group is fine.

        put_back: the prompt is drawn again. Raises InvariantError for a claimed group.
        """
        await self.gate.opened()
        members = self.ledger.group(group)
        unfinished = [one.rollout_id for one in members if one.state in UNFINISHED]
        try:
            await self.gym.retire(unfinished, RETIRE_TIMEOUT_S)
        except (Refused, TimeoutError) as error:  # its late answers are stale; the drop stands
            _log.warning("%s: retire did not reach everybody: %s", group, error)
        await self.gate.opened()
        async with self.mutation("drop") as slot:
            members = self.ledger.group(group)
            if not members or members[0].state in OVER:
                return
            rows = owned(await self.plane.keys(CAPTURE), [one.rollout_id for one in members])
            self.ledger.drop(slot, group, reason, rows)
            self.replay.remove(group)
            if put_back:
                self.loader.put_back(members[0].prompt)
            await self._clear(slot)

    # -- training ------------------------------------------------------------------------------

    async def claim(self, step: int, groups: int) -> tuple[str, ...] | None:
        """The oldest complete groups, for this step. None: not enough are complete. A step that
        has claimed already gets the same ones again."""
        if (claimed := self.replay.of_step(step)) is not None:
            return claimed
        if self.replay.buffered < groups:
            return None
        async with self.mutation("claim") as slot:
            if self.replay.buffered < groups:
                return None
            names = self.replay.claim(step, groups)
            for name in names:
                self.ledger.claim(slot, name)
            return names

    async def rows(self, step: int) -> dict[str, dict[str, Any]]:
        """Training rows of a claimed step, by rollout, siblings side by side."""
        groups = self.replay.of_step(step) or ()
        keys = [one.row_key for group in groups for one in self.ledger.group(group)]
        return await self.plane.get_rows(TRAIN, keys)

    async def commit(self, step: int, write_anchor: Callable[[], Awaitable[object]]) -> None:
        """Make all claimed steps up to `step` durable, as often as the trainer writes checkpoints:
        write_anchor, then their groups are trained and their rows leave, with capture rows that no
        history names (calls that were given up). An error of write_anchor, or OSError of the data
        plane, is raised and leaves the steps claimed."""
        steps = range(self.step + 1, step + 1)
        unclaimed = [one for one in (*steps, step) if self.replay.of_step(one) is None]
        if unclaimed:
            raise InvariantError(f"step {unclaimed[0]} has claimed nothing")
        groups = [group for one in steps for group in self.replay.of_step(one) or ()]
        members = [one.rollout_id for group in groups for one in self.ledger.group(group)]
        self.committing = True
        try:
            async with self.mutation("optimizer_commit") as slot:
                rows = owned(await self.plane.keys(CAPTURE), members)
                await write_anchor()
                for one in steps:
                    self.ledger.train(slot, self.replay.trained(one), one, rows)
                await self._clear(slot)
        finally:
            self.committing = False

    def conservation(self) -> dict[str, int]:
        """Where every drawn prompt is. Raises InvariantError when one is nowhere, or twice."""
        return balance(self.ledger, self.replay, self.loader.drawn)

    # -- helpers -------------------------------------------------------------------------------

    def _replace(self, books: Books) -> None:
        """All or nothing. Raises ValueError for books that do not balance."""
        before = self.loader.state_dict()
        try:
            if books.loader is not None:
                self.loader.load_state_dict(books.loader)
            balance(books.ledger, books.replay, self.loader.drawn)
        except (ValueError, InvariantError) as error:
            self.loader.load_state_dict(before)
            raise ValueError(str(error)) from error
        self.ledger, self.replay = books.ledger, books.replay
        self.bell.ring()

    def _request(self, one: Rollout) -> RunRequest:
        return RunRequest(
            rollout_id=one.rollout_id,
            attempt_index=one.attempt_index,
            incarnation=self.incarnation,
            lineage=one.lineage,
            expect=one.expect,
            expect_call=one.expect_call,
            task={**self.loader.task(one.prompt), "generation": one.generation},
        )

    async def _captured(self, reply: RunReply) -> list[Row]:
        try:
            found = await self.plane.get_rows(CAPTURE, reply.rows)
        except KeyError as error:
            raise Refused(ROWS_MISSING, f"{reply.rollout_id}: {error.args[0]}") from error
        return [found[key] for key in reply.rows]

    def _owed(self) -> tuple[Finished, ...]:
        return self.ledger.owed()  # of the ledger in use: a restore replaces it

    async def _acknowledged(self, results: Sequence[Finished]) -> None:
        async with self.mutation("acknowledge") as slot:
            self.ledger.acknowledged(slot, results)

    async def _clear(self, slot: Slot) -> None:
        """Clear rows that nobody needs. What fails stays owed, and is tried with the next ones.

        While dispatch is stopped nothing is cleared: Gym's part may name these rows, and the cut
        has to hold every row that it names.
        """
        if self.gate.closed:
            return
        owing = self.ledger.uncleared()
        over = [one.row_key for one in owing if one.row_key and one.state in OVER]
        try:
            await self.plane.clear(CAPTURE, [key for one in owing for key in one.rows])
            await self.plane.clear(TRAIN, over)
        except (OSError, TimeoutError) as error:
            _log.warning("rows of %d rollouts stay to be cleared: %s", len(owing), error)
            return
        self.ledger.cleared(slot, owing)


def balance(ledger: Ledger, replay: ReplayIndex, drawn: int) -> dict[str, int]:
    """The conservation equation: drawn = trained + claimed + buffered + in flight + reserved +
    dropped, and ledger and replay index agree. Raises InvariantError."""
    places = ledger.places()
    if (counted := sum(places.values())) != drawn:
        raise InvariantError(f"{drawn} prompts were drawn, the ledger has {counted}: {places}")
    index = (replay.buffered, replay.claimed)
    if index != (places["buffered"], places["claimed"]):
        raise InvariantError(f"replay index (buffered, claimed) {index}, ledger {places}")
    return {"drawn": drawn, **places}

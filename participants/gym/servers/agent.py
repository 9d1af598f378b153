"""The agent server: runs loops written by other people, and can stop, save and continue them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
from attrs import evolve
from starlette.requests import Request
from starlette.responses import Response

from fsm import strict
from fsm.outcome import Refused
from participants.gym import wire
from participants.gym.servers import agent_part
from participants.gym.servers.asgi import (
    MIB,
    answered,
    body_of,
    check_rollout_id,
    json_answer,
    lifespan,
    message_of,
    not_found,
)
from participants.gym.servers.gate import Gate
from participants.gym.servers.journal import Journal, call_id
from participants.gym.servers.parts import Export, Read
from participants.gym.servers.routes import LISTS_LIMIT, ControlPlane, Route
from participants.gym.servers.runs import Kept, Known, Place, Run, digest_of, result_of
from participants.gym.servers.transport import JournalTransport, Neighbours

log = logging.getLogger("quiesce.gym.agent")

Loop = Callable[[dict[str, Any], httpx.AsyncClient], Awaitable[Any]]
RUN_LIMIT_BYTES = 64 * MIB
MAX_CLOSED = 65_536  # rollouts of which is remembered that they are over
MAX_TASKS = 100_000  # runs and messages to neighbours, at the same time
CLOSE_TIMEOUT_S = 30.0  # for a cancelled loop to end before the next run of its rollout begins


class AgentServer:
    """Serves POST /run and the control routes; `app` is the ASGI app.

    loop: `async def loop(task, http) -> result`, unchanged code of others; its only door to the
    world is `http`. servers: name to base URL; `policy` names the one of the model. root: the
    snapshot root. mode: "restart_only" for loops that do I/O past `http`. inner: a transport for
    all servers, or one by name, in place of the network.
    """

    kind: wire.Kind = "agent"

    def __init__(
        self,
        name: str,
        loop: Loop,
        servers: Mapping[str, str],
        root: Path | str,
        token: str,
        *,
        policy: str = "policy",
        mode: Literal["export", "restart_only"] = "export",
        isolation: Literal["per_session", "shared"] = "per_session",
        inner: httpx.AsyncBaseTransport | Mapping[str, httpx.AsyncBaseTransport] | None = None,
    ) -> None:
        if policy not in servers:
            raise ValueError(f"policy {policy!r} is not one of the servers: {', '.join(servers)}")
        self.name, self.mode, self.isolation = name, mode, isolation
        self._loop, self._token = loop, token
        self._neighbours = Neighbours(
            {name: httpx.URL(url) for name, url in servers.items()},
            _transports(servers, inner),
            policy,
        )
        self._known: dict[str, Known] = {}
        self._closed: OrderedDict[str, wire.RunId] = OrderedDict()  # runs that are over
        self._oldest_incarnation = 0
        self._staged: dict[str, Place | Kept] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.gate = Gate(self, Path(root))
        extra = {
            wire.ACKNOWLEDGE: Route(wire.Acknowledge, self._acknowledge, LISTS_LIMIT),
            wire.RETIRE: Route(wire.Retire, self._retire, LISTS_LIMIT),
        }
        self.app = ControlPlane(self._serve, self.gate, self.capabilities, token, extra)

    def capabilities(self) -> wire.Capabilities:
        return self.gate.capabilities(self.mode, self.isolation)

    # -- /run ----------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the connections to the neighbours."""
        for transport in set(self._neighbours.transports.values()):
            await transport.aclose()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send, self.aclose)
            return
        request = Request(scope, receive)
        serves = (request.method, scope["path"]) == ("POST", "/run")
        response = await answered(self._answer_run(request) if serves else not_found(request))
        await response(scope, receive, send)

    async def _answer_run(self, request: Request) -> Response:
        body = await body_of(request, RUN_LIMIT_BYTES)
        reply = await self.run(message_of(wire.RunRequest, body, "the body of /run"))
        return json_answer(strict.write(reply))

    async def run(self, request: wire.RunRequest) -> wire.RunReply:
        """One rollout, to its end. The run goes on if the caller goes away; a repeat joins it.

        Raises Refused: stale_attempt, no_continuation, or why the rollout has to start over.
        """
        check_rollout_id(request.rollout_id)
        if request.attempt_index < 0 or not 0 <= request.lineage <= request.attempt_index:
            raise Refused(wire.BAD_REQUEST, "attempt_index and lineage do not fit together")
        while True:
            self._check_not_stale(request)
            known = self._known.get(request.rollout_id)
            if isinstance(known, Run) and known.run == request.run:
                return await asyncio.shield(known.reply)
            if isinstance(known, Kept) and self._is_for(known, request):
                return self._hand_out(known, request)
            if len(self._tasks) >= MAX_TASKS:
                raise Refused(wire.BUSY, f"{MAX_TASKS} runs are under way; start another server")
            if not self.gate.closed:
                return await asyncio.shield(self._start(request, known).reply)
            await self.gate.until_open()  # H6: it waits at the door

    def _check_not_stale(self, request: wire.RunRequest) -> None:
        known = self._known.get(request.rollout_id)
        closed = self._closed.get(request.rollout_id)
        newer = known is not None and known.run > request.run
        over = closed is not None and closed >= request.run
        if newer or over or request.incarnation < self._oldest_incarnation:
            raise Refused(wire.STALE_ATTEMPT, f"{request.rollout_id}: run {request.run} is over")

    @staticmethod
    def _is_for(kept: Kept, request: wire.RunRequest) -> bool:
        """A repeat of the run that ended, or a restored controller that knows of the result."""
        return request.expect == "finished" or (kept.run == request.run and not kept.restored)

    def _hand_out(self, kept: Kept, request: wire.RunRequest) -> wire.RunReply:
        reply = evolve(kept.reply, attempt_index=request.attempt_index)
        self._known[kept.rollout_id] = Kept(reply, request.incarnation)
        return reply

    def _start(self, request: wire.RunRequest, known: Known | None) -> Run:
        journal = self._journal_for(request, known)
        older = known if isinstance(known, Run) else None
        if older is not None:
            older.end(wire.STALE_ATTEMPT, f"run {request.run} was started")
        self._known[request.rollout_id] = run = Run(request, journal)
        self._detach(self._execute(run, older))
        self.gate.touch()
        return run

    def _detach(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _journal_for(request: wire.RunRequest, known: Known | None) -> Journal:
        """R7: what the sender expects has to be here; never a silent fresh start."""
        if request.expect == "fresh":
            if request.lineage != request.attempt_index:
                raise Refused(wire.BAD_REQUEST, "a fresh run begins its own lineage")
            return Journal()
        if request.expect == "continuation" and isinstance(known, Place):
            last = known.journal.last_call()
            call = None if last is None else call_id(last.call or 0)
            if (request.expect_call, request.lineage) == (call, known.lineage):
                if digest_of(request.task) != known.task_digest:
                    raise Refused(wire.REPLAY_MISMATCH, f"{request.rollout_id}: another task")
                return known.journal
        expected = f"{request.expect} {request.expect_call or ''}".rstrip()
        raise Refused(wire.NO_CONTINUATION, f"{request.rollout_id}: no {expected} here")

    async def _execute(self, run: Run, older: Run | None) -> None:
        if older is not None and older.loop is not None:
            await asyncio.wait([older.loop], timeout=CLOSE_TIMEOUT_S)
        if run.over is not None:
            return
        run.loop = asyncio.create_task(self._call_loop(run))
        await asyncio.wait([run.loop])
        run.returned = True
        self.gate.stir()
        await self.gate.until_open()  # H6: no finish is recorded while closed
        if run.over is not None:
            return
        if run.journal.left:
            detail = f"the loop ended, with {run.journal.left} calls of the saved run not made"
            run.end(wire.REPLAY_MISMATCH, detail)
            return
        reply = result_of(run, *run.loop.result())
        self._known[run.rollout_id] = Kept(reply, run.run.incarnation)
        run.reply.set_result(reply)
        self.gate.touch()

    async def _call_loop(self, run: Run) -> tuple[Any, str | None]:
        """The loop's result, or what it raised. A loop that cancels itself has failed too."""
        transport = JournalTransport(run, self.gate, self._neighbours)
        run.timers.adopt_this_task()
        try:
            async with httpx.AsyncClient(transport=transport, timeout=None) as http:
                return await self._loop(run.task, http), None
        except asyncio.CancelledError:
            return None, "CancelledError"
        except Exception as error:
            if run.over is None:
                log.exception("the loop of %s raised", run.rollout_id)
            return None, f"{type(error).__name__}: {error}"

    # -- acknowledge, retire -------------------------------------------------------------------

    async def _acknowledge(self, message: wire.Acknowledge) -> wire.Report:
        self._forget(list({one.rollout_id for one in message.results if self._has(one)}))
        return self.gate.status()

    def _has(self, result: wire.Finished) -> bool:
        """By digest: after a restore the result has another run number."""
        known = self._known.get(result.rollout_id)
        return isinstance(known, Kept) and known.reply.result_digest == result.result_digest

    async def _retire(self, message: wire.Retire) -> wire.Report:
        known = {name: self._known[name] for name in message.rollouts if name in self._known}
        for one in known.values():
            if isinstance(one, Run):
                one.end(wire.STALE_ATTEMPT, "its group was dropped")
        self._forget(list(known))
        return self.gate.status()

    def _forget(self, rollouts: Sequence[str]) -> None:
        for rollout_id in rollouts:
            self._closed[rollout_id] = self._known.pop(rollout_id).run
            self._closed.move_to_end(rollout_id)
            self.gate.touch()
        while len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        if rollouts and len(self._tasks) < MAX_TASKS:
            self._detach(self._neighbours.retire(rollouts, self._token))

    # -- Part ----------------------------------------------------------------------------------

    def begin(self) -> None:
        for run in self._runs():
            run.left_out = False

    def freeze(self) -> None:
        pass  # closed is enough: whatever runs parks by itself

    def blockers(self) -> list[str]:
        if self.mode == "restart_only":
            return []  # nothing of them is saved
        held = self.gate.holds_replies
        return sorted(
            run.rollout_id
            for run in self._runs()
            if run.start_over_reason() is None and not run.parked(replies_held=held)
        )

    def give_up(self) -> None:
        self.gate.hold_replies()  # those that wait for a model reply stand at a turn end
        for rollout_id in self.blockers():
            known = self._known[rollout_id]
            if isinstance(known, Run):
                known.left_out = True

    def export(self, _: wire.Commit) -> Export:
        if moving := self.blockers():
            raise Refused(wire.BUSY, f"not parked: {', '.join(moving[:100])}")
        known = self._known
        saves = self.mode == "export"
        return agent_part.export([known[name] for name in sorted(known)], saves_runs=saves)

    def check(self, read: Read) -> dict[str, Place | Kept]:
        return agent_part.checked(read)

    def stage(self, checked: dict[str, Place | Kept]) -> wire.Report:
        self._staged = checked
        return agent_part.report_of(checked.values())

    def activate(self, incarnation: int) -> None:
        for run in self._runs():
            run.end(wire.STALE_ATTEMPT, "a snapshot was restored")
        self._oldest_incarnation = incarnation
        self._closed.clear()
        self._known = {name: _next_run(one, incarnation) for name, one in self._staged.items()}
        self._staged = {}

    def drop(self) -> None:
        self._staged = {}

    def discard(self, rollouts: tuple[str, ...]) -> None:
        for rollout_id in rollouts:
            self._staged.pop(rollout_id, None)

    def live_runs(self) -> int:
        return sum(run.over is None for run in self._runs())

    def _runs(self) -> list[Run]:
        return [known for known in self._known.values() if isinstance(known, Run)]


def _next_run(known: Place | Kept, incarnation: int) -> Place | Kept:
    """Run n of the snapshot continues as run n+1 (R3)."""
    attempt_index = known.run.attempt_index + 1
    if isinstance(known, Place):
        return evolve(known, run=wire.RunId(incarnation, attempt_index))
    reply = evolve(known.reply, attempt_index=attempt_index)
    return Kept(reply, incarnation, restored=True)


def _transports(
    servers: Mapping[str, str],
    inner: httpx.AsyncBaseTransport | Mapping[str, httpx.AsyncBaseTransport] | None,
) -> Mapping[str, httpx.AsyncBaseTransport]:
    if isinstance(inner, Mapping):
        return inner
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    shared = inner or httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
    return dict.fromkeys(servers, shared)

"""The resource server: any ASGI app of tools or environments, with its sessions kept safe.

Each rollout's calls run one at a time, a repeated call gets the recorded answer, and a call that
depends on another state than the session has is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from fsm.outcome import Refused
from participants.gym import wire
from participants.gym.servers import sessions as saved
from participants.gym.servers.asgi import MIB, App, answered, body_of, buffered
from participants.gym.servers.caller import Caller, caller_of, number_in
from participants.gym.servers.gate import Gate
from participants.gym.servers.journal import Reply, body_digest
from participants.gym.servers.parts import Export, Read
from participants.gym.servers.routes import LISTS_LIMIT, ControlPlane, Route
from participants.gym.servers.sessions import Answer, Mode, Session, SessionCodec, Staged

log = logging.getLogger("quiesce.gym.resource")

BODY_LIMIT_BYTES = 64 * MIB


class ResourceServer:
    """Wraps `app`; `.app` is what to serve.

    codec: how sessions are saved; without one the mode is "restart_only" (fail closed).
    mode="stateless": nothing is kept between calls, so there is nothing to save. isolation:
    "shared" if sessions influence each other: then none can be left out of a snapshot.
    reads: paths that change nothing. root: the snapshot root.
    """

    kind: wire.Kind = "resource"

    def __init__(
        self,
        name: str,
        app: App,
        codec: SessionCodec | None = None,
        *,
        root: Path | str,
        token: str,
        mode: Mode | None = None,
        isolation: Literal["per_session", "shared"] = "per_session",
        reads: Iterable[str] = (),
    ) -> None:
        self.mode: Mode = mode or ("restart_only" if codec is None else "export")
        if (self.mode == "export") != (codec is not None):
            raise ValueError(f"{name}: mode 'export' goes with a codec, and only with one")
        self.name, self.isolation, self._reads = name, isolation, frozenset(reads)
        self._inner, self._codec = app, codec
        self._sessions: dict[str, Session] = {}
        self._staged: dict[str, Staged] = {}
        self._moving: dict[str, int] = {}  # handlers under way, by rollout ("" if unknown)
        self._frozen = False
        self._oldest_incarnation = 0
        self._tasks: set[asyncio.Task[Response]] = set()
        self.gate = Gate(self, Path(root))
        extra = {wire.RETIRE: Route(wire.Retire, self._retire, LISTS_LIMIT)}
        self.app = ControlPlane(self._serve, self.gate, self.capabilities, token, extra)

    def capabilities(self) -> wire.Capabilities:
        return self.gate.capabilities(self.mode, self.isolation)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket: it counts as long as it is open
            await self._pass_on(scope, receive, send, self._is_open)
            return
        request = Request(scope, receive)
        marked = wire.ROLLOUT in request.headers
        if not marked or self.mode == "stateless":
            await self._pass_on(scope, receive, send, self._lets_turns if marked else self._is_open)
            return
        response = await answered(self._marked(request))
        await response(scope, receive, send)

    async def _pass_on(
        self, scope: Any, receive: Any, send: Any, allowed: Callable[[], bool]
    ) -> None:
        """No session: held while it is not allowed (H7), counted while it runs."""
        await self.gate.until(allowed)
        self._count("", 1)
        try:
            await self._inner(scope, receive, send)
        finally:
            self._count("", -1)

    def _is_open(self) -> bool:
        return not self.gate.closed

    def _lets_turns(self) -> bool:
        """Calls on behalf of a turn under way pass until the server freezes (H7)."""
        return not (self.gate.still or (self.gate.closed and self._frozen))

    # -- a rollout's call ----------------------------------------------------------------------

    async def _marked(self, request: Request) -> Response:
        caller, body = caller_of(request.headers), await body_of(request, BODY_LIMIT_BYTES)
        # In a task of its own: a caller that goes away must not cut a mutation off.
        task = asyncio.create_task(self._in_turn(caller, request, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)

    async def _in_turn(self, caller: Caller, request: Request, body: bytes) -> Response:
        while True:
            await self.gate.until(self._lets_turns)
            session = self._session_of(caller)
            async with session.lock:
                # Both may have changed while it waited.
                if self._lets_turns() and self._sessions.get(caller.rollout_id) is session:
                    self._count(caller.rollout_id, 1)
                    try:
                        return await self._locked(caller, session, request, body)
                    finally:
                        self._count(caller.rollout_id, -1)

    def _session_of(self, caller: Caller) -> Session:
        known = self._sessions.get(caller.rollout_id)
        stale = caller.run.incarnation < self._oldest_incarnation
        if stale or (known and caller.is_behind(known.run, known.lineage)):
            raise Refused(wire.STALE_ATTEMPT, f"{caller.rollout_id}: run {caller.run} is over")
        if known is None:
            known = self._sessions[caller.rollout_id] = Session(caller.run, caller.lineage)
        return known

    async def _locked(
        self, caller: Caller, session: Session, request: Request, body: bytes
    ) -> Response:
        self._session_of(caller)  # again: a newer run may have been here meanwhile
        if caller.begins_anew(session.run, session.lineage):
            self._drop_state(caller.rollout_id)
            session.begin_anew(caller.run, caller.lineage)
        session.run = caller.run
        if request.scope["path"] in self._reads:
            # A server that was started anew must not answer from an empty session.
            session.must_be_at(number_in(request.headers, wire.EXPECT_REVISION))
            reply, _ = await buffered(self._inner, request.scope, body)
            return _answer(reply, session.revision)
        return await self._mutate(session, request, body)

    async def _mutate(self, session: Session, request: Request, body: bytes) -> Response:
        request_id = request.headers.get(wire.REQUEST, "")
        if not 0 < len(request_id) <= 200:
            raise Refused(wire.BAD_REQUEST, f"header {wire.REQUEST} is missing or too long")
        expected = number_in(request.headers, wire.EXPECT_REVISION)
        digest = _digest(request, body)
        known = session.answers.get(request_id)
        if known is not None:
            if known.digest != digest:
                raise Refused(wire.CONFLICT, f"request {request_id} was sent with another body")
            return _answer(known.reply, known.revision)
        session.must_be_at(expected)
        if expected is not None:
            session.forget_answers(expected)
        reply, whole = await buffered(self._inner, request.scope, body)
        session.uncertain = session.uncertain or not whole
        session.revision += 1
        session.record(request_id, Answer(digest, session.revision, reply))
        self.gate.touch(included=not session.left_out)
        return _answer(reply, session.revision)

    def _count(self, rollout_id: str, change: int) -> None:
        left = self._moving.get(rollout_id, 0) + change
        self._moving[rollout_id] = left
        if not left:
            del self._moving[rollout_id]
        self.gate.stir()

    def _drop_state(self, rollout_id: str) -> None:
        if self._codec is not None:
            self._codec.drop_session(rollout_id)

    def _put_state(self, rollout_id: str, state: Any) -> None:
        if self._codec is None or state is None:
            return
        try:
            self._codec.import_session(rollout_id, state)
        except Exception as error:
            detail = f"import_session({rollout_id!r}): {type(error).__name__}: {error}"
            raise Refused(wire.BAD_STATE, detail) from error

    async def _retire(self, message: wire.Retire) -> wire.Report:
        await self.gate.until_open()
        for rollout_id in message.rollouts:
            if self._sessions.pop(rollout_id, None) is not None:
                self._drop_state(rollout_id)
        return self.gate.status()

    # -- Part ----------------------------------------------------------------------------------

    def begin(self) -> None:
        self._frozen = False
        for session in self._sessions.values():
            session.left_out = False

    def freeze(self) -> None:
        self._frozen = True

    def blockers(self) -> list[str]:
        return sorted(
            name or "calls without a rollout" for name in self._moving if self._waits(name)
        )

    def _waits(self, rollout_id: str) -> bool:
        session = self._sessions.get(rollout_id)
        return session is None or not session.left_out

    def give_up(self) -> None:
        if self.isolation == "shared":
            return  # its effects are in everybody's state: nothing can be left out
        for rollout_id in self._moving:
            if session := self._sessions.get(rollout_id):
                session.left_out = True

    def export(self, _: wire.Commit) -> Export:
        if self.isolation == "shared" and self.mode == "export":
            torn = [name for name, one in self._sessions.items() if one.uncertain]
            if torn:
                raise Refused(wire.UNCERTAIN, f"shared state after: {', '.join(torn[:100])}")
        return saved.export(self._sessions, self._codec, self.mode)

    def check(self, read: Read) -> dict[str, Staged]:
        return saved.checked(read)

    def stage(self, checked: dict[str, Staged]) -> wire.Report:
        self._staged = checked
        return saved.report_of({name: one.session.revision for name, one in checked.items()})

    def activate(self, incarnation: int) -> None:
        """May be repeated if a codec raised: importing replaces."""
        for rollout_id in self._sessions:
            self._drop_state(rollout_id)
        self._oldest_incarnation = incarnation
        self._sessions = {}
        for rollout_id, staged in self._staged.items():
            self._put_state(rollout_id, staged.state)
            next_run = staged.session.run.attempt_index + 1
            staged.session.run = wire.RunId(incarnation, next_run)
            self._sessions[rollout_id] = staged.session
        self._staged = {}

    def drop(self) -> None:
        self._staged = {}

    def discard(self, rollouts: tuple[str, ...]) -> None:
        for rollout_id in rollouts:
            self._staged.pop(rollout_id, None)

    def live_runs(self) -> int:
        return len(self._sessions)


def _digest(request: Request, body: bytes) -> str:
    where = f"{request.method} {request.scope['path']}?".encode() + request.scope["query_string"]
    return body_digest(where + b"\n" + body)


def _answer(reply: Reply, revision: int) -> Response:
    response = Response(reply.body, reply.status)
    kept = [(k, v) for k, v in reply.headers if k != "content-length"]
    response.raw_headers += [(k.encode("latin-1"), v.encode("latin-1")) for k, v in kept]
    response.headers[wire.REVISION] = str(revision)
    return response

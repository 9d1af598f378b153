"""The policy model server: passes model calls on, and knows which call was answered how."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fsm.outcome import Refused
from participants.data_plane import CaptureSink
from participants.gym import wire
from participants.gym.servers import ledger as ledgers
from participants.gym.servers.asgi import MIB, answered, body_of, lifespan
from participants.gym.servers.caller import Caller, call_in, caller_of
from participants.gym.servers.capture import POLICY_VERSION, capture_row, is_streamed, version_of
from participants.gym.servers.gate import Gate
from participants.gym.servers.journal import Reply, body_digest, call_id
from participants.gym.servers.ledger import Call, Ledger
from participants.gym.servers.parts import Export, Read
from participants.gym.servers.routes import LISTS_LIMIT, ControlPlane, Route

log = logging.getLogger("quiesce.gym.policy")

BODY_LIMIT_BYTES = 64 * MIB
ROW_PAUSES_S = (0.05, 0.5, None)  # tries to write a capture row, and the pause after each
_DROPPED = frozenset(
    {"connection", "content-encoding", "content-length", "date", "server", "transfer-encoding"}
)
_OWN = (wire.ROLLOUT, wire.RUN, wire.LINEAGE, wire.CALL, wire.AFTER, "host", "content-length")


class PolicyServer:
    """Passes POST requests on to `upstream`, any OpenAI-compatible server; `app` is the ASGI app.

    sink: where each call's token-capture row is before the reply goes out. policy_version: of
    the weights that the upstream has, unless its replies say so; may be set at any time.
    root: the snapshot root. inner: a transport in place of the network.
    """

    kind: wire.Kind = "policy"

    def __init__(
        self,
        name: str,
        upstream: str,
        sink: CaptureSink,
        root: Path | str,
        token: str,
        *,
        policy_version: int = 0,
        inner: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name, self.policy_version = name, policy_version
        self._sink = sink
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        transport = inner or httpx.AsyncHTTPTransport(limits=limits, trust_env=False, retries=2)
        self._upstream = httpx.AsyncClient(base_url=upstream, transport=transport, timeout=None)
        self._ledgers: dict[str, Ledger] = {}
        self._staged: dict[str, Ledger] = {}
        self._unmarked = 0  # calls under way of callers that we know nothing of
        self._oldest_incarnation = 0
        self.gate = Gate(self, Path(root))
        extra = {wire.RETIRE: Route(wire.Retire, self._retire, LISTS_LIMIT)}
        self.app = ControlPlane(self._serve, self.gate, self.capabilities, token, extra)

    def capabilities(self) -> wire.Capabilities:
        return self.gate.capabilities("export", "per_session")

    async def aclose(self) -> None:
        """Close the connections to the upstream."""
        await self._upstream.aclose()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send, self.aclose)
            return
        request = Request(scope, receive)
        if request.method == "POST" and wire.ROLLOUT in request.headers:
            response = await answered(self._marked(request))
            await response(scope, receive, send)
        else:
            await self._pass_on(request, send)

    # -- callers that we know nothing of (H7) --------------------------------------------------

    async def _pass_on(self, request: Request, send: Any) -> None:
        """Held while closed: such a caller does not understand a refusal."""
        generates = request.method == "POST"
        if generates:
            await self.gate.until_open()
        self._unmarked += generates
        try:
            response = await answered(self._stream(request))
            await response(request.scope, request.receive, send)
        finally:
            self._unmarked -= generates
            self.gate.stir()

    async def _stream(self, request: Request) -> Response:
        """The upstream's answer, piece by piece."""
        body = await body_of(request, BODY_LIMIT_BYTES)
        try:
            reply = await self._upstream.send(self._outgoing(request, body), stream=True)
        except httpx.TransportError as error:
            raise _unreachable(error) from error

        async def pieces() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(reply):
                async for piece in reply.aiter_bytes():
                    yield piece

        kept = {k: v for k, v in reply.headers.items() if k not in _DROPPED}
        return StreamingResponse(pieces(), reply.status_code, kept)

    # -- calls of our agents -------------------------------------------------------------------

    async def _marked(self, request: Request) -> Response:
        caller, number = caller_of(request.headers), call_in(request.headers, wire.CALL)
        after = call_in(request.headers, wire.AFTER)
        if number is None:
            raise Refused(wire.BAD_REQUEST, f"header {wire.CALL} is missing")
        body = await body_of(request, BODY_LIMIT_BYTES)
        if is_streamed(body):
            raise Refused(
                wire.BAD_REQUEST, "a streamed reply cannot be captured: leave `stream` out"
            )
        digest = body_digest(request.scope["path"].encode() + b"\n" + body)
        self._check_not_stale(caller)
        call = self._known_call(caller, number, digest)
        if call is None:
            call = self._begin(caller, number, digest, after)
            work = self._ask(caller, number, call, self._outgoing(request, body), body)
            call.task = asyncio.create_task(work)
            call.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if call.task is None:
            raise Refused(
                wire.CONFLICT, f"{call_id(number)} was answered before; its reply is gone"
            )
        return _answer(await _of(call.task), call)

    def _check_not_stale(self, caller: Caller) -> None:
        known = self._ledgers.get(caller.rollout_id)
        stale = caller.run.incarnation < self._oldest_incarnation
        if stale or (known and caller.is_behind(known.run, known.lineage)):
            raise Refused(wire.STALE_ATTEMPT, f"{caller.rollout_id}: run {caller.run} is over")

    def _known_call(self, caller: Caller, number: int, digest: str) -> Call | None:
        """A repeat: it gets the recorded or the running answer, as long as answers go out."""
        ledger = self._ledgers.get(caller.rollout_id)
        if ledger is None or caller.begins_anew(ledger.run, ledger.lineage):
            return None
        call = ledger.calls.get(number)
        if call is None:
            return None
        if call.digest != digest:
            raise Refused(wire.CONFLICT, f"{call_id(number)} was sent before with another body")
        if self.gate.holds_replies:
            raise self._parked()
        ledger.run = caller.run
        return call

    def _begin(self, caller: Caller, number: int, digest: str, after: int | None) -> Call:
        if self.gate.closed:
            raise self._parked()
        ledger = self._ledgers.get(caller.rollout_id)
        if ledger is None or caller.begins_anew(ledger.run, ledger.lineage):
            if ledger is not None:
                ledger.close()
            ledger = Ledger(caller.run, caller.lineage)
        if after is not None and after not in ledger.calls:
            detail = f"{caller.rollout_id}: this server does not know {call_id(after)}"
            raise Refused(wire.LINEAGE_LOST, detail)
        ledger.run = caller.run
        ledger.forget_replies(after)
        ledger.calls[number] = call = Call(digest, f"{caller.capture_key}/{call_id(number)}")
        self._ledgers[caller.rollout_id] = ledger
        self.gate.touch()
        return call

    def _parked(self) -> Refused:
        return Refused(wire.PARKED, f"policy server {self.name!r} is {self.gate.phase}")

    async def _ask(
        self, caller: Caller, number: int, call: Call, outgoing: httpx.Request, body: bytes
    ) -> Reply:
        """One call to its end. The row is in the sink before anybody sees the reply."""
        try:
            reply, version = await self._ask_upstream(outgoing)
            if reply.good:
                await self.gate.until(lambda: not self.gate.holds_replies)
                call.moving = "row"
                await self._write_row(call.row, body, reply, version)
                call.reply, call.moving = reply, ""
            return reply
        finally:
            if call.moving:  # not recorded: a repeat asks again
                self._drop_call(caller, number, call)
            self.gate.stir()

    async def _ask_upstream(self, outgoing: httpx.Request) -> tuple[Reply, int]:
        try:
            response = await self._upstream.send(outgoing)
        except httpx.TransportError as error:
            raise _unreachable(error) from error
        kept = [(k, v) for k, v in response.headers.multi_items() if k not in _DROPPED]
        version = version_of(response.headers.get(POLICY_VERSION), self.policy_version)
        return Reply(response.status_code, tuple(kept), response.content), version

    async def _write_row(self, key: str, body: bytes, reply: Reply, version: int) -> None:
        row = capture_row(body, reply.body, version)
        for pause_s in ROW_PAUSES_S:
            try:
                await self._sink.put(key, row)
            except (OSError, TimeoutError) as error:
                if pause_s is None:
                    raise Refused(wire.IO_ERROR, f"row {key} was not written: {error}") from error
                await asyncio.sleep(pause_s)
            else:
                return

    def _drop_call(self, caller: Caller, number: int, call: Call) -> None:
        ledger = self._ledgers.get(caller.rollout_id)
        if ledger is not None and ledger.calls.get(number) is call:
            del ledger.calls[number]

    def _outgoing(self, request: Request, body: bytes) -> httpx.Request:
        headers = [(k, v) for k, v in request.headers.items() if k not in _OWN]
        query = request.scope["query_string"].decode("latin-1")
        url = request.scope["path"] + (f"?{query}" if query else "")
        return self._upstream.build_request(request.method, url, headers=headers, content=body)

    async def _retire(self, message: wire.Retire) -> wire.Report:
        await self.gate.until_open()
        for rollout_id in message.rollouts:
            ledger = self._ledgers.pop(rollout_id, None)
            if ledger is not None:
                ledger.close()
        return self.gate.status()

    # -- Part ----------------------------------------------------------------------------------

    def begin(self) -> None:
        pass

    def freeze(self) -> None:
        pass  # closed is enough: calls under way end by themselves

    def blockers(self) -> list[str]:
        waits = ("row",) if self.gate.drain_mode == "none" else ("upstream", "row")
        moving = [
            call.row
            for ledger in self._ledgers.values()
            for call in ledger.calls.values()
            if call.moving in waits
        ]
        if self._unmarked and self.gate.drain_mode == "calls":
            moving.append(f"{self._unmarked} calls without a rollout")
        return moving

    def give_up(self) -> None:
        self.gate.hold_replies()  # their rollouts stand at a turn end

    def export(self, commit: wire.Commit) -> Export:
        return ledgers.export(self._ledgers, commit.continuations)

    def check(self, read: Read) -> dict[str, Ledger]:
        return ledgers.checked(read)

    def stage(self, checked: dict[str, Ledger]) -> wire.Report:
        self._staged = checked
        return ledgers.report_of({name: one.rows() for name, one in checked.items()})

    def activate(self, incarnation: int) -> None:
        for ledger in self._ledgers.values():
            ledger.close()
        self._oldest_incarnation = incarnation
        for ledger in self._staged.values():
            ledger.run = wire.RunId(incarnation, ledger.run.attempt_index + 1)
        self._ledgers, self._staged = self._staged, {}

    def drop(self) -> None:
        self._staged = {}

    def discard(self, rollouts: tuple[str, ...]) -> None:
        for rollout_id in rollouts:
            self._staged.pop(rollout_id, None)

    def live_runs(self) -> int:
        return len(self._ledgers)


async def _of(task: asyncio.Task[Reply]) -> Reply:
    """The reply of a call that may be closed meanwhile (its run is over)."""
    await asyncio.wait([task])
    if task.cancelled():
        raise Refused(wire.STALE_ATTEMPT, "the run of this call is over")
    return task.result()


def _answer(reply: Reply, call: Call) -> Response:
    response = Response(reply.body, reply.status)
    response.raw_headers += [(k.encode(), v.encode("latin-1")) for k, v in reply.headers]
    if reply.good:
        response.headers[wire.ROW] = call.row
    return response


def _unreachable(error: httpx.TransportError) -> Refused:
    return Refused(wire.UNREACHABLE, f"{type(error).__name__}: {error}")

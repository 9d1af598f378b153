"""Gym servers in memory, for tests: the wire and the HOLD table, without loops, models or tools.

A `FakeGym` holds `FakeServer`s and is an httpx transport to them (by host name), or one ASGI app
per server for real sockets. What a server reports is set on it as plain data. `server.faults`
makes operations go wrong:

    Fault("commit", "refuse", code="busy")   answered 409, nothing done
    Fault("resume", "late")                  done only after `server.go_on.set()`
    Fault("prepare", "lose")                 done, but the connection breaks before the answer
    Fault("drain", "crash")                  the process dies; `server.restart()` starts it afresh
    Fault("renew", "lapse")                  the lease has just ended

`gym.log` has every message that arrived, as (server, operation).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal

import httpx
from attrs import define, evolve, field

from fsm import hold, strict
from fsm.machine import IllegalEvent, Machine
from fsm.outcome import Refused
from fsm.storing import Fence
from participants.gym import wire
from participants.gym.client import GymServer

TOKEN = "a-token-for-tests"
MESSAGES: dict[str, type[wire.Control]] = {
    "status": wire.Control,
    "prepare": wire.Prepare,
    "drain": wire.Drain,
    "renew": wire.Renew,
    "commit": wire.Commit,
    "fence": wire.FenceOff,
    "restore": wire.Stage,
    "discard": wire.Discard,
    "resume": wire.Release,
    "rollback": wire.Release,
}
EVENTS = {
    "prepare": hold.PREPARE,
    "commit": hold.COMMIT,
    "fence": hold.FENCE,
    "restore": hold.STAGE,
    "resume": hold.RESUME,
    "rollback": hold.ROLLBACK,
}


@define
class Fault:
    """Something that goes wrong the next `times` times that `operation` arrives."""

    operation: str
    what: Literal["refuse", "late", "lose", "crash", "lapse"]
    code: str = wire.BUSY
    times: int = 1


@define(eq=False)
class FakeServer:
    """One server. `report`: what commit and restore answer; `blockers`: what drain waits for."""

    kind: wire.Kind
    name: str
    log: list[tuple[str, str]]
    report: wire.Report = field(factory=lambda: wire.Report(hold.OPEN))
    blockers: tuple[str, ...] = ()
    moved: bool = False
    capabilities: dict[str, Any] = field(factory=dict)
    faults: list[Fault] = field(factory=list)
    go_on: asyncio.Event = field(factory=asyncio.Event)
    received: list[Any] = field(factory=list)
    activations: int = 0
    alive: bool = True
    _machine: Machine = field(factory=lambda: Machine(hold.HOLD))
    _fence: Fence | None = None
    _over: str | None = None  # how the hold of _fence ended: the operation, or "lapse"

    @property
    def phase(self) -> str:
        return self._machine.state

    def restart(self) -> None:
        """A fresh process: alive, open, and without memory."""
        self.alive, self._machine = True, Machine(hold.HOLD)
        self._fence = self._over = None

    def lapse(self) -> None:
        """The lease ends: the server opens by itself (H3)."""
        self._machine.fire(hold.LAPSE)
        self._over = "lapse"

    async def answer(self, path: str, authorization: str, body: Any) -> Any:
        """JSON-able answer. Raises Refused for an error body, ConnectionError for none at all."""
        operation = path.rsplit("/", 1)[-1]
        fault = self._fault(operation)
        if not self.alive:
            raise ConnectionRefusedError(f"{self.name} is down")
        self.log.append((self.name, operation))
        if authorization != f"Bearer {TOKEN}":
            raise Refused(wire.UNAUTHORIZED, "the bearer token is not mine")
        if fault == "late":
            await self.go_on.wait()
        reply = self._perform(operation, path, body)
        if fault == "lose":
            raise ConnectionResetError(f"{self.name} hung up")
        return strict.write(reply)

    def _fault(self, operation: str) -> str | None:
        fault = next((one for one in self.faults if one.operation == operation), None)
        if fault is None:
            return None
        fault.times -= 1
        if not fault.times:
            self.faults.remove(fault)
        if fault.what == "refuse":
            self.log.append((self.name, operation))
            raise Refused(fault.code, "as the test ordered")
        if fault.what == "crash":
            self.alive = False
        if fault.what == "lapse":
            self.lapse()
        return fault.what

    def _perform(self, operation: str, path: str, body: Any) -> Any:
        if path == wire.CAPABILITIES:
            return self._capabilities()
        if path == "/run":
            return self._run(self._read(wire.RunRequest, body))
        if path in (wire.ACKNOWLEDGE, wire.RETIRE):
            self._read(wire.Acknowledge if path == wire.ACKNOWLEDGE else wire.Retire, body)
            return wire.Report(self.phase)
        return self._control(operation, self._read(MESSAGES[operation], body))

    def _read(self, kind: type[Any], body: Any) -> Any:
        message = strict.read(kind, body, "the message")
        self.received.append(message)
        return message

    def _capabilities(self) -> wire.Capabilities:
        usual = wire.Capabilities(
            schema_version=wire.SCHEMA_VERSION,
            kind=self.kind,
            name=self.name,
            mode="export",
            isolation="per_session",
            num_workers=1,
            phase=self.phase,
            instance="one",
            live_runs=0,
        )
        return evolve(usual, **self.capabilities)

    def _run(self, request: wire.RunRequest) -> wire.RunReply:
        return wire.RunReply(
            rollout_id=request.rollout_id,
            attempt_index=request.attempt_index,
            result={"reward": 1.0},
            result_digest="digest",
            rows=(),
            turns=1,
            replayed=0,
        )

    def _control(self, operation: str, message: wire.Control) -> wire.Report:
        if operation == "status":
            return self._answer(operation)
        if self._fence is not None and message.fence < self._fence:
            raise Refused(wire.STALE_FENCE, f"{self.name} knows {self._fence}")
        if self._fence is None or message.fence > self._fence:
            if self.phase != hold.OPEN:
                self._machine.fire(hold.NEWER)
            self._fence, self._over = message.fence, None
        if self._over is not None:
            return self._after_the_end(operation)
        if isinstance(message, wire.Release) and message.activate and self.phase != hold.STAGED:
            raise Refused(wire.INVALID_PHASE, f"{self.name} has nothing staged to activate")
        self._move(operation)
        return self._answer(operation)

    def _after_the_end(self, operation: str) -> wire.Report:
        """A hold that is over: only the repeat of what ended it is answered (H1, H2)."""
        if operation == self._over:
            return self._answer(operation)
        raise Refused(wire.LEASE_EXPIRED if self._over == "lapse" else wire.STALE_FENCE, self.name)

    def _move(self, operation: str) -> None:
        staged, fired = self.phase == hold.STAGED, [row.event for row in self._machine.fired]
        if (
            operation == "drain"
            and not self.blockers
            and self.phase in (hold.CLOSING, hold.FENCING)
        ):
            self._machine.fire(hold.QUIET)
        event = EVENTS.get(operation)
        if event is None or self._is_repeat(event, fired):
            return
        try:
            self._machine.fire(event)
        except IllegalEvent as illegal:
            raise Refused(wire.INVALID_PHASE, str(illegal)) from None
        if operation in ("resume", "rollback"):
            self._over = operation
            self.activations += staged and operation == "resume"

    def _is_repeat(self, event: str, fired: list[str]) -> bool:
        holding = fired[_last_open(self._machine) :]
        return event in holding

    def _answer(self, operation: str) -> wire.Report:
        has_part = operation in ("commit", "restore", "drain")
        report = self.report if has_part else wire.Report(self.phase)
        return evolve(
            report,
            phase=self.phase,
            fence=self._fence,
            moved=self.moved,
            quiet=not self.blockers,
            blockers=self.blockers,
            blocker_count=len(self.blockers),
        )


def _last_open(machine: Machine) -> int:
    """Where in the machine's history the present hold begins."""
    opened = [i for i, row in enumerate(machine.fired, start=1) if row.target == hold.OPEN]
    return opened[-1] if opened else 0


class FakeGym(httpx.AsyncBaseTransport):
    """Fake servers by name, at `http://<name>`."""

    def __init__(self, *servers: tuple[wire.Kind, str]) -> None:
        self.log: list[tuple[str, str]] = []
        self.fakes = {name: FakeServer(kind, name, self.log) for kind, name in servers}

    def __getitem__(self, name: str) -> FakeServer:
        return self.fakes[name]

    @property
    def servers(self) -> tuple[GymServer, ...]:
        return tuple(
            GymServer(one.kind, one.name, f"http://{one.name}") for one in self.fakes.values()
        )

    def order(self, operations: Iterable[str]) -> list[tuple[str, str]]:
        """The log without other operations."""
        wanted = frozenset(operations)
        return [entry for entry in self.log if entry[1] in wanted]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        fake = self.fakes.get(request.url.host)
        if fake is None:
            raise httpx.ConnectError(f"no such host: {request.url.host}")
        body = json.loads(await request.aread() or b"null")
        token = request.headers.get("authorization", "")
        try:
            status, answer = await _http(fake, request.url.path, token, body)
        except ConnectionError as error:
            raise httpx.ReadError(str(error)) from error
        return httpx.Response(status, json=answer, request=request)

    def app(self, name: str) -> Callable[..., Awaitable[None]]:
        """One fake server as an ASGI app, for real sockets."""
        fake = self.fakes[name]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body = b""
            while (part := await receive())["type"] == "http.request":
                body += part.get("body", b"")
                if not part.get("more_body"):
                    break
            token = dict(scope["headers"]).get(b"authorization", b"").decode()
            status, answer = await _http(fake, scope["path"], token, json.loads(body or b"null"))
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

        return app


async def _http(fake: FakeServer, path: str, token: str, body: Any) -> tuple[int, Any]:
    try:
        return 200, await fake.answer(path, token, body)
    except Refused as refusal:
        status = 401 if refusal.code == wire.UNAUTHORIZED else 409
        return status, {"error": {"code": refusal.code, "detail": refusal.detail}}

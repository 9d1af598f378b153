"""Typed calls from the trainer's side to the Gym servers, over HTTP (specs/wire.md).

One method per operation: it sends the wire message and reads the answer. What goes wrong becomes
`Refused` (the server said no) or `Unavailable` (nothing is known of what it did); both name the
server and say what to do.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import httpx
from attrs import frozen

from fsm import strict
from fsm.outcome import Refused, Unavailable
from participants.gym import wire

T = TypeVar("T")

# Control messages may be repeated (H2), so a lost connection is tried again, within the deadline.
RETRY_PAUSES_S = (0.05, 0.2, 0.8)
CONNECT_TIMEOUT_S = 5.0
REPLY_SLACK_S = (
    5.0  # a drain answers at the end of its own time-out: how long that may be on its way
)
ONE_CONNECTION = httpx.Limits(max_connections=1)
CONTROL_LIMITS = httpx.Limits(max_connections=512, max_keepalive_connections=128)


@frozen
class GymServer:
    """Where one Gym server is. `name` is unique among all servers; `url` ends without a slash."""

    kind: wire.Kind
    name: str
    url: str

    def __str__(self) -> str:
        return f"{self.kind} server {self.name!r} ({self.url})"


class GymClient:
    """HTTP calls to a list of servers; one method per operation of the wire.

    token: bearer token of the control routes. transport: in place of the network, for tests; one
    that does not mind being closed.
    Raises ValueError for two servers of one name, or an unknown kind.
    """

    def __init__(
        self,
        servers: Iterable[GymServer],
        token: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        retry_pauses_s: tuple[float, ...] = RETRY_PAUSES_S,
    ) -> None:
        self.servers = {server.name: server for server in _checked(servers)}
        self._pauses_s = (*retry_pauses_s, None)

        self._transport, self._token = transport, token
        self._control = self._connections(CONTROL_LIMITS)

    def _connections(self, limits: httpx.Limits) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=self._transport,
            verify=_tls(),
            limits=limits,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            headers={"authorization": f"Bearer {self._token}"},
            trust_env=False,  # Gym servers are neighbours: never through a proxy
        )

    def of(self, kind: wire.Kind) -> tuple[GymServer, ...]:
        return tuple(server for server in self.servers.values() if server.kind == kind)

    async def aclose(self) -> None:
        await self._control.aclose()

    # -- one method per operation --------------------------------------------------------------

    async def capabilities(self, server: GymServer, timeout_s: float) -> wire.Capabilities:
        answer = await self._ask(server, "GET", wire.CAPABILITIES, None, timeout_s)
        return _read(wire.Capabilities, answer, server, wire.CAPABILITIES)

    async def status(self, server: GymServer, message: wire.Control) -> wire.Report:
        return await self._operate(server, "status", message)

    async def prepare(self, server: GymServer, message: wire.Prepare) -> wire.Report:
        return await self._operate(server, "prepare", message)

    async def drain(self, server: GymServer, message: wire.Drain) -> wire.Report:
        """Waits up to message.timeout_s on the server's side; `quiet` says which way it ended."""
        return await self._operate(server, "drain", message, REPLY_SLACK_S)

    async def renew(self, server: GymServer, message: wire.Renew) -> wire.Report:
        return await self._operate(server, "renew", message)

    async def commit(self, server: GymServer, message: wire.Commit) -> wire.Report:
        return await self._operate(server, "commit", message)

    async def fence(self, server: GymServer, message: wire.FenceOff) -> wire.Report:
        return await self._operate(server, "fence", message)

    async def restore(self, server: GymServer, message: wire.Stage) -> wire.Report:
        return await self._operate(server, "restore", message)

    async def discard(self, server: GymServer, message: wire.Discard) -> wire.Report:
        return await self._operate(server, "discard", message)

    async def resume(self, server: GymServer, message: wire.Release) -> wire.Report:
        return await self._operate(server, "resume", message)

    async def rollback(self, server: GymServer, message: wire.Release) -> wire.Report:
        return await self._operate(server, "rollback", message)

    async def acknowledge(
        self, server: GymServer, message: wire.Acknowledge, timeout_s: float
    ) -> wire.Report:
        return await self._report(server, wire.ACKNOWLEDGE, message, timeout_s)

    async def retire(
        self, server: GymServer, message: wire.Retire, timeout_s: float
    ) -> wire.Report:
        return await self._report(server, wire.RETIRE, message, timeout_s)

    async def run(self, server: GymServer, request: wire.RunRequest) -> wire.RunReply:
        """One rollout, however long it takes. Not repeated here: the sender decides (R7).

        It has a connection of its own: a pool looks at all its connections with every request,
        which thousands of long runs make slow (and control messages with them).
        """
        try:
            async with self._connections(ONE_CONNECTION) as own:
                answer = await own.post(f"{server.url}/run", json=strict.write(request))
        except httpx.RequestError as error:
            raise _lost(server, "/run", error) from error
        return _read(wire.RunReply, answer, server, "/run")

    # -- how they are sent ---------------------------------------------------------------------

    async def _operate(
        self, server: GymServer, operation: str, message: wire.Control, slack_s: float = 0.0
    ) -> wire.Report:
        route = f"{wire.CHECKPOINT}/{operation}"
        return await self._report(server, route, message, message.timeout_s + slack_s)

    async def _report(
        self, server: GymServer, route: str, message: Any, timeout_s: float
    ) -> wire.Report:
        answer = await self._ask(server, "POST", route, strict.write(message), timeout_s)
        return _read(wire.Report, answer, server, route)

    async def _ask(
        self, server: GymServer, method: str, route: str, body: Any, timeout_s: float
    ) -> httpx.Response:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._persist(server, method, route, body)
        except TimeoutError:
            raise Unavailable(
                f"{server} did not answer {method} {route} within {timeout_s:.3g} s: "
                "look whether its process runs and what its log says"
            ) from None

    async def _persist(
        self, server: GymServer, method: str, route: str, body: Any
    ) -> httpx.Response:
        for pause_s in self._pauses_s:
            try:
                return await self._control.request(method, server.url + route, json=body)
            except httpx.RequestError as error:
                if pause_s is None:
                    raise _lost(server, route, error) from error
                await asyncio.sleep(pause_s)
        raise AssertionError("the last try either returns or raises")


@functools.cache
def _tls() -> ssl.SSLContext:
    """Shared: making one takes longer than a request."""
    return httpx.create_ssl_context()


async def together(calls: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """All calls at once; the first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(call) for name, call in calls.items()}
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return {name: task.result() for name, task in tasks.items()}


async def past_failures(calls: Mapping[str, Coroutine[Any, Any, Any]]) -> dict[str, Refused]:
    """All calls at once, each to its end. Returns the refusals by name; bugs are raised."""

    async def one(call: Coroutine[Any, Any, Any]) -> Refused | None:
        try:
            await call
        except Refused as refusal:
            return refusal
        return None

    answers = await asyncio.gather(*map(one, calls.values()))
    return {name: error for name, error in zip(calls, answers, strict=True) if error is not None}


def _checked(servers: Iterable[GymServer]) -> tuple[GymServer, ...]:
    listed = tuple(servers)
    names = [server.name for server in listed]
    for server in listed:
        if server.kind not in wire.KINDS:
            raise ValueError(f"{server}: its kind must be one of {', '.join(wire.KINDS)}")
        if server.url.endswith("/"):
            raise ValueError(f"{server}: write its url without a slash at the end")
        if names.count(server.name) > 1:
            raise ValueError(f"two Gym servers are called {server.name!r}; give one another name")
    return listed


def _read(kind: type[T], answer: httpx.Response, server: GymServer, route: str) -> T:
    """The answer as `kind`; an error body as `Refused`; anything else says what came instead."""
    try:
        body = answer.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = None
    if answer.status_code != httpx.codes.OK:
        raise _refusal(answer.status_code, body, server, route)
    try:
        return strict.read(kind, body, f"answer of {server} to {route}")
    except strict.BadInput as bad:
        raise Refused("bad_answer", f"{bad}: is it of another version of quiesce?") from None


def _refusal(status: int, body: Any, server: GymServer, route: str) -> Refused:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("code"), str):
        return Refused(error["code"], f"{server}, {route}: {error.get('detail', '')}")
    if status == httpx.codes.NOT_FOUND:
        return Refused(
            "no_route",
            f"{server} has no route {route}, so it is no checkpoint participant: serve it with "
            "quiesce's agent, policy or resource server, or take it off the actor's list",
        )
    return Unavailable(f"{server} answered {route} with HTTP {status}: look into its log")


def _lost(server: GymServer, route: str, error: httpx.RequestError) -> Unavailable:
    what = str(error) or type(error).__name__
    return Unavailable(
        f"{server} could not be reached for {route} ({what}): look whether its process runs"
    )

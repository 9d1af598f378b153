"""The control routes of a Gym server, around any ASGI app (specs/wire.md).

Whatever is below the prefix needs the bearer token, on every method and every path, and is
answered here; everything else goes to the app.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response

from fsm import strict
from fsm.outcome import Refused
from participants.gym import wire
from participants.gym.servers.asgi import (
    MIB,
    App,
    answered,
    body_of,
    check_rollout_id,
    json_answer,
    message_of,
)
from participants.gym.servers.gate import Gate

BODY_LIMIT, LISTS_LIMIT = 1 * MIB, 64 * MIB  # LISTS: messages that name rollouts
MAX_SECONDS = 86_400.0


@frozen
class Route:
    """One POST route: the message it takes, what it does, how long its body may be."""

    message: type
    work: Callable[[Any], Awaitable[wire.Report]]
    limit_bytes: int = BODY_LIMIT


class ControlPlane:
    """ASGI app: the control routes of `gate`, and `app` for everything else.

    describe: the answer to GET capabilities. extra: more POST routes, by path. Raises ValueError
    for an empty token.
    """

    def __init__(
        self,
        app: App,
        gate: Gate,
        describe: Callable[[], wire.Capabilities],
        token: str,
        extra: Mapping[str, Route],
    ) -> None:
        if not token:
            raise ValueError(
                "the control routes need a token: make one with `openssl rand -hex 32`"
            )
        self._app, self._describe = app, describe
        self._secret = f"Bearer {token}".encode()
        self._routes = {**_checkpoint_routes(gate), **extra}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not _is_control(scope["path"]):
            await self._app(scope, receive, send)
            return
        response = await answered(self._answer(Request(scope, receive)))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        self._check_token(request)
        path, method = request.scope["path"], request.method
        if (method, path) == ("GET", wire.CAPABILITIES):
            return json_answer(strict.write(self._describe()))
        route = self._routes.get(path)
        if route is None or method != "POST":
            raise Refused(wire.NO_ROUTE, f"there is no {method} {path[:200]} here")
        body = await body_of(request, route.limit_bytes)
        message: Any = message_of(route.message, body, f"the body of {path}")
        _check(message)
        return json_answer(strict.write(await route.work(message)))

    def _check_token(self, request: Request) -> None:
        given = [value for name, value in request.scope["headers"] if name == b"authorization"]
        # Bytes: comparing text raises on what is not ASCII.
        if len(given) != 1 or not hmac.compare_digest(given[0], self._secret):
            raise Refused(wire.UNAUTHORIZED, "the control routes need the bearer token")


def _is_control(path: str) -> bool:
    return path == wire.PREFIX or path.startswith(f"{wire.PREFIX}/")


def _checkpoint_routes(gate: Gate) -> dict[str, Route]:
    async def status(_: wire.Control) -> wire.Report:
        return gate.status()

    routes = {
        "status": Route(wire.Control, status),
        "prepare": Route(wire.Prepare, gate.prepare),
        "drain": Route(wire.Drain, gate.drain),
        "renew": Route(wire.Renew, gate.renew),
        "commit": Route(wire.Commit, gate.commit, LISTS_LIMIT),
        "fence": Route(wire.FenceOff, gate.fence_off),
        "restore": Route(wire.Stage, gate.stage),
        "discard": Route(wire.Discard, gate.discard, LISTS_LIMIT),
        "resume": Route(wire.Release, gate.resume),
        "rollback": Route(wire.Release, gate.rollback),
    }
    return {f"{wire.CHECKPOINT}/{name}": route for name, route in routes.items()}


def _check(message: Any) -> None:
    """What types alone do not say. Raises Refused(bad_request)."""
    if isinstance(message, wire.Control):
        _check_control(message)
    for rollout_id in getattr(message, "rollouts", ()):
        check_rollout_id(rollout_id)


def _check_control(message: wire.Control) -> None:
    if message.schema_version != wire.SCHEMA_VERSION:
        raise Refused(
            wire.BAD_REQUEST,
            f"this server speaks version {wire.SCHEMA_VERSION}, not {message.schema_version}",
        )
    fence = message.fence
    if not 0 < len(fence.root) <= 128 or fence.incarnation < 0 or fence.sequence < 0:
        raise Refused(wire.BAD_REQUEST, "fence: a root and two numbers >= 0 are needed")
    for name in ("timeout_s", "lease_s"):
        seconds = getattr(message, name, 1.0)
        if not (math.isfinite(seconds) and 0.0 <= seconds <= MAX_SECONDS):
            raise Refused(wire.BAD_REQUEST, f"{name} must be between 0 and {MAX_SECONDS:g}")

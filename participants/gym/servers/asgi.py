"""Reading requests and writing answers, for every kind of server. Bad input never becomes a 500."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fsm import strict
from fsm.outcome import Refused
from participants.gym import wire
from participants.gym.servers.journal import Reply
from storage.jsontext import strict_loads

log = logging.getLogger("quiesce.gym")

T = TypeVar("T")
App = Callable[[Any, Any, Any], Awaitable[None]]
MIB = 1 << 20
BODY_TIMEOUT_S = 30.0  # for the body to arrive, once its headers are here
_STATUS = {
    wire.UNAUTHORIZED: 401,
    wire.BAD_REQUEST: 400,
    wire.NO_ROUTE: 404,
    wire.TOO_LARGE: 413,
    wire.IO_ERROR: 500,
    wire.UNREACHABLE: 502,
}
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def json_answer(value: Any, status: int = 200) -> Response:
    """ASCII only: models say lone surrogates, and UTF-8 has no form for them."""
    return Response(json.dumps(value, allow_nan=False), status, media_type="application/json")


def error_answer(refusal: Refused) -> Response:
    """`{"error": {"code", "detail"}}`; 409 unless the code has a status of its own."""
    body = {"error": {"code": refusal.code, "detail": refusal.detail}}
    return json_answer(body, _STATUS.get(refusal.code, 409))


async def answered(work: Awaitable[Response]) -> Response:
    """The answer, with refusals and disk errors as error bodies."""
    try:
        return await work
    except Refused as refusal:
        return error_answer(refusal)
    except OSError as failure:
        log.exception("input or output failed")
        return error_answer(Refused(wire.IO_ERROR, str(failure)))


async def body_of(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises `Refused` if it is too large or does not arrive in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise Refused(wire.TOO_LARGE, f"the body has more than {limit_bytes} bytes")
    except TimeoutError:
        raise Refused(wire.BAD_REQUEST, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise Refused(wire.BAD_REQUEST, "the caller went away") from None
    return bytes(body)


def message_of(kind: type[T], body: bytes, what: str) -> T:
    """A JSON body as a wire message. Raises Refused(bad_request) naming every bad key."""
    try:
        return strict.read(kind, strict_loads(body), what)
    except ValueError as problem:  # not JSON, or BadInput
        raise Refused(wire.BAD_REQUEST, str(problem)[:2000]) from None


def check_rollout_id(rollout_id: str) -> str:
    """Raises Refused(bad_request): such names are in row keys and in files."""
    if not _ROLLOUT_ID.fullmatch(rollout_id):
        raise Refused(wire.BAD_REQUEST, f"{rollout_id[:80]!r} is not a rollout id")
    return rollout_id


async def buffered(app: App, scope: Any, body: bytes) -> tuple[Reply, bool]:
    """The app's whole answer, and whether it is known to have done its work: not if it raised,
    broke off, or answered with a server error."""
    status, complete, content = 500, False, bytearray()
    headers: tuple[tuple[str, str], ...] = ()
    sent = iter([{"type": "http.request", "body": body, "more_body": False}])
    never = asyncio.Event()

    async def receive() -> Any:
        message = next(sent, None)
        if message is None:
            await never.wait()
        return message

    async def send(message: Any) -> None:
        nonlocal status, headers, complete
        if message["type"] == "http.response.start":
            status, headers = message["status"], _decoded(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            content.extend(message.get("body", b""))
            complete = not message.get("more_body", False)

    try:
        await app(scope, receive, send)
    except Exception:
        log.exception("the app raised")
        return Reply(500, (("content-type", "text/plain"),), b"Internal Server Error"), False
    return Reply(status, headers, bytes(content)), complete and status < 500


def _decoded(headers: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)


async def lifespan(receive: Any, send: Any, close: Callable[[], Awaitable[None]]) -> None:
    """The ASGI lifespan of a server that has nothing to start; `close` is called at its end."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            await close()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def not_found(request: Request) -> Response:
    raise Refused(wire.NO_ROUTE, f"there is no {request.method} {request.scope['path'][:200]} here")

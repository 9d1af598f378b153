"""Token-capture rows over HTTP, for a data plane that lives in the trainer's memory.

A policy server puts rows through `HttpSink`; the trainer serves `receiver(plane)`. With
TransferQueue neither is needed: its sink joins the cluster itself.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from participants.data_plane import CaptureSink, Row

PATH = "/capture"


class HttpSink:
    """`data_plane.CaptureSink`. The row is in the trainer's plane when `put` returns.

    timeout_s: of each put. Raises TimeoutError, or OSError with what the trainer said.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 60.0,
        inner: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
            transport=inner,
        )

    async def put(self, key: str, row: Row) -> None:
        try:
            reply = await self._http.post(PATH, json={"key": key, "row": dict(row)})
        except httpx.TimeoutException as error:
            raise TimeoutError(f"capture row {key}: the trainer did not answer") from error
        except httpx.TransportError as error:
            raise ConnectionError(f"capture row {key}: no trainer there: {error}") from error
        if reply.status_code != 200:
            raise OSError(f"capture row {key} was refused: {reply.status_code} {reply.text}")

    async def close(self) -> None:
        await self._http.aclose()


def receiver(plane: CaptureSink, token: str) -> Starlette:
    """The trainer's side: POST /capture {"key", "row"} puts one row into `plane`."""
    expected = f"Bearer {token}"

    async def put(request: Request) -> JSONResponse:
        if not hmac.compare_digest(request.headers.get("authorization", ""), expected):
            return _refusal(401, "unauthorized", "the bearer token is wrong")
        try:
            body: Any = await request.json()
            await plane.put(body["key"], body["row"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _refusal(400, "bad_request", f"not a capture row: {error!r}")
        return JSONResponse({})

    return Starlette(routes=[Route(PATH, put, methods=["POST"])])


@asynccontextmanager
async def serving(plane: CaptureSink, token: str, port: int) -> AsyncIterator[str]:
    """`receiver` on 127.0.0.1, in this event loop; yields its URL. OSError: the port is taken."""
    import uvicorn  # the sink's side runs in policy servers, which serve something else

    config = uvicorn.Config(
        receiver(plane, token), host="127.0.0.1", port=port, log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server.serve())
    try:
        while not server.started and not task.done():  # noqa: ASYNC110  uvicorn has no event
            await asyncio.sleep(0.01)
        if task.done():
            raise OSError(f"port {port} is in use")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


def _refusal(status: int, code: str, detail: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "detail": detail}}, status_code=status)

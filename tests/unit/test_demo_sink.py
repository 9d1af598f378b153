"""A capture row over HTTP is in the trainer's plane when `put` returns, or an error says why."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from participants.data_plane import CAPTURE
from participants.memory_data_plane import MemoryDataPlane
from quiesce.demo.sink import PATH, HttpSink, receiver

TOKEN = "secret"


def through(
    transport: httpx.AsyncBaseTransport,
    act: Callable[[HttpSink], Awaitable[None]],
    token: str = TOKEN,
) -> None:
    async def main() -> None:
        sink = HttpSink("http://trainer", token, inner=transport)
        try:
            await act(sink)
        finally:
            await sink.close()

    asyncio.run(main())


def served(plane: MemoryDataPlane) -> httpx.ASGITransport:
    return httpx.ASGITransport(receiver(plane, TOKEN))


def test_a_row_arrives_whole() -> None:
    plane = MemoryDataPlane()
    row = {"token_ids": [1, 2], "logprobs": [-0.5, -1.25], "version": 3}
    through(served(plane), lambda sink: sink.put("p0_g0/call-1", row))
    assert asyncio.run(plane.get_rows(CAPTURE, ["p0_g0/call-1"])) == {"p0_g0/call-1": row}


def test_a_wrong_token_changes_nothing() -> None:
    plane = MemoryDataPlane()
    with pytest.raises(OSError, match=r"p0_g0/call-1 was refused: 401 .*bearer token"):
        through(served(plane), lambda sink: sink.put("p0_g0/call-1", {"x": 1}), token="wrong")
    assert plane.calls == 0


@pytest.mark.parametrize("row", [{}, {"x": None}, {"x": [[1], [1, 2]]}])
def test_what_is_no_row_is_refused_by_name(row: Any) -> None:
    plane = MemoryDataPlane()
    with pytest.raises(OSError, match=r"refused: 400 .*not a capture row.*p0_g0/call-1"):
        through(served(plane), lambda sink: sink.put("p0_g0/call-1", row))


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"key": "k"}'])
def test_a_bad_body_is_a_400(body: bytes) -> None:
    async def main() -> int:
        transport = served(MemoryDataPlane())
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            return (await http.post(PATH, content=body, headers=headers)).status_code

    assert asyncio.run(main()) == 400


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(httpx.ReadTimeout("late"), TimeoutError), (httpx.ConnectError("nobody"), ConnectionError)],
)
def test_a_trainer_that_is_away_is_an_os_error(failure: Exception, raised: type[OSError]) -> None:
    def away(_: httpx.Request) -> httpx.Response:
        raise failure

    with pytest.raises(raised, match="capture row k: "):
        through(httpx.MockTransport(away), lambda sink: sink.put("k", {"x": 1}))

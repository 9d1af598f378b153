"""GymClient: what it sends, and what becomes of each kind of answer and failure."""

from __future__ import annotations

import json
import pickle
from typing import Any

import httpx
import pytest

from fsm import strict
from fsm.outcome import NotReleased, Refused, SnapshotRejected, Unavailable
from participants.gym import wire
from participants.gym.client import GymClient, GymServer, past_failures, together
from participants.gym.fake import TOKEN, FakeGym, Fault
from tests.gym_support import control, prepare, release, run

SERVER = GymServer("agent", "a0", "http://a0")


def client_of(gym: FakeGym) -> GymClient:
    return GymClient(gym.servers, TOKEN, transport=gym, retry_pauses_s=(0.0, 0.0))


def answering(status: int, content: bytes) -> GymClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    return GymClient([SERVER], TOKEN, transport=transport)


def test_a_message_is_sent_whole_with_the_token() -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"phase": "closing"})

    async def main() -> None:
        client = GymClient([SERVER], TOKEN, transport=httpx.MockTransport(handle))
        report = await client.prepare(SERVER, prepare())
        assert report.phase == "closing"

    run(main)
    (request,) = seen
    assert str(request.url) == "http://a0/ng-control/v1/checkpoint/prepare"
    assert request.headers["authorization"] == f"Bearer {TOKEN}"
    assert strict.read(wire.Prepare, json.loads(request.content), "body") == prepare()


@pytest.mark.parametrize(
    "operation",
    ["status", "prepare", "drain", "renew", "commit", "fence", "restore", "discard", "resume"],
)
def test_every_operation_has_its_own_route(operation: str) -> None:
    paths: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(200, json={"phase": "open"})

    async def main() -> None:
        client = GymClient([SERVER], TOKEN, transport=httpx.MockTransport(handle))
        await getattr(client, operation)(SERVER, wire.Control(**control()))

    run(main)
    assert paths == [f"/ng-control/v1/checkpoint/{operation}"]


def test_an_error_body_is_a_refusal_that_names_the_server() -> None:
    body = b'{"error": {"code": "stale_fence", "detail": "a newer attempt is known"}}'

    async def main() -> None:
        with pytest.raises(Refused, match=r"agent server 'a0'.*a newer attempt") as caught:
            await answering(409, body).prepare(SERVER, prepare())
        assert caught.value.code == wire.STALE_FENCE

    run(main)


@pytest.mark.parametrize(
    ("status", "content", "kind", "words"),
    [
        (404, b"Not Found", Refused, "no checkpoint participant"),
        (500, b"Internal Server Error", Unavailable, "HTTP 500"),
        (502, b'{"error": "text"}', Unavailable, "HTTP 502"),
        (200, b"<html>", Refused, "expected a mapping"),
        (200, b'{"phase": 3}', Refused, "phase"),
        (200, b'{"phase": "open", "extra": 1}', Refused, "extra"),
    ],
)
def test_odd_answers_say_what_came_and_from_whom(
    status: int, content: bytes, kind: type[Refused], words: str
) -> None:
    async def main() -> None:
        with pytest.raises(kind, match=words) as caught:
            await answering(status, content).prepare(SERVER, prepare())
        assert "a0" in str(caught.value)

    run(main)


def test_a_wrong_token_is_refused_by_code() -> None:
    async def main() -> None:
        gym = FakeGym(("agent", "a0"))
        client = GymClient(gym.servers, "another", transport=gym)
        with pytest.raises(Refused) as caught:
            await client.prepare(gym.servers[0], prepare())
        assert caught.value.code == wire.UNAUTHORIZED
        assert gym["a0"].phase == "open"

    run(main)


def test_a_lost_answer_is_asked_for_again_and_done_once() -> None:
    async def main() -> None:
        gym = FakeGym(("agent", "a0"))
        gym["a0"].faults.append(Fault("prepare", "lose", times=2))
        report = await client_of(gym).prepare(gym.servers[0], prepare())
        assert report.phase == "closing"
        assert gym.log == [("a0", "prepare")] * 3

    run(main)


def test_retries_are_bounded() -> None:
    async def main() -> None:
        gym = FakeGym(("agent", "a0"))
        gym["a0"].faults.append(Fault("prepare", "lose", times=99))
        with pytest.raises(Unavailable, match=r"a0.*could not be reached"):
            await client_of(gym).prepare(gym.servers[0], prepare())
        assert len(gym.log) == 3

    run(main)


def test_a_silent_server_is_unavailable_at_the_deadline() -> None:
    async def main() -> None:
        gym = FakeGym(("agent", "a0"))
        gym["a0"].faults.append(Fault("resume", "late"))
        with pytest.raises(Unavailable, match=r"a0.*did not answer.*resume within 0.01 s"):
            await client_of(gym).resume(gym.servers[0], release(timeout_s=0.01))

    run(main)


def test_a_run_is_sent_once_and_not_again() -> None:
    request = wire.RunRequest(
        rollout_id="p7_g2", attempt_index=1, incarnation=3, lineage=0, expect="continuation"
    )

    async def main() -> None:
        gym = FakeGym(("agent", "a0"))
        reply = await client_of(gym).run(gym.servers[0], request)
        assert (reply.rollout_id, reply.attempt_index) == ("p7_g2", 1)
        assert gym["a0"].received == [request]
        gym["a0"].faults.append(Fault("run", "lose"))
        with pytest.raises(Unavailable, match="/run"):
            await client_of(gym).run(gym.servers[0], request)
        assert len(gym.log) == 2

    run(main)


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ([SERVER, GymServer("policy", "a0", "http://p0")], "two Gym servers are called 'a0'"),
        ([GymServer("judge", "j", "http://j")], "its kind must be one of"),  # type: ignore[arg-type]
        ([GymServer("agent", "a0", "http://a0/")], "without a slash"),
    ],
)
def test_a_bad_list_of_servers_is_a_wrong_call(servers: list[GymServer], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GymClient(servers, TOKEN)


def test_together_raises_the_first_failure_and_ends_the_others() -> None:
    ended: list[str] = []

    async def waits() -> None:
        import asyncio

        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def fails() -> None:
        raise Refused("busy", "b")

    async def main() -> None:
        with pytest.raises(Refused, match="busy: b"):
            await together({"a": waits(), "b": fails()})

    run(main)
    assert ended == ["waits"]


def test_past_failures_goes_on_and_raises_bugs() -> None:
    done: list[str] = []

    async def fails() -> None:
        raise Refused("busy")

    async def works() -> None:
        done.append("works")

    async def breaks() -> None:
        raise KeyError("a bug")

    async def main() -> None:
        failed = await past_failures({"a": fails(), "b": works()})
        assert list(failed) == ["a"]
        with pytest.raises(KeyError):
            await past_failures({"a": breaks()})

    run(main)
    assert done == ["works"]


@pytest.mark.parametrize(
    "error",
    [
        Refused("busy", "a0 works"),
        Refused(code="busy", detail="a0 works"),
        Unavailable("a0 is away"),
        NotReleased(frozenset({"a0", "p0"})),
        NotReleased(names=frozenset({"a0"}), detail="silent"),
        SnapshotRejected("snapshot_1", "manifest.json", "is not there"),
    ],
)
def test_errors_cross_a_process_border_whole(error: Exception) -> None:
    copy: Any = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__

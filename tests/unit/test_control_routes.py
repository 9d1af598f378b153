"""The control routes: tokens, methods, bodies. Bad input is named, and changes nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from fsm import strict
from participants.gym import wire
from participants.gym.servers.serve import PORT_IN_USE, listening, serve
from tests.gym_world import KINDS, World, code, fence, prepare, send

OPERATIONS = (
    "status", "prepare", "drain", "renew", "commit", "fence", "restore", "discard", "resume",
    "rollback",
)  # fmt: skip
ROUTES = [*(f"{wire.CHECKPOINT}/{name}" for name in OPERATIONS), wire.CAPABILITIES]
ROUTES += [wire.ACKNOWLEDGE, wire.RETIRE, f"{wire.PREFIX}/unknown", wire.PREFIX]
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW")


def run(root: Any, main: Any) -> None:
    asyncio.run(main(World(root)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_route_and_method_needs_the_token(tmp_path, kind):
    async def main(world):
        wrong = [
            [],
            [("authorization", "Bearer wrong")],
            [("authorization", "Bearer ")],
            [("authorization", "secret")],
            [("authorization", "Bearer gehörtmir".encode())],
            [("authorization", "Bearer secret"), ("authorization", "Bearer secret")],
        ]
        client = world.clients[kind]
        del client.headers["authorization"]
        for route in ROUTES:
            for method in METHODS:
                for headers in wrong if method == "POST" else wrong[:1]:
                    answer = await client.request(method, route, headers=headers)
                    assert answer.status_code == 401, (method, route, headers)
        assert world.servers[kind].gate.phase == "open"

    run(tmp_path, main)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_route_is_404(tmp_path, kind):
    async def main(world):
        for route in ROUTES:
            for method in METHODS:
                expected = "GET" if route == wire.CAPABILITIES else "POST"
                if method not in {expected, "HEAD"}:
                    answer = await world.clients[kind].request(method, route)
                    assert code(answer) == (404, wire.NO_ROUTE), (method, route)

    run(tmp_path, main)


GOOD = strict.write(prepare(fence(1)))
TEXT = json.dumps(GOOD)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        TEXT.replace("60.0", "NaN").encode(),
        TEXT.replace("60.0", "Infinity").encode(),
        TEXT.replace("60.0", "1e999").encode(),
        TEXT.replace("60.0", "-1").encode(),
        TEXT.replace("60.0", "1e9").encode(),
        TEXT.replace("60.0", '"60"').encode(),
        TEXT.replace("60.0", "true").encode(),
        TEXT.replace("60.0", "9" * 5000).encode(),
        TEXT.replace('"label"', '"lease_s": 1, "label"').encode(),
        TEXT.replace('"calls"', '"some"').encode(),
        TEXT.replace('"sequence": 1', '"sequence": -1').encode(),
        TEXT.replace('"root": "root"', '"root": ""').encode(),
        TEXT.replace('"schema_version": 1', '"schema_version": 2').encode(),
        json.dumps(GOOD | {"extra": 1}).encode(),
        json.dumps({k: v for k, v in GOOD.items() if k != "fence"}).encode(),
    ],
)
def test_bad_bodies_are_400_and_change_nothing(tmp_path, body):
    async def main(world):
        for kind in KINDS:
            answer = await world.clients[kind].post(f"{wire.CHECKPOINT}/prepare", content=body)
            assert code(answer) == (400, wire.BAD_REQUEST)
            assert answer.json()["error"]["detail"]
            gate = world.servers[kind].gate
            assert (gate.phase, gate.fence) == ("open", None)

    run(tmp_path, main)


def test_a_body_that_is_too_large_is_413(tmp_path):
    async def main(world):
        sent = 0

        async def endless():
            nonlocal sent
            while True:
                sent += 1
                yield b" " * 65536

        answer = await world.clients["agent"].post(f"{wire.CHECKPOINT}/prepare", content=endless())
        assert code(answer) == (413, wire.TOO_LARGE)
        assert sent < 40

    run(tmp_path, main)


@pytest.mark.parametrize(
    "folder",
    ["", ".", "..", "../x", "/etc", "snapshot_000001-000001/..", "tmp_000001-000001_abcdef01\n",
     "tmp_000001-000001_abcdef01/x", "a\x00b", "\ud800", "~root"],
)  # fmt: skip
def test_folders_are_ids_and_never_paths(tmp_path, folder):
    async def main(world):
        (tmp_path / "inside").mkdir()
        world.agent.gate._root = tmp_path / "inside"
        await world.close(fence(1))
        body = strict.write(wire.Commit(fence=fence(1), label="", timeout_s=9.0, folder=folder))
        answer = await world.clients["agent"].post(
            f"{wire.CHECKPOINT}/commit", content=json.dumps(body)
        )
        assert code(answer) == (400, wire.BAD_REQUEST)
        assert [path.name for path in tmp_path.rglob("*")] == ["inside"]
        await world.release(fence(1))

    run(tmp_path, main)


def test_bad_rollout_ids_are_named(tmp_path):
    async def main(world):
        message = wire.Retire(rollouts=("p1", "../p2"))
        for kind in KINDS:
            answer = await send(world.clients[kind], wire.RETIRE, message)
            assert code(answer) == (400, wire.BAD_REQUEST)

    run(tmp_path, main)


@pytest.mark.parametrize("kind", KINDS)
def test_capabilities_say_what_the_server_is(tmp_path, kind):
    async def main(world):
        answer = await world.clients[kind].get(wire.CAPABILITIES)
        said = strict.read(wire.Capabilities, answer.json(), "capabilities")
        name = {"agent": "agent0", "policy": "policy0", "resource": "tools"}[kind]
        assert (said.kind, said.name, said.mode) == (kind, name, "export")
        assert (said.num_workers, said.phase, said.live_runs) == (1, "open", 0)
        assert said.instance != World(tmp_path).servers[kind].capabilities().instance

    run(tmp_path, main)


def test_other_paths_go_to_the_server_itself(tmp_path):
    async def main(world):
        assert code(await world.clients["agent"].get("/")) == (404, wire.NO_ROUTE)
        assert (await world.clients["resource"].get("/nothing")).status_code == 404
        near = await world.clients["resource"].post(f"{wire.PREFIX}x/capabilities")
        assert near.text == "Not Found"

    run(tmp_path, main)


def test_no_token_no_server(tmp_path):
    from participants.gym.servers.resource import ResourceServer

    with pytest.raises(ValueError, match="need a token"):
        ResourceServer("tools", None, root=tmp_path, token="")


def test_a_port_in_use_is_one_line_and_an_exit_code(capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            serve(None, "127.0.0.1", port)
    assert ended.value.code == PORT_IN_USE
    assert capsys.readouterr().err.count("\n") == 1


def test_a_server_does_not_wait_before_it_sends_the_end_of_an_answer() -> None:
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

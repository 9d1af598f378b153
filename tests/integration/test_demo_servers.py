"""The entry points as real processes: they listen, they play a rollout, they say what is wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from fsm.strict import read, write
from participants.gym import wire
from quiesce.demo.frozenlake import turns_of
from quiesce.demo.servers import TOKEN

pytestmark = pytest.mark.slow
SECRET = {"Authorization": "Bearer secret"}


@contextmanager
def process(module: str, port: int, *arguments: str) -> Iterator[str]:
    """A server that answers (anything) at its port; ended by SIGTERM."""
    command = [sys.executable, "-m", module, *arguments, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=os.environ | {TOKEN: "secret"}) as server:
        try:
            deadline = time.monotonic() + 60
            while not _answers(url):
                assert server.poll() is None, f"{module} ended with {server.returncode}"
                assert time.monotonic() < deadline, f"{module} does not answer"
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=1.0)
    except httpx.TransportError:
        time.sleep(0.05)
        return False
    return True


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [one.getsockname()[1] for one in sockets]


def test_a_rollout_through_four_processes(tmp_path: Path) -> None:
    ports = free_ports(5)
    root, module = ("--root", str(tmp_path)), "quiesce.demo.servers"
    effects = ("--effects", str(tmp_path / "effects.jsonl"))
    with ExitStack() as stack:
        model = stack.enter_context(process("quiesce.demo.scripted", ports[0]))
        sink = (
            f"memory:{stack.enter_context(process('tests.integration.capture_receiver', ports[1]))}"
        )
        upstream = ("--upstream", model, "--sink", sink)
        policy = stack.enter_context(process(module, ports[2], "policy", *root, *upstream))
        tools = stack.enter_context(process(module, ports[3], "resource", *root, *effects))
        others = ("--policy", policy, "--tools", tools)
        agent = stack.enter_context(process(module, ports[4], "agent", *root, *others))
        request = wire.RunRequest(
            rollout_id="p0_g0",
            attempt_index=0,
            incarnation=1,
            lineage=0,
            expect="fresh",
            task={"seed": 3},
        )
        answer = httpx.post(f"{agent}/run", json=write(request), headers=SECRET, timeout=60)
        reply = read(wire.RunReply, answer.raise_for_status().json(), "the reply")
        assert reply.error is None
        assert reply.turns == len(reply.rows) == turns_of(3)
        assert httpx.get(f"{model}/calls").json() == {"calls": reply.turns}


def test_a_port_in_use_is_one_clear_message(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "quiesce.demo.servers", "resource", "--port", port]
        second = subprocess.run(
            [*command, "--root", str(tmp_path), "--effects", str(tmp_path / "effects")],
            env=os.environ | {TOKEN: "secret"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert second.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert "Traceback" not in second.stderr

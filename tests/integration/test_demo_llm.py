"""The real language model, as a process: legal answers, token ids, logprobs; clear errors."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from quiesce.demo import llm
from quiesce.demo.loop import MOVES, SCHEMA, SYSTEM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(llm.missing() is not None, reason=str(llm.missing())),
]

BODY = {
    "messages": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "AFF\nFHF\nFFG\nLast moves: none.\nYour move?"},
    ],
    "response_format": {"type": "json_schema", "json_schema": {"name": "move", "schema": SCHEMA}},
    "max_tokens": 32,
    "temperature": 1.0,
    "logprobs": True,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "quiesce.demo.llm", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready, _, address = server.stdout.readline().strip().partition(" ")
        assert ready == "ready"
        yield address
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0


@pytest.mark.parametrize("seed", range(4))
def test_it_answers_with_a_legal_move_token_ids_and_logprobs(url: str, seed: int) -> None:
    reply = httpx.post(f"{url}/v1/chat/completions", json={**BODY, "seed": seed}, timeout=60)
    choice = reply.raise_for_status().json()["choices"][0]
    content = choice["message"]["content"]
    tokens = choice["logprobs"]["content"]
    assert any(f'"{move}"' in content for move in MOVES)
    assert "".join(token["token"] for token in tokens).strip() == content.strip()
    assert all(isinstance(token["id"], int) and 0 <= token["id"] < 49_152 for token in tokens)
    assert all(math.isfinite(token["logprob"]) and token["logprob"] <= 0 for token in tokens)


def test_it_listens_on_loopback_and_is_healthy(url: str) -> None:
    assert url.startswith("http://127.0.0.1:")
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_a_port_in_use_is_one_clear_message(url: str) -> None:
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "quiesce.demo.llm", "--port", port]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert f"no model server on 127.0.0.1:{port}; is the port in use?" in second.stderr
    assert "Traceback" not in second.stderr

"""The entry points: what they build, and what they say when they can't start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="the demo's lake is Gymnasium's (extra demo)")
pytest.importorskip("uvicorn", reason="the servers run on uvicorn (extra server)")

from quiesce.demo import servers
from quiesce.demo.sink import HttpSink

ARGUMENTS = {
    "agent": ["--policy", "http://127.0.0.1:1", "--tools", "http://127.0.0.1:2"],
    "policy": ["--upstream", "http://127.0.0.1:3", "--sink", "memory:http://127.0.0.1:4"],
    "resource": ["--effects", "effects.jsonl"],
}


def command(kind: str, root: Path, *more: str) -> list[str]:
    return [kind, "--port", "1234", "--root", str(root), *ARGUMENTS[kind], *more]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """What `serve` was called with, instead of serving."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(servers.TOKEN, "secret")
    monkeypatch.setattr(servers, "serve", lambda *given: calls.append(given))
    return calls


@pytest.mark.parametrize("kind", sorted(servers.KINDS))
def test_each_kind_serves_on_loopback(kind: str, served: list[Any], tmp_path: Path) -> None:
    servers.main(command(kind, tmp_path))
    assert [(host, port) for _, host, port in served] == [("127.0.0.1", 1234)]


def test_the_token_is_needed(
    served: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(servers.TOKEN)
    with pytest.raises(SystemExit, match="2"):
        servers.main(command("resource", tmp_path))
    said = "tools: set QUIESCE_TOKEN to the bearer token that all servers share\n"
    assert capsys.readouterr().err == said
    assert not served


def test_what_can_not_start_says_so_in_one_line(
    served: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        servers.main(command("policy", tmp_path, "--sink", "nowhere"))
    said = capsys.readouterr().err
    assert "--sink must be memory:URL or tq:HOST:PORT, not 'nowhere'" in said
    assert said.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        servers.main(command("resource", tmp_path, "--effects", str(tmp_path / "no" / "log")))
    assert "tools: the resource server can't start" in capsys.readouterr().err
    assert not served


def test_sinks_are_named_by_scheme() -> None:
    assert isinstance(servers.sink_at("memory:http://127.0.0.1:1", "secret"), HttpSink)
    for bad in ("", "memory:", "tq:", "http://127.0.0.1:1"):
        with pytest.raises(ValueError, match="--sink must be"):
            servers.sink_at(bad, "secret")

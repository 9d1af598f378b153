"""The command line: what it shows, and one clear message for each bad input."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsm.config import EngineConfig
from fsm.engine import SnapshotEngine
from fsm.explore import TABLES
from fsm.outcome import Saved
from participants.memory import MemoryParticipant
from quiesce import Engine
from quiesce.cli import main
from storage.store import FolderStore


def saved(root: Path, *, engine: type[SnapshotEngine] = SnapshotEngine, items: int = 2) -> Path:
    """One published snapshot of a participant in memory."""

    async def take() -> str:
        one = MemoryParticipant("sandboxes")
        for number in range(items):
            one.work(f"item {number}")
        taken = engine(EngineConfig(), FolderStore(root), [one])
        outcome = await taken.save()
        await taken.close()
        assert isinstance(outcome, Saved), outcome
        return outcome.snapshot

    return root / asyncio.run(take())


def test_ls_lists_what_is_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    snapshot = saved(root)
    assert main(["ls", str(root)]) == 0
    assert snapshot.name in capsys.readouterr().out
    assert main(["ls", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["id"] == snapshot.name


def test_ls_of_an_empty_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(tmp_path)]) == 0
    assert "no published snapshot" in capsys.readouterr().out


def test_show_says_who_wrote_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = saved(tmp_path / "root")
    assert main(["show", str(snapshot)]) == 0
    shown = capsys.readouterr().out
    assert snapshot.name in shown
    assert "sandboxes (format 1)" in shown
    assert "no plugin here understands it" in shown


def test_verify_reads_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = saved(tmp_path / "root")
    assert main(["verify", str(snapshot)]) == 0
    assert "whole; 1 files" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["manifest.json", "sandboxes/items.jsonl"])
def test_a_flipped_bit_in_any_file_is_named(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = saved(tmp_path / "root")
    path = snapshot / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main(["verify", str(snapshot)]) == 1
    message = capsys.readouterr().err
    assert file in message
    assert message.count("\n") == 1, "one message, no traceback"


def test_a_truncated_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = saved(tmp_path / "root")
    path = snapshot / "manifest.json"
    path.write_bytes(path.read_bytes()[:-10])
    for command in ("show", "verify"):
        assert main([command, str(snapshot)]) == 1
        assert "manifest.json" in capsys.readouterr().err
    assert main(["ls", str(snapshot.parent)]) == 0
    assert "refused" in capsys.readouterr().out


def test_a_snapshot_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "snapshot_000001-000001")]) == 1
    assert "snapshot_000001-000001" in capsys.readouterr().err


def test_status_is_what_the_engine_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = saved(tmp_path / "root", engine=Engine)
    assert main(["status", str(tmp_path / "root")]) == 0
    said = capsys.readouterr().out
    assert "nothing is going on" in said
    assert snapshot.name in said
    history = (tmp_path / "root" / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in history] == ["saved"]


def test_status_without_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 1
    assert "status.json" in capsys.readouterr().err


@pytest.mark.parametrize("table", ["save", "restore", "hold", "save_release_at_cut"])
def test_diagrams_come_from_the_tables(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagram", table]) == 0
    drawn = capsys.readouterr().out
    assert drawn.startswith("stateDiagram-v2\n")
    assert main(["diagram", table, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| state |")
    if table == "save":
        assert "sealed --> published: ok" in drawn
        assert "sealed --> aborting: claimed" in drawn


def test_check_walks_every_world_and_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--servers", "2", "--faults", "1", "--json"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [*(one.name for one in TABLES), "restore_in_two", "one rollout"]
    assert [one["name"] for one in results] == names
    assert all(one["worlds"] > 1000 and not one["problem"] for one in results)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    snapshot = saved(tmp_path / "root", items=5)
    command = [sys.executable, "-m", "quiesce.cli", "show", str(snapshot), "--json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as shown:
        assert shown.stdout is not None
        assert shown.stderr is not None
        shown.stdout.close()
        assert shown.stderr.read() == b""
        assert shown.wait() == 0

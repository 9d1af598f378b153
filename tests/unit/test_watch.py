"""`status()`, `status.json`, the log line while waiting, `attempts.jsonl`."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from participants.memory import Fault, MemoryParticipant
from participants.virtual_time import run
from quiesce import Attempt, Config, Engine, MemoryStore, Saved
from quiesce.cli import main as cli

CONFIG = Config(prepare_timeout_s=60, lease_s=30, renew_every_s=5)


class Slow(MemoryParticipant):
    """Says whom it waits for."""

    async def drain(self, attempt: Attempt) -> None:
        attempt.waiting_for(["p2_g1", "p3_g0"])
        await super().drain(attempt)


class OnDisk(MemoryStore):
    """In memory, so that time can be virtual; with a folder for what people look at."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root


def engine(root: Path) -> tuple[Engine, Slow]:
    one = Slow("gym")
    return Engine(CONFIG, OnDisk(root), [one]), one


def written(root: Path) -> Any:
    return json.loads((root / "status.json").read_text())


def test_status_says_who_is_waited_for_until_when_and_what_then(tmp_path: Path) -> None:
    async def main() -> None:
        made, one = engine(tmp_path)
        one.fault("drain", Fault.late(20))
        save = asyncio.create_task(made.save())
        await asyncio.sleep(5.5)
        for status in (made.status(), written(tmp_path)):
            now: Any = status["now"]
            assert (now["operation"], now["state"], now["step"]) == ("save", "draining", "drain")
            assert list(now["waiting"]["gym"]) == ["p2_g1", "p3_g0"]
            assert now["then"] == "aborting"
            assert 0 < now["left_s"] < 60
        assert isinstance(await save, Saved)
        assert written(tmp_path)["now"] is None
        assert written(tmp_path)["last"]["outcome"] == "saved"

    run(main())


def test_the_log_says_every_ten_seconds_who_is_still_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        made, one = engine(tmp_path)
        one.fault("drain", Fault.late(35))
        await made.save()

    with caplog.at_level(logging.WARNING, "quiesce"):
        run(main())
    lines = [r.getMessage() for r in caplog.records if "still" in r.getMessage()]
    assert len(lines) == 3
    assert lines[0] == (
        "save-1-1: still in 'drain' after 10 s, waiting for gym (p2_g1, p3_g0); in 50 s: aborting"
    )


def test_staying_paused_is_said_for_as_long_as_it_lasts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        made, _ = engine(tmp_path)
        await made.save(then="stay_paused")
        await asyncio.sleep(25.5)
        assert written(tmp_path)["now"]["state"] == "staying"
        assert cli(["status", str(tmp_path)]) == 0
        await made.let_go()
        await asyncio.sleep(2)
        assert written(tmp_path)["now"] is None

    run(main())
    assert "everyone is paused until Engine.let_go()" in caplog.text
    assert "staying (stay)" in capsys.readouterr().out


def test_history_has_a_line_for_each_outcome(tmp_path: Path) -> None:
    async def main() -> None:
        made, one = engine(tmp_path)
        await made.save()
        one.fault("commit", Fault.refuse("busy"))
        await made.save()
        with made.hold_off("evaluation"):
            await made.save()
        await made.restore()
        await made.restore(until="gym_restored")

    run(main())
    history = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert [one["outcome"] for one in history] == [
        "saved", "aborted", "skipped", "restored", "handed_over",
    ]  # fmt: skip
    assert (history[1]["reason"], history[1]["code"]) == ("refused", "busy")
    assert history[2]["reason"] == "held_off"


def test_after_a_hand_over_the_status_is_the_other_processs(tmp_path: Path) -> None:
    async def main() -> None:
        first, one = engine(tmp_path)
        await first.save()
        token = await first.restore(until="gym_restored")
        disk = first.store.disk  # type: ignore[attr-defined]
        store = OnDisk(tmp_path)
        store.disk = disk
        second = Engine(CONFIG, store, [one])
        await second.restore(token)
        after = written(tmp_path)
        assert after["last"]["outcome"] == "restored"
        await asyncio.sleep(5)
        await first.let_go()
        await asyncio.sleep(5)
        assert written(tmp_path) == after

    run(main())


def test_a_folder_that_cannot_be_written_stops_no_save(tmp_path: Path) -> None:
    async def main() -> None:
        made, _ = engine(tmp_path / "root")
        (tmp_path / "root").mkdir()
        (tmp_path / "root" / "status.json").mkdir()
        assert isinstance(await made.save(), Saved)

    run(main())


def test_a_history_that_cannot_be_written_stops_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S9: on a full disk the outcome is still an answer; it is in the log instead."""
    (tmp_path / "attempts.jsonl").symlink_to("/dev/full")

    async def main() -> None:
        made, _ = engine(tmp_path)
        assert isinstance(await made.save(), Saved)

    run(main())
    assert "cannot write attempts.jsonl" in caplog.text
    assert '"outcome": "saved"' in caplog.text


def test_a_line_of_the_history_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    history = tmp_path / "attempts.jsonl"
    history.write_text("{}\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def main() -> None:
        made, _ = engine(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (history.stat().st_size + 10, hard))
        try:
            assert isinstance(await made.save(), Saved)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert history.read_text() == "{}\n"
        assert isinstance(await made.save(), Saved)

    run(main())
    first, second = map(json.loads, history.read_text().splitlines())
    assert (first, second["outcome"]) == ({}, "saved")


def test_status_of_a_process_that_died_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it was doing is still in the file; somebody has to know that nobody does it."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()

    async def main() -> None:
        made, one = engine(tmp_path)
        one.fault("drain", Fault.late(20))
        save = asyncio.create_task(made.save())
        await asyncio.sleep(5)
        status = written(tmp_path)
        await save
        assert cli(["status", str(tmp_path)]) == 0
        assert "gone" not in capsys.readouterr().out
        (tmp_path / "status.json").write_text(json.dumps(status | {"pid": child.pid}))
        assert cli(["status", str(tmp_path)]) == 0

    run(main())
    told = capsys.readouterr().out
    assert "draining (drain)" in told
    assert f"by process {child.pid} on" in told
    assert "which is gone: holds end with their leases" in told

"""The demo as a test: real processes, SIGKILL, restore, audit. Without Ray it is part of the fast
suite; with Ray and TransferQueue it is slow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quiesce.demo.sabotage import KINDS

LIMIT_S = 300


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quiesce.demo", "--policy", "scripted", "--plain"]
    command += ["--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quiesce.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def assert_whole(ran: subprocess.CompletedProcess[str], folder: Path, crashes: int) -> None:
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "every invariant holds" in ran.stdout
    assert ran.stdout.count("SIGKILL) killed") == crashes
    assert len(re.findall(r"continues after call-\d+", ran.stdout)) >= 1
    snapshots = sorted((folder / "snapshots").glob("snapshot_*"))
    assert snapshots
    for snapshot in snapshots:
        verified = cli("verify", str(snapshot))
        assert verified.returncode == 0, verified.stderr
    assert not list((folder / "snapshots").glob("tmp_*"))


@pytest.mark.timeout(LIMIT_S)
def test_rollouts_survive_a_kill_of_everything(tmp_path: Path) -> None:
    ran = demo(tmp_path, "--data-plane", "memory", "--crashes", "1", "--rollouts", "8")
    assert_whole(ran, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_same_on_real_ray_and_transfer_queue(tmp_path: Path) -> None:
    ran = demo(tmp_path, "--crashes", "2", "--seed", "7")
    assert_whole(ran, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("kind", KINDS)
def test_every_sabotage_is_noticed_by_name(kind: str, tmp_path: Path) -> None:
    ran = demo(
        tmp_path,
        *("--data-plane", "memory", "--rollouts", "8", "--delay-s", "0.1"),
        *("--interval-s", "0.5", "--crashes", "1" if KINDS[kind].when == "restore" else "0"),
        *("--sabotage", kind),
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    for word in KINDS[kind].words:
        assert word in ran.stdout, ran.stdout

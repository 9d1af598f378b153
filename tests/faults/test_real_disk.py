"""The snapshot root of a running demo fills up, or takes no more folders, and recovers.

Attempts fail as data, rollouts go on meanwhile, later attempts succeed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="the demo's lake is Gymnasium's (extra demo)")

from quiesce.demo.effects import read_effects
from tests.faults.test_real_processes import LIMIT_S, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]
NEEDS_ROOT = "needs root, to mount a file system and to forbid new folders"


def administer(*command: str) -> None:
    """Skips the test where this is not allowed."""
    if os.geteuid() != 0 or shutil.which(command[0]) is None:
        pytest.skip(NEEDS_ROOT)
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        pytest.skip(f"{NEEDS_ROOT}: {ran.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[World]:
    """A world whose snapshots are on a file system of 4 MB."""
    world = World(tmp_path)
    administer("mount", "-t", "tmpfs", "-o", "size=4m", "quiesce", str(world.root))
    try:
        yield world
    finally:
        world.stop()
        subprocess.run(["umount", str(world.root)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"\0" * 4096)


def turns(world: World) -> int:
    return len(read_effects(world.demo.places.effects))


def goes_on(world: World) -> None:
    """Tool calls of several turns come in from now on."""
    before = turns(world)
    world.until(lambda: turns(world) > before + 20, "more turns")


def test_a_full_disk_costs_attempts_and_nothing_else(small_disk: World) -> None:
    world = small_disk
    world.start()
    world.saves_again()
    snapshots, ballast = sorted(world.root.glob("snapshot_*")), world.root / "ballast"
    world.stop_at("save.prepare.early")
    fill(ballast)
    world.go_on()
    goes_on(world)
    world.until(lambda: world.log("trainer").count("cannot write attempts.jsonl") > 1, "failures")
    assert sorted(world.root.glob("snapshot_*"))[-1] >= snapshots[-1]
    ballast.unlink()
    world.saves_again()
    world.finish()


def test_a_root_that_takes_no_more_folders(small_disk: World) -> None:
    world = small_disk
    world.start()
    world.saves_again()
    world.stop_at("save.prepare.early")
    administer("chattr", "+i", str(world.root))
    try:
        known = len(world.outcomes())
        world.go_on()
        world.until_more_than(known + 2)
        assert "saved" not in world.outcomes()[known:]
        goes_on(world)
    finally:
        administer("chattr", "-i", str(world.root))
    world.saves_again()
    world.finish()

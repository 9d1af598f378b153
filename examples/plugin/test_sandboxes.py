"""The conformance suite on real sandbox processes, and what only this participant does."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Coroutine
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from quiesce_sandboxes import Sandboxes
from quiesce_sandboxes.pool import SandboxPool

from quiesce import (
    Attempt,
    Config,
    Engine,
    FolderStore,
    MemoryParticipant,
    Participant,
    Restore,
    Saved,
    SnapshotRejected,
)
from quiesce.testing import IN_PROCESS, Conformance


class TestSandboxes(Conformance):
    no_lease = no_fence = IN_PROCESS  # the pool lives in the trainer's process
    pools = 0

    async def make(self) -> Sandboxes:
        self.pools += 1
        return Sandboxes(SandboxPool(self.folder / f"pool{self.pools}"))

    async def work(self, one: Sandboxes, number: int) -> None:
        session = f"p{number % 2}_g0"
        await one.pool.run(session, "CREATE TABLE IF NOT EXISTS done (number INTEGER)")
        await one.pool.run(session, "INSERT INTO done VALUES (?)", number)

    async def observe(self, one: Sandboxes) -> Any:
        read = "SELECT number FROM done ORDER BY number"
        sandboxes = one.pool._sandboxes
        return {name: await sandbox.call(read) for name, sandbox in sandboxes.items()}

    async def is_held(self, one: Sandboxes) -> bool:
        return one.pool.is_closed

    async def close(self, one: Sandboxes) -> None:
        await one.pool.kill()


class Gym(MemoryParticipant):
    """Gym could not save one rollout: it starts over."""

    async def commit(self, attempt: Attempt) -> Any:
        return {**await super().commit(attempt), "restarts": {"p1_g0": "not_parked"}}


class Controller(Participant):
    """The join knows nothing of one rollout."""

    name, restore_step = "controller", "load_controller"

    async def restore(self, restore: Restore) -> dict[str, Any]:
        return {"discard": ["p2_g0"]}


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


class Alone(Sandboxes):
    """Without Gym, so that all that is in the snapshot is its own."""

    called_by = frozenset[str]()


def engine_of(root: Path, one: Sandboxes) -> Engine:
    others = [] if isinstance(one, Alone) else [Gym("gym"), Controller()]
    return Engine(Config(), FolderStore(root), [one, *others])


async def saved(tmp_path: Path, kind: type[Sandboxes] = Sandboxes) -> Path:
    one = kind(SandboxPool(tmp_path / "pool"))
    for session in ("p0_g0", "p1_g0", "p2_g0"):
        await one.pool.run(session, "CREATE TABLE t (x)")
    engine = engine_of(tmp_path / "root", one)
    outcome = await engine.save()
    await engine.close()
    await one.pool.kill()
    assert isinstance(outcome, Saved), outcome
    return tmp_path / "root" / outcome.snapshot


def test_rollouts_that_start_over_and_those_that_nobody_knows_leave_no_sandbox(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        snapshot = await saved(tmp_path)
        assert sorted(path.stem for path in (snapshot / "sandboxes").glob("*.sqlite")) == [
            "p0_g0",
            "p2_g0",
        ]
        one = Sandboxes(SandboxPool(tmp_path / "fresh"))
        engine = engine_of(tmp_path / "root", one)
        await engine.restore()
        assert one.pool.sessions == ["p0_g0"]
        await engine.close()
        await one.pool.kill()

    run(main())


def test_another_format_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    class Newer(Sandboxes):
        format_version = 2

    async def main() -> None:
        await saved(tmp_path)
        engine = engine_of(tmp_path / "root", Newer(SandboxPool(tmp_path / "fresh")))
        with pytest.raises(SnapshotRejected, match=r"(?s)sandboxes.*1.*2"):
            await engine.restore()
        await engine.close()

    run(main())


@pytest.mark.skipif(
    not entry_points(group="quiesce.participants", name="sandboxes"),
    reason="show and verify find an installed plugin only: pip install -e .",
)
def test_show_and_verify_understand_the_part(tmp_path: Path) -> None:
    snapshots = []

    async def main() -> None:
        snapshots.append(await saved(tmp_path, Alone))

    run(main())
    shown = json.loads(quiesce("show", *snapshots, "--json"))
    assert shown["parts"] == {"sandboxes": {"sandboxes": 3}}
    assert "every sandbox that is named is there: 3" in quiesce("verify", *snapshots)


def quiesce(*arguments: str | Path) -> str:
    program = [sys.executable, "-m", "quiesce.cli", *map(str, arguments)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout

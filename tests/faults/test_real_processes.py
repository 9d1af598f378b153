"""One process of the demo at a time is killed or stopped, at a chosen place of a save or restore.

Real Gym servers and a real trainer, each a process of its own; the trainer stands still at the
place until the fault has happened. Afterwards everyone runs, the run ends, and the audit and
`quiesce verify` find nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gymnasium", reason="the demo's lake is Gymnasium's (extra demo)")

from rich.console import Console

from participants.gym import wire
from quiesce.cli import main as cli
from quiesce.demo.audit import Audit
from quiesce.demo.options import Options
from quiesce.demo.progress import Progress
from quiesce.demo.report import Display
from quiesce.demo.spec import KINDS
from quiesce.demo.supervisor import DemoFailed, Supervisor
from quiesce.watch import HISTORY
from tests.faults.stopping_trainer import STOP, STOPPED

LIMIT_S = 240.0
# Short, so that a test sees leases and deadlines pass.
DEADLINES = {
    "prepare_timeout_s": 3.0,
    "commit_timeout_s": 3.0,
    "resume_timeout_s": 1.0,
    "resume_attempts": 2,
    "lease_s": 3.0,
    "renew_every_s": 0.5,
    "max_consecutive_failures": 1000,
}
SAVE = [
    "save.pause.late",
    "save.prepare.early",
    "save.prepare.late",
    "save.drain.early",
    "save.drain.late",
    "save.commit.early",
    "save.commit.late",
    "save.cut.late",
    "disk.manifest_written",
    "disk.sealed",
    "disk.renamed",
    "save.resume.late",
    "save.resume.early",
]
RESTORE = [
    "restore.fence.early",
    "restore.fence.late",
    "restore.restore.late",
    "restore.restore.early",
    "restore.reconcile.early",
    "restore.reconcile.late",
    "restore.resume.late",
    "restore.resume.early",
]
pytestmark = pytest.mark.timeout(LIMIT_S + 30)


class World:
    """A run of the demo, its processes in the test's hands."""

    def __init__(self, folder: Path, **options: Any) -> None:
        # Long enough to reach the last place on a fast machine too.
        chosen = {"rollouts": 32, "interval_s": 0.2, "delay_s": 0.15} | options
        self.said = io.StringIO()
        self.demo = Supervisor(
            Options(
                policy="scripted", data_plane="memory", plain=True, deadline_s=LIMIT_S, **chosen
            ),
            folder,
            Display(Progress(), Console(file=self.said)),
            engine=DEADLINES,
            trainer="tests.faults.stopping_trainer",
        )
        self.life, self.root = 0, self.demo.places.snapshots
        self._stop, self._stopped = folder / STOP, folder / STOPPED

    def stop(self) -> None:
        """Kill everything; what it said is shown if the test fails."""
        self.demo.stop()
        print(self.said.getvalue())
        for name in ("trainer", *KINDS):
            print(f"-- {name}", self.log(name)[-6000:], sep="\n")

    def log(self, name: str) -> str:
        path = self.demo.places.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def start(self) -> None:
        self.demo.start_model()
        self.demo.start(self.life)

    def stop_at(self, place: str) -> None:
        """Until the trainer stands there."""
        self.want(place)
        self.until_there(place)

    def until_there(self, place: str) -> None:
        self.until(lambda: self.stands_at(place), f"{place} to be reached")

    def want(self, place: str) -> None:
        self._stopped.unlink(missing_ok=True)
        self._stop.write_text(place, encoding="utf-8")

    def stands_at(self, place: str) -> bool:
        return self._stopped.is_file() and self._stopped.read_text(encoding="utf-8") == place

    def go_on(self) -> None:
        self._stop.unlink()

    def kill(self, name: str) -> None:
        self.demo.mortal.kill_one(name)

    def new_trainer(self) -> None:
        self.life += 1
        self.demo.start_trainer(self.life)

    def restored(self) -> None:
        started = self.demo.places.started(self.life)
        self.until(started.is_file, "the restore")

    def restores(self) -> None:
        """A trainer whose restore fails ends; then another one takes its place."""
        try:
            self.restored()
        except DemoFailed:
            assert "RestoreFailed" in self.log("trainer")[-3000:]
            self.demo.mortal.processes.pop("trainer")
            self.new_trainer()
            self.restored()

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """The trainer must not be done before: then there is nothing left to disturb."""
        self.demo.until(lambda: self.ended() or reached(), what)
        assert reached(), f"the run ended before {what}"

    def ended(self) -> bool:
        return self.demo.mortal.exited().get("trainer") == 0

    def saves_again(self) -> None:
        """A snapshot that begins from now on is published."""
        attempts = len(self.outcomes()) + 1  # the one under way may have begun before
        self.until(lambda: "saved" in self.outcomes()[attempts:], "a later attempt to be saved")

    def until_more_than(self, attempts: int) -> None:
        self.until(lambda: len(self.outcomes()) > attempts, "the end of an attempt")

    def outcomes(self) -> list[str]:
        return [one.outcome for one in self.demo.display.progress.snapshots]

    def phases(self) -> dict[str, str]:
        """Of the servers that answer."""
        token = {"Authorization": f"Bearer {self.demo.spec.token}"}
        found = {}
        for name in KINDS:
            url = f"http://127.0.0.1:{self.demo.spec.ports[name]}{wire.CAPABILITIES}"
            try:
                found[name] = httpx.get(url, headers=token, timeout=5.0).json()["phase"]
            except httpx.TransportError:
                continue
        return found

    def everyone_runs(self) -> bool:
        return self.phases() == dict.fromkeys(KINDS, "open")

    def newest(self) -> Path:
        return max(self.root.glob("snapshot_*"))

    def leftovers(self) -> list[str]:
        """Unpublished folders and trash of earlier lives."""
        incarnation = max(path.name[-6:] for path in (self.root / "lineage").glob("incarnation_*"))
        found = [*self.root.glob("tmp_*"), *self.root.glob("trash_*")]
        return [path.name for path in found if f"_{incarnation}-" not in path.name]

    def finish(self) -> Audit:
        """To the end of the run."""
        self.demo.until(self.ended, "the rollouts to finish")
        assert self.everyone_runs(), self.phases()
        assert self.leftovers() == []
        snapshots = sorted(self.root.glob("snapshot_*"))
        assert snapshots
        for snapshot in snapshots:
            assert cli(["verify", str(snapshot)]) == 0
        ended = self.demo.audited()
        assert ended.audit.problems == ()
        return ended.audit


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path)
    try:
        yield one
    finally:
        one.stop()


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


in_two_runs = pytest.mark.parametrize("places", [SAVE[::2], SAVE[1::2]], ids=["even", "odd"])


@pytest.mark.chaos
@in_two_runs
@pytest.mark.parametrize("server", KINDS)
def test_a_server_is_killed_in_a_save(world: World, server: str, places: list[str]) -> None:
    """It comes back empty on its port: that attempt fails or is whole, and a later one is saved."""
    assert len(places) <= 8, "a rollout that started over more often would be dropped"
    world.start()
    for place in places:
        world.stop_at(place)
        world.kill(server)
        world.demo.start_server(server)
        world.until(lambda: server in world.phases(), f"{server} to answer")
        world.go_on()
        world.saves_again()
    world.finish()


@pytest.mark.chaos
@pytest.mark.parametrize("server", KINDS)
def test_a_server_stands_still_through_a_deadline(world: World, server: str) -> None:
    """Its lease ends while it is stopped; messages of the dead attempt wait in its socket."""
    world.start()
    for place in ("save.prepare.early", "save.drain.early", "save.commit.early", "save.cut.late"):
        world.stop_at(place)
        world.demo.mortal.send(server, signal.SIGSTOP)
        known = len(world.outcomes())
        world.go_on()
        world.until_more_than(known)
        assert world.outcomes()[known] == "aborted", place
        world.demo.mortal.send(server, signal.SIGCONT)
        world.saves_again()
    world.finish()


@pytest.mark.chaos
@in_two_runs
def test_the_trainer_is_killed_in_a_save(world: World, places: list[str]) -> None:
    """The Gym servers live on with their holds and runs; the next trainer restores into them."""
    world.start()
    world.saves_again()
    for place in places:
        world.stop_at(place)
        world.kill("trainer")
        world.go_on()
        world.new_trainer()
        world.restored()
        assert world.leftovers() == [], place
        world.saves_again()
    world.finish()


@pytest.mark.chaos
def test_the_trainer_is_killed_before_the_first_snapshot(world: World) -> None:
    """A start from nothing closes the runs that live on in the servers (R4, A9)."""
    world.start()
    for _ in range(2):
        world.stop_at("save.drain.late")
        assert not list(world.root.glob("snapshot_*"))
        world.kill("trainer")
        world.new_trainer()
        world.restored()
    world.go_on()
    world.finish()


@pytest.mark.chaos
def test_the_trainer_is_killed_at_each_place_of_a_restore(world: World) -> None:
    """R5: the snapshot stays as it is, and is what the last restore restores."""
    world.start()
    world.saves_again()
    world.stop_at("save.drain.late")
    world.kill("trainer")
    snapshot = world.newest()
    before = digests(snapshot)
    for place in RESTORE:
        world.want(place)
        world.new_trainer()
        world.until_there(place)
        assert world.leftovers() == [], place
        world.kill("trainer")
        assert digests(snapshot) == before, place
    world.go_on()
    world.new_trainer()
    world.restored()
    history = [json.loads(line) for line in (world.root / HISTORY).read_text().splitlines()]
    restores = [one["snapshot"] for one in history if one["outcome"] == "restored"]
    assert restores[-1] == snapshot.name
    world.finish()


@pytest.mark.chaos
@pytest.mark.parametrize("server", KINDS)
def test_a_server_is_killed_in_a_restore(world: World, server: str) -> None:
    """R1: what one server lost none activates. The restore fails aloud, and the next one works."""
    world.start()
    world.saves_again()
    for place in ("restore.fence.late", "restore.reconcile.late", "restore.resume.late"):
        world.stop_at("save.drain.late")
        world.kill("trainer")
        world.want(place)
        world.new_trainer()
        world.until_there(place)
        world.kill(server)
        world.demo.start_server(server)
        world.until(lambda: server in world.phases(), f"{server} to answer")
        world.go_on()
        world.restores()
        world.saves_again()
    world.finish()


@pytest.mark.chaos
def test_the_trainer_stands_still_until_the_leases_are_over(world: World) -> None:
    """Everyone runs meanwhile, so that its attempt describes no instant any more (S4)."""
    world.start()
    for place in ("save.drain.late", "save.commit.late", "save.cut.late"):
        world.stop_at(place)
        known = len(world.outcomes())
        world.demo.mortal.send("trainer", signal.SIGSTOP)
        world.until(world.everyone_runs, "the leases to end")
        world.demo.mortal.send("trainer", signal.SIGCONT)
        world.go_on()
        world.until_more_than(known)
        assert world.outcomes()[known] == "aborted", place
        world.saves_again()
    world.finish()


def test_holds_end_with_their_leases_when_the_trainer_is_gone(world: World) -> None:
    """Nobody comes to release them: everyone runs all the same (H3)."""
    world.start()
    world.stop_at("save.commit.late")
    world.kill("trainer")
    assert set(world.phases().values()) <= {"held", "committed", "open"}
    world.demo.until(world.everyone_runs, "the leases to end")
    world.go_on()
    world.new_trainer()
    world.restored()
    world.finish()

"""Runs the demo: starts the processes, kills them all at chosen instants, starts them again, and
audits what is left. It holds no state of the rollouts: what survives is on the disk."""

from __future__ import annotations

import json
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from quiesce.demo import sabotage
from quiesce.demo.audit import Audit, Evidence, Finish, audit
from quiesce.demo.effects import read_effects
from quiesce.demo.events import Follow
from quiesce.demo.options import Options
from quiesce.demo.processes import Group, free_ports
from quiesce.demo.progress import Progress
from quiesce.demo.report import Display
from quiesce.demo.spec import KINDS, Places, Spec
from quiesce.watch import HISTORY, STATUS

LOOK_EVERY_S = 0.1
START_TIMEOUT_S = 180.0


class DemoFailed(Exception):
    """The demo could not be run to its end; says which process, and what it said last."""


@frozen
class Ended:
    """What a finished demo leaves: the audit, and the rows of each rollout."""

    audit: Audit
    rows: dict[str, dict[str, int]]


class Supervisor:
    """One run of the demo, in `folder`, which is kept.

    engine: configuration that differs from the demo's. trainer: the module of its process. `run`
    does it all; for other stories its parts start and stop processes one by one.
    """

    def __init__(
        self,
        options: Options,
        folder: Path,
        display: Display,
        *,
        engine: Mapping[str, Any] | None = None,
        trainer: str = "quiesce.demo.trainer",
    ) -> None:
        self.options, self.display, self._trainer = options, display, trainer
        self.places = Places(folder)
        self.places.make()
        self._random = random.Random(options.seed)
        self._ray_folder = Path(tempfile.mkdtemp(prefix="quiesce-ray-"))
        self._env = _environment()
        upstream, policy, agent, tools, sink = free_ports(5)
        self.spec = Spec(
            options=options,
            folder=str(folder),
            ray_folder=str(self._ray_folder),
            token=secrets.token_hex(16),
            engine=dict(engine or {}),
            ports={"upstream": upstream, "policy": policy, "agent": agent, "tools": tools}
            | {"sink": sink},
        )
        self.spec.write(self.places.spec)
        self._lasting = Group(self.places.logs)  # the model: it stands for the vLLM fleet
        self.mortal = Group(self.places.logs)
        self._events = Follow(self.places.events)
        self._history = Follow(self.places.snapshots / HISTORY)
        self._deadline = time.monotonic() + options.deadline_s
        self._saved_at_start = 0

    def run(self) -> Ended:
        """To the end. Raises DemoFailed; whatever happens, nothing that it started stays."""
        try:
            self.start_model()
            for life in range(self.options.crashes + 1):
                self._live(life)
            return self.audited()
        finally:
            self.stop()

    def stop(self) -> None:
        """Kill everything that was started."""
        self.mortal.kill()
        self._lasting.kill()
        shutil.rmtree(self._ray_folder, ignore_errors=True)

    # -- one life ------------------------------------------------------------------------------

    def _live(self, life: int) -> None:
        begun = time.monotonic()
        self.follow()  # what the last life still wrote belongs to it
        self._saved_at_start = self.saved()
        self.start(life)
        last = life == self.options.crashes
        if last:
            self.until(lambda: "trainer" in self.mortal.exited(), "the rollouts to finish")
            self._say("process", process="trainer", did="exited")
            return
        self.until(lambda: self._ripe(life), f"the instant of kill {life + 1}")
        time.sleep(self._random.uniform(0.0, 1.2 * self.options.interval_s))
        killed = self.mortal.kill()
        self._say("process", process=f"everything ({killed} processes, SIGKILL)", did="killed")
        self._say("note", text=f"life {life + 1} lasted {time.monotonic() - begun:.1f} s")
        self._sabotage("restore")

    def start(self, life: int) -> None:
        """Everything but the model, until the trainer has restored."""
        begun = time.monotonic()
        self.start_server("tools")
        self.start_server("agent")
        self.start_trainer(life)
        self.start_server("policy")
        self.until(lambda: self.places.started(life).is_file(), "the restore")
        self._say("process", process="everything", did="started", took_s=time.monotonic() - begun)

    def start_trainer(self, life: int) -> None:
        """Until its data plane can be reached. It waits for the servers, then restores."""
        self.spec = evolve(self.spec, life=life)
        self.spec.write(self.places.spec)
        self.places.sink.unlink(missing_ok=True)
        self.mortal.start("trainer", self._trainer, str(self.places.spec), env=self._env)
        self.until(self.places.sink.is_file, "the data plane")

    def start_server(self, name: str) -> None:
        """One Gym server, on its own port. The policy server needs the trainer's data plane."""
        url = {name: f"http://127.0.0.1:{port}" for name, port in self.spec.ports.items()}
        match name:
            case "tools":
                own = ("--effects", str(self.places.effects), *self._tool_sabotage())
            case "agent":
                own = ("--policy", url["policy"], "--tools", url["tools"])
            case _:
                sink = self.places.sink.read_text(encoding="utf-8")
                own = ("--upstream", url["upstream"], "--sink", sink)
        port = str(self.spec.ports[name])
        common = ("--name", name, "--port", port, "--root", str(self.places.snapshots))
        env = self._env | {"QUIESCE_TOKEN": self.spec.token}
        self.mortal.start(name, "quiesce.demo.servers", KINDS[name], *common, *own, env=env)

    def start_model(self) -> None:
        begun = time.monotonic()
        port = str(self.spec.ports["upstream"])
        module, *arguments = ["quiesce.demo.llm", "--port", port]
        if self.options.policy == "scripted":
            options = self.options
            module = "quiesce.demo.scripted"
            arguments += ["--seed", str(options.seed), "--delay-s", str(options.delay_s)]
        self._lasting.start("model", module, *arguments, env=self._env)
        self.until(lambda: _listens(self.spec.ports["upstream"]), "the model")
        self._say("process", process="model", did="started", took_s=time.monotonic() - begun)

    def _ripe(self, life: int) -> bool:
        """A snapshot of this life is published, and its share of the turns is played."""
        if self.saved() <= self._saved_at_start:
            return False
        played = {(one.rollout, one.turn) for one in read_effects(self.places.effects)}
        share = (life + 1) / (self.options.crashes + 1)
        return len(played) >= share * 0.85 * self.spec.turns

    def saved(self) -> int:
        return sum(one.outcome == "saved" for one in self.display.progress.snapshots)

    # -- waiting and telling -------------------------------------------------------------------

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Follow the events until `reached()`. Raises DemoFailed when a process died or time ran
        out."""
        while not reached():
            self.follow()
            for group in (self._lasting, self.mortal):
                for name, code in group.exited().items():
                    if code != 0:
                        raise DemoFailed(f"{name} ended with code {code}:\n{group.tail(name)}")
            if time.monotonic() > self._deadline:
                raise DemoFailed(
                    f"waited for {what} until {self.options.deadline_s:.0f} s were over; "
                    f"the logs are in {self.places.logs}"
                )
            time.sleep(LOOK_EVERY_S)
        self.follow()

    def follow(self) -> None:
        events = self._events.new()
        events += [_snapshot(line) for line in self._history.new() if line["outcome"] != "restored"]
        events += _running(self.places.effects, self.display.progress)
        if (phase := _phase(self.places.snapshots / STATUS)) != self.display.progress.phase:
            events.append({"event": "phase", "phase": phase})
        self.display.show(events)

    def _say(self, event: str, **data: Any) -> None:
        self.display.show([{"event": event, **data}])

    # -- the end -------------------------------------------------------------------------------

    def audited(self) -> Ended:
        self._sabotage("end")
        if not self.places.evidence.is_file():
            raise DemoFailed(f"the trainer left no evidence:\n{self.mortal.tail('trainer')}")
        found = json.loads(self.places.evidence.read_text(encoding="utf-8"))
        evidence = Evidence(
            drawn=tuple(self.spec.rollouts),
            finished=tuple(Finish(**one) for one in found["finished"]),
            dropped=tuple(found["dropped"]),
            rows=tuple(found["rows"]),
            trained={int(step): tuple(keys) for step, keys in found["trained"].items()},
            effects=tuple(read_effects(self.places.effects)),
            folders=tuple(path.name for path in self.places.snapshots.iterdir()),
            capture=tuple(found["capture"]),
            capture_named=tuple(found["capture_named"]),
        )
        return Ended(audit(evidence), found["rows_of"])

    def _sabotage(self, when: str) -> None:
        kind = sabotage.KINDS.get(self.options.sabotage or "")
        if kind is None or kind.where != "root" or kind.when != when:
            return
        done = {"leave_tmp": sabotage.leave_tmp, "flip_bit": sabotage.flip_bit}[kind.name]
        self._say("note", text=f"sabotage: {kind.sentence}: {done(self.places.snapshots)}")

    def _tool_sabotage(self) -> tuple[str, ...]:
        kind = sabotage.KINDS.get(self.options.sabotage or "")
        return ("--sabotage", kind.name) if kind is not None and kind.where == "tools" else ()


def _environment() -> dict[str, str]:
    """One Ray token for all: processes that join the trainer's cluster need the same."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "TQ_NUM_THREADS": "2",
        "TQ_LOGGING_LEVEL": "WARNING",
        "PYTHONUNBUFFERED": "1",
    }


def _listens(port: int) -> bool:
    import httpx

    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def _snapshot(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the engine's history as an event of the display."""
    reason = line.get("reason", "")
    detail = line.get("detail", "")
    return {
        "event": "snapshot",
        "outcome": line["outcome"],
        "snapshot": line.get("snapshot", ""),
        "pause_s": line.get("pause_s", 0.0),
        "phases": line.get("phases", {}),
        "reason": f"{reason}: {detail}" if detail else reason,
    }


def _running(effects: Path, progress: Progress) -> list[dict[str, Any]]:
    """Turns of running rollouts, read off the effect log."""
    latest = {one.rollout: one for one in read_effects(effects)}
    events = []
    for name, effect in latest.items():
        known = progress.rollouts.get(name)
        run = int(effect.run.partition(".")[2] or 0)
        if known is None or (
            known.state == "running" and (known.run, known.turn) != (run, effect.turn)
        ):
            events.append(
                {"event": "rollout", "rollout": name, "run": run, "turn": effect.turn}
                | {"state": "running"}
            )
    return events


def _phase(status: Path) -> str:
    try:
        now = json.loads(status.read_text(encoding="utf-8"))["now"]
    except (OSError, ValueError, KeyError):
        return "starting"
    return "running" if now is None else str(now["state"])

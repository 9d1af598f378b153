"""What the processes of one demo have to agree on: one file, written before each life."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from attrs import field, frozen

from fsm.strict import read, write
from participants.gym.wire import Kind
from quiesce.demo.frozenlake import turns_of
from quiesce.demo.options import GENERATIONS, Options

# The Gym servers: name, and kind.
KINDS: dict[str, Kind] = {"policy": "policy", "agent": "agent", "tools": "resource"}


@frozen
class Places:
    """Where things are below the demo's folder."""

    folder: Path

    def make(self) -> None:
        for path in (self.snapshots, self.logs, self.anchors):
            path.mkdir(parents=True, exist_ok=True)
        self.effects.touch()

    @property
    def snapshots(self) -> Path:
        return self.folder / "snapshots"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def anchors(self) -> Path:
        return self.folder / "anchors"

    @property
    def effects(self) -> Path:
        return self.folder / "effects.jsonl"

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def evidence(self) -> Path:
        return self.folder / "evidence.json"

    @property
    def sink(self) -> Path:
        return self.folder / "sink"

    @property
    def spec(self) -> Path:
        return self.folder / "spec.json"

    def started(self, life: int) -> Path:
        return self.folder / f"started-{life}"


@frozen(kw_only=True)
class Spec:
    """ports: by name of process. life: 0 before the first kill. token: of the control routes.
    engine: configuration that differs from the demo's."""

    options: Options
    folder: str
    ray_folder: str
    token: str
    ports: dict[str, int]
    life: int = 0
    engine: dict[str, Any] = field(factory=dict)

    @property
    def places(self) -> Places:
        return Places(Path(self.folder))

    @property
    def prompts(self) -> list[dict[str, int]]:
        """One task per prompt group."""
        base = 1000 * (self.options.seed + 1)
        return [{"seed": base + GENERATIONS * group} for group in range(self.options.groups)]

    @property
    def rollouts(self) -> list[str]:
        return [f"p{p}_g{g}" for p in range(self.options.groups) for g in range(GENERATIONS)]

    @property
    def turns(self) -> int:
        """Turns of all rollouts together, played once."""
        return sum(
            turns_of(prompt["seed"] + generation)
            for prompt in self.prompts
            for generation in range(GENERATIONS)
        )

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(write(self)))

    @classmethod
    def load(cls, path: Path) -> Spec:
        return read(cls, json.loads(path.read_text(encoding="utf-8")), path.name)


def write_whole(path: Path, text: str) -> None:
    """Readers see the old content or the new one, never a part."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)

"""The small trainer's checkpoints: one durable file per optimizer step.

A file holds what a step learned from, so that an audit can count every training row once. It is
written under a name that nobody reads and renamed into place: a step is durable or was never.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsm.outcome import Anchor
from storage import durable

BOOTSTRAP = Anchor(0, "bootstrap")  # before the first step: weights as they came
MAX_BYTES = 1 << 28


class Anchors:
    """`step_<n>.json` below `root`. Steps that a restore goes back behind are set aside."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob("tmp_*"):
            durable.remove_file(leftover)

    def write(self, step: int, body: Mapping[str, Any]) -> Anchor:
        """Make a step durable. Writing the same again is fine.

        Raises FileExistsError when the step exists with another body, OSError for the disk.
        """
        path, text = self._path(step), json.dumps(body, sort_keys=True)
        anchor = Anchor(step, hashlib.sha256(text.encode()).hexdigest())
        if durable.exists(path):
            if self._checked(step)[0] != anchor:
                raise FileExistsError(f"{path} is of another step {step}; set it aside first")
            return anchor
        draft = self.root / f"tmp_{path.name}"
        draft.unlink(missing_ok=True)
        content = json.dumps({"sha256": anchor.fingerprint, "body": text})
        durable.write_file(draft, content.encode())
        durable.rename_noreplace(draft, path)
        durable.fsync_directory(self.root)
        return anchor

    def newest(self) -> Anchor:
        """The last durable step, or `BOOTSTRAP`. Raises ValueError for a damaged file."""
        steps = self.steps()
        return self._checked(steps[-1])[0] if steps else BOOTSTRAP

    def steps(self) -> list[int]:
        names = (path.stem.removeprefix("step_") for path in self.root.glob("step_*.json"))
        return sorted(int(name) for name in names)

    def read(self, step: int) -> dict[str, Any]:
        """What a step was written with. Raises ValueError when it is missing or damaged."""
        return self._checked(step)[1]

    def load(self, anchor: Anchor) -> None:
        """Go back to this checkpoint: later ones are set aside.

        Raises ValueError when it is missing, damaged or has another fingerprint.
        """
        if anchor.step and self._checked(anchor.step)[0] != anchor:
            raise ValueError(f"{self._path(anchor.step)} is not the checkpoint {anchor}")
        for step in self.steps():
            if step > anchor.step:
                durable.rename_noreplace(self._path(step), next(self._aside(step)))
        durable.fsync_directory(self.root)

    def _path(self, step: int) -> Path:
        return self.root / f"step_{step:06}.json"

    def _aside(self, step: int) -> Iterator[Path]:
        names = (self.root / f"aside_{step:06}_{number}.json" for number in itertools.count(1))
        return (path for path in names if not durable.exists(path))

    def _checked(self, step: int) -> tuple[Anchor, dict[str, Any]]:
        path = self._path(step)
        try:
            content = json.loads(durable.read_file(path, MAX_BYTES))
            text, fingerprint = content["body"], content["sha256"]
            if hashlib.sha256(text.encode()).hexdigest() != fingerprint:
                raise ValueError("its digest does not match")
            return Anchor(step, fingerprint), json.loads(text)
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise ValueError(f"{path} is not a whole checkpoint: {error}") from error

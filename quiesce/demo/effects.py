"""The log of tool effects: what was really done to the world, kept outside every snapshot.

A restore brings sessions back to an earlier state; it can't take back what this file says. So the
file tells, afterwards, which effects were applied, and how often.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from attrs import frozen

from fsm import strict


@frozen(kw_only=True)
class Effect:
    """One applied effect. turn: 0 for the seed of a session, then 1, 2, ... for its steps.

    parent: token of the effect before it in this session ("" for a seed). token: its own, which no
    other effect has, not even the same call applied again.
    """

    kind: Literal["seed", "step"]
    rollout: str
    run: str
    lineage: str
    request: str
    turn: int
    parent: str
    token: str


class EffectLog:
    """Append-only: one effect a line, each in one write.

    A kill can cut that write short. Nobody was told of such an effect: opening the log drops it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.truncate(path, len(_whole_lines(path)))

    def append(self, effect: Effect) -> None:
        """Raises OSError when the line did not get out whole."""
        line = json.dumps(strict.write(effect)).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self.path}: only a part of an effect was written; is the disk full?")

    def close(self) -> None:
        os.close(self._file)


def read_effects(path: Path) -> tuple[Effect, ...]:
    """Every effect in the order of the log; a last line without its end is still being written.

    Raises `strict.BadInput` naming the line, FileNotFoundError when there is no log.
    """
    effects = []
    for number, line in enumerate(_whole_lines(path).splitlines(), start=1):
        where = f"{path.name}, line {number}"
        try:
            data = json.loads(line)
        except ValueError as error:
            raise strict.BadInput(where, [f"not JSON: {error}"]) from None
        effects.append(strict.read(Effect, data, where))
    return tuple(effects)


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]

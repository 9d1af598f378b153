"""The replay index: which complete groups wait for the trainer, and which step claimed which.

It holds names only; the rows are in the data plane, the states in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import field, frozen

from fsm import strict
from fsm.outcome import InvariantError


@frozen
class ReplayState:
    """buffered: complete groups, oldest first. claims: step (in decimal) to its groups."""

    buffered: tuple[str, ...] = ()
    claims: dict[str, tuple[str, ...]] = field(factory=dict)


class ReplayIndex:
    """First complete, first claimed."""

    def __init__(self, state: ReplayState | None = None) -> None:
        state = state or ReplayState()
        self._buffered = list(state.buffered)
        self._claims = {int(step): groups for step, groups in state.claims.items()}

    @property
    def buffered(self) -> int:
        return len(self._buffered)

    @property
    def claimed(self) -> int:
        return sum(len(groups) for groups in self._claims.values())

    def of_step(self, step: int) -> tuple[str, ...] | None:
        """The groups that a step claimed; None when it claimed none."""
        return self._claims.get(step)

    def add(self, group: str) -> None:
        """All siblings of this group are sealed."""
        if group in self._buffered:
            raise InvariantError(f"group {group} is buffered twice")
        self._buffered.append(group)

    def remove(self, group: str) -> None:
        """The group was dropped; fine when it was not complete."""
        if group in self._buffered:
            self._buffered.remove(group)

    def claim(self, step: int, count: int) -> tuple[str, ...]:
        if step in self._claims or count > len(self._buffered):
            raise InvariantError(f"step {step} cannot claim {count} groups")
        groups, self._buffered = tuple(self._buffered[:count]), self._buffered[count:]
        self._claims[step] = groups
        return groups

    def trained(self, step: int) -> tuple[str, ...]:
        """The step is durable: its groups leave."""
        return self._claims.pop(step)

    def roll_back(self, anchor_step: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Groups of steps that the anchor contains, and of those that it does not; the latter
        are buffered again, ahead of the others (R6)."""
        steps = sorted(self._claims)
        kept = [g for step in steps if step <= anchor_step for g in self._claims[step]]
        undone = [g for step in steps if step > anchor_step for g in self._claims[step]]
        self._claims.clear()
        self._buffered = undone + self._buffered
        return tuple(kept), tuple(undone)

    def keep(self, complete: Iterable[str]) -> None:
        """Drop from the buffer what is not complete (any more)."""
        whole = set(complete)
        self._buffered = [group for group in self._buffered if group in whole]

    def record(self) -> Any:
        claims = {str(step): groups for step, groups in self._claims.items()}
        return strict.write(ReplayState(tuple(self._buffered), claims))

    @classmethod
    def read(cls, record: object) -> ReplayIndex:
        """Raises ValueError for a record that is not one."""
        return cls(strict.read(ReplayState, record, "the replay index"))

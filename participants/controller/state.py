"""What the Controller participant needs of a trainer's own bookkeeping: five calls.

A trainer that has its own controller implements `RlState`; `RlController` is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from attrs import field, frozen

Facts = Mapping[str, Any]
Records = Mapping[str, list[Any]]


@frozen
class RlCut:
    """The bookkeeping at one instant.

    records: name to JSON-able records; each list becomes `<name>.jsonl` in the snapshot.
    counts: where every drawn prompt is, for the manifest and for people.
    settled: rollouts that the ledger has sealed: capture rows that Gym's part still names for
    them need not exist.
    """

    records: Records
    counts: Mapping[str, int] = field(factory=dict)
    settled: tuple[str, ...] = ()


@frozen(kw_only=True)
class Found:
    """What a restore found beside the ledger.

    incarnation: of this controller (R3). anchor_step: of the trainer checkpoint that the
    snapshot belongs to; None when there is none (R6). gym, data_plane: what those participants
    returned from their `restore`.
    """

    incarnation: int
    anchor_step: int | None = None
    gym: Facts = field(factory=dict)
    data_plane: Facts = field(factory=dict)


@frozen(kw_only=True)
class Loaded:
    """The join's outcome (design: "Controller, and the join").

    discard: rollouts that every Gym server drops. keep_capture, keep_train: keys of the rows that
    stay in the data plane. continued: rollouts that go on as run n+1; answered: those whose
    result Gym has. started_over: rollout to reason. kept: finished before the snapshot.
    decisions: a sentence for people about each rollout.
    """

    discard: tuple[str, ...] = ()
    keep_capture: tuple[str, ...] = ()
    keep_train: tuple[str, ...] = ()
    continued: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    started_over: Mapping[str, str] = field(factory=dict)
    kept: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()


class RlState(Protocol):
    """Five calls. Dispatch is closed until the first `open_dispatch`."""

    def stop_dispatch(self) -> None:
        """Send no new rollout; group drops and ACKs stand still too, until `open_dispatch`."""

    def open_dispatch(self, unavailable: frozenset[str]) -> None:
        """Send again, but nothing to the servers in `unavailable`. Safe to repeat."""

    async def flush_acks(self, limit_s: float) -> int:
        """Acknowledge finished results, for at most `limit_s` seconds. Never raises for Gym.
        Returns how many stay owed; they are saved as owed."""

    def state(self) -> RlCut:
        """One synchronous copy, under the data-plane barrier. Raises InvariantError."""

    async def load(self, state: Records | None, found: Found | None) -> Loaded:
        """Replace the bookkeeping by `state` joined with what was `found`; give every unfinished
        rollout run n+1. state None: start from nothing. found None: put an earlier copy of this
        process back as it was. Raises ValueError for records that cannot be used, and then
        changes nothing. Sends nothing: dispatch is opened later (R1)."""


@runtime_checkable
class Watched(Protocol):
    """Optional: lets preflight leave an attempt out (S7)."""

    @property
    def committing(self) -> bool:
        """An optimizer step is being committed."""

    def changes(self) -> object:
        """Equal values: nothing worth saving happened in between. None: not known."""

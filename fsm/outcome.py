"""How an attempt ended, as data: outcomes, and closed lists of reasons.

An attempt that goes wrong is an answer, not an exception. What is raised is a bug
(`InvariantError`), a wrong call (`ValueError`), or a snapshot that may not be used
(`SnapshotRejected`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen


class QuiesceError(Exception):
    """Base of every error that quiesce raises on purpose.

    It can be pickled whole: an actor's refusal crosses a process border. (Plain exceptions are
    rebuilt from their message alone, which is not what these constructors take.)
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(
    kind: type[QuiesceError], args: tuple[Any, ...], state: dict[str, Any]
) -> QuiesceError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class Refused(QuiesceError):
    """A participant says no: it is busy, fenced, or cannot do what was asked.

    `code` is a short word for machines (`sandbox_busy`), `detail` a sentence for people that
    names the rollout, the server or the file.
    """

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code, self.detail = code, detail


class Unavailable(Refused):
    """A server is away or did not answer in time; nothing is known of what it did."""

    def __init__(self, detail: str) -> None:
        super().__init__("unavailable", detail)


class NotReleased(Refused):
    """A release did not reach everybody. `names` are those still silent."""

    def __init__(self, names: frozenset[str], detail: str = "") -> None:
        super().__init__("not_released", detail or ", ".join(sorted(names)))
        self.names = names


class InvariantError(QuiesceError):
    """A bug in quiesce or in a participant: something that the protocol rules out happened (S9)."""


class SnapshotRejected(QuiesceError):
    """A snapshot may not be used: names the snapshot, the file and the reason (R2)."""

    def __init__(self, snapshot: str, what: str, why: str) -> None:
        super().__init__(f"snapshot {snapshot!r} is refused: {what}: {why}")
        self.snapshot, self.what, self.why = snapshot, what, why


class RestoreFailed(QuiesceError):
    """Activation, or its rollback, did not reach every server: start the servers afresh and
    restore again; the snapshot is untouched (R5)."""


class SkipReason(enum.Enum):
    """Why an attempt did not start. Nobody was told anything (S7)."""

    ATTEMPT_IN_PROGRESS = "another attempt is in progress"
    NOTHING_CHANGED = "nothing changed since the last snapshot"
    OPTIMIZER_COMMIT = "the trainer is committing an optimizer step"
    HELD_OFF = "the trainer holds snapshots off"
    NO_TRAINER_ANCHOR = "no trainer checkpoint exists that this snapshot could belong to"
    RELEASE_PENDING = "servers of an earlier attempt are still to be released"
    STAYING_PAUSED = "rollouts stay paused since the last snapshot: call let_go()"
    PUBLISH_UNRESOLVED = "it is not known yet whether an earlier snapshot was published"
    PREVIOUS_CUT_RUNNING = "an earlier save that missed its deadline is still running"
    NO_ROOM = "the unpublished folder could not be made"
    PARTICIPANT = "a participant asked to skip"


class AbortReason(enum.Enum):
    """Why an attempt ended before publish. The previous snapshot stays authoritative."""

    REFUSED = "a participant refused"
    UNAVAILABLE = "a participant could not be reached"
    TIMEOUT = "a step missed its deadline"
    HOLD_LOST = "a hold ended, or something moved under it, before the cut was done"
    CANCELLED = "cancelled from outside"
    IO_ERROR = "reading or writing failed"
    NOT_PUBLISHED = "the rename did not happen"
    TRAINER_MOVED = "the trainer's checkpoint changed during the attempt"
    BUG = "a participant or the engine broke a rule"


class Skip(Exception):
    """Raised by `preflight` to leave this attempt out before anybody is told anything."""

    def __init__(self, reason: SkipReason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason, self.detail = reason, detail


@frozen
class Anchor:
    """The trainer checkpoint that a snapshot belongs to: step, and a digest of the weights."""

    step: int
    fingerprint: str

    def __attrs_post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise ValueError(f"Anchor.step must be an int >= 0, not {self.step!r}")
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise ValueError("Anchor.fingerprint must be a text: a digest of the weights")


@frozen
class Cause:
    """What ended an attempt: the step, the reason, who said so (None: the engine), in words."""

    step: str
    reason: AbortReason
    participant: str | None
    detail: str
    code: str = ""

    def __str__(self) -> str:
        who = f" by {self.participant}" if self.participant else ""
        return f"{self.reason.value} in {self.step!r}{who}: {self.detail}"


@frozen
class Skipped:
    """Nothing was done, nobody was told."""

    reason: SkipReason
    detail: str = ""


@frozen
class Saved:
    """A snapshot is published.

    durable: the directory entry is on disk too; pruning waits for that.
    unreleased: per participant, the servers whose release is not confirmed (release_pending).
    phases: seconds per step, in order; `pause_s` is what rollouts waited.
    """

    snapshot: str
    durable: bool
    phases: Mapping[str, float]
    pause_s: float
    unreleased: Mapping[str, frozenset[str]] = field(factory=dict)
    facts: Mapping[str, Mapping[str, Any]] = field(factory=dict)


@frozen
class Aborted:
    """The attempt ended before publish and everyone was released (but for `unreleased`)."""

    cause: Cause
    phases: Mapping[str, float]
    unreleased: Mapping[str, frozenset[str]] = field(factory=dict)

    @property
    def reason(self) -> AbortReason:
        return self.cause.reason


@frozen
class Unresolved:
    """The rename is still under way; rollouts were released when the hold ended (S2).

    Further attempts are skipped until `status()` says which way it went.
    """

    snapshot: str
    phases: Mapping[str, float]
    unreleased: Mapping[str, frozenset[str]] = field(factory=dict)


@frozen
class Restored:
    """Everything is activated.

    snapshot: the id restored, or None for a start from nothing.
    anchor: the trainer checkpoint whose weights must be loaded now (R6).
    facts: what each participant said of its part.
    """

    snapshot: str | None
    anchor: Anchor | None
    facts: Mapping[str, Mapping[str, Any]]
    phases: Mapping[str, float]


SaveOutcome = Saved | Skipped | Aborted | Unresolved

"""Every message between the NemoGym actor and the Gym servers (specs/wire.md).

Data only. Times on the wire are durations in seconds, never instants: hosts disagree about the
time (H3). Servers and the actor both import this module, so it imports neither side.
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen

from fsm.storing import Fence, FileEntry

SCHEMA_VERSION = 1
PREFIX = "/ng-control/v1"
CAPABILITIES = f"{PREFIX}/capabilities"
CHECKPOINT = f"{PREFIX}/checkpoint"  # + /status, /prepare, /drain, ... one route per operation
ACKNOWLEDGE, RETIRE = f"{PREFIX}/acknowledge", f"{PREFIX}/retire"  # agents only

# Headers. The first marks a caller as our client: such a caller understands a refusal (H7).
ROLLOUT = "x-quiesce-rollout"  # p7_g2
RUN = "x-quiesce-run"  # "<incarnation>.<attempt_index>"
LINEAGE = "x-quiesce-lineage"  # attempt_index of the run in which this history began
CALL = "x-quiesce-call"  # call-3: the model call of this rollout's history
AFTER = "x-quiesce-after"  # call-2: the last model call whose reply the caller has; absent: none
REQUEST = "x-quiesce-request"  # one id per resource call; a repeat gets the recorded answer
EXPECT_REVISION = "x-quiesce-expect-revision"
REVISION = "x-quiesce-revision"  # of the session, in a resource server's reply
ROW = "x-quiesce-row"  # key of the token-capture row, in a policy server's reply

KINDS = ("policy", "agent", "resource")
Kind = Literal["policy", "agent", "resource"]
# The one place where the order inside Gym is written down (S5): callers first.
STOP_ORDER: tuple[Kind, ...] = ("policy", "agent", "resource")
OPEN_ORDER: tuple[Kind, ...] = ("resource", "policy", "agent")

# Codes of error bodies: {"error": {"code": ..., "detail": ...}}. 409 unless said.
STALE_FENCE, FOREIGN_ROOT = "stale_fence", "foreign_root"
CONFLICT, INVALID_PHASE = "checkpoint_conflict", "invalid_phase"
LEASE_EXPIRED, PARKED = "lease_expired", "checkpoint_parked"
STALE_ATTEMPT, LINEAGE_LOST = "stale_attempt", "lineage_lost"
REVISION_MISMATCH, NO_CONTINUATION = "revision_mismatch", "no_continuation"
REPLAY_MISMATCH, UNCERTAIN, BUSY = "replay_mismatch", "uncertain", "busy"
# Reasons to start over: still under way at the deadline; on a server that cannot be saved.
NOT_PARKED, RESTART_ONLY = "not_parked", "restart_only"
UNAUTHORIZED, BAD_REQUEST, BAD_STATE = "unauthorized", "bad_request", "invalid_checkpoint_state"
IO_ERROR = "io_error"  # 500: the disk failed, or the capture sink did
NO_ROUTE, TOO_LARGE, UNREACHABLE = "no_route", "too_large", "upstream_unreachable"  # 404, 413, 502


def capture_key(rollout_id: str, attempt_index: int) -> str:
    """`p7_g2` for run 0, `p7_g2-a1` for run 1: the key of a run in ledgers and row names."""
    return rollout_id if attempt_index == 0 else f"{rollout_id}-a{attempt_index}"


def call_number(call_id: str) -> int:
    """3 for `call-3`. Raises ValueError on anything else."""
    digits = call_id.removeprefix("call-")
    if call_id != f"call-{digits}" or not digits.isascii() or not digits.isdigit():
        raise ValueError(f"{call_id[:80]!r} is not a model call such as 'call-3'")
    return int(digits)


@frozen(order=True)
class RunId:
    """One run of a rollout: restoring a snapshot twice gives run n+1 twice, told apart by the
    incarnation of the controller (R3)."""

    incarnation: int
    attempt_index: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.attempt_index}"

    @classmethod
    def parse(cls, text: str) -> RunId:
        """Raises ValueError on anything but `<int>.<int>`."""
        incarnation, _, attempt = text.partition(".")
        if not (text.isascii() and incarnation.isdigit() and attempt.isdigit()):
            raise ValueError(f"{text[:80]!r} is not a run such as '3.0'")
        return cls(int(incarnation), int(attempt))


@frozen
class Continuation:
    """One line of `continuations.jsonl`: where a parked rollout stands."""

    schema_version: int
    rollout_id: str
    attempt_index: int
    capture_key: str
    last_committed_model_call_id: str | None
    resource_state_revisions: dict[str, int]


@frozen
class Capabilities:
    """Answer to GET capabilities. `mode`: what a snapshot can do with the server's state."""

    schema_version: int
    kind: Kind
    name: str
    mode: Literal["export", "stateless", "restart_only"]
    isolation: Literal["per_session", "shared"]
    num_workers: int
    phase: str
    instance: str  # a new one with every process start
    live_runs: int


@frozen(kw_only=True)
class Control:
    """What every control message carries. `label` is for people, the fence decides (H1)."""

    fence: Fence
    label: str
    timeout_s: float
    schema_version: int = SCHEMA_VERSION


@frozen(kw_only=True)
class Prepare(Control):
    lease_s: float
    drain: Literal["calls", "none"] = "calls"
    straggler: Literal["abort", "start_over"] = "abort"


@frozen(kw_only=True)
class Drain(Control):
    """Wait up to timeout_s until nothing moves; answers either way."""


@frozen(kw_only=True)
class Renew(Control):
    lease_s: float


@frozen(kw_only=True)
class Commit(Control):
    """folder: name of the unpublished folder below the server's own root (F5: never a path).
    continuations: to policy servers, the agents' indexes: which turns the ledger must hold."""

    folder: str
    continuations: tuple[Continuation, ...] = ()


@frozen(kw_only=True)
class FenceOff(Control):
    """Before a restore: hold what lives, refuse older incarnations. take_over: of another root."""

    lease_s: float
    take_over: bool = False


@frozen(kw_only=True)
class Stage(Control):
    """Restore: read, check and stage the part of `snapshot` (a folder name below the root).
    files: what the manifest says of this server's part. snapshot "": a start from nothing, which
    stages nothing; its resume closes the runs of older incarnations."""

    snapshot: str
    files: tuple[FileEntry, ...]


@frozen(kw_only=True)
class Discard(Control):
    """Drop what is staged for these rollouts: they start over, or nobody knows them."""

    rollouts: tuple[str, ...]


@frozen(kw_only=True)
class Release(Control):
    """resume and rollback. activate: the resume of a restore, which is refused where nothing is
    staged: a server that was started meanwhile must not look restored (R1)."""

    activate: bool = False


@frozen
class Restart:
    """A rollout that is left out of the snapshot and starts over, with the reason's code."""

    rollout_id: str
    reason: str


@frozen
class Finished:
    """A result that an agent server keeps until it is acknowledged."""

    rollout_id: str
    attempt_index: int
    result_digest: str


@frozen
class Report:
    """Answer to every control operation; each fills in what it has.

    moved: something changed since commit (S4). blockers: at most 100 names of what is waited
    for, of blocker_count in all. files, counts, continuations, revisions ({rollout: revision}),
    rows ({rollout: capture rows that its history names}), finished (retained results),
    restarts: from drain, commit and restore.
    """

    phase: str
    fence: Fence | None = None
    moved: bool = False
    quiet: bool = True
    blockers: tuple[str, ...] = ()
    blocker_count: int = 0
    files: tuple[FileEntry, ...] = ()
    counts: dict[str, int] = field(factory=dict)
    continuations: tuple[Continuation, ...] = ()
    revisions: dict[str, int] = field(factory=dict)
    rows: dict[str, tuple[str, ...]] = field(factory=dict)
    finished: tuple[Finished, ...] = ()
    restarts: tuple[Restart, ...] = ()


@frozen(kw_only=True)
class RunRequest:
    """POST /run. expect: what the sender believes the agent server has of this rollout (R7);
    expect_call: with `continuation`, the last finished model call. lineage: attempt_index of the
    run in which this history began (equal to attempt_index for `fresh`). task: the loop's input."""

    rollout_id: str
    attempt_index: int
    incarnation: int
    lineage: int
    expect: Literal["fresh", "continuation", "finished"]
    expect_call: str | None = None
    task: dict[str, Any] = field(factory=dict)

    @property
    def run(self) -> RunId:
        return RunId(self.incarnation, self.attempt_index)


@frozen(kw_only=True)
class RunReply:
    """Answer to /run. rows: keys of the token-capture rows of this history, in order of the
    calls. turns: model calls in it; replayed: how many of them came from the journal."""

    rollout_id: str
    attempt_index: int
    result: Any
    result_digest: str
    rows: tuple[str, ...]
    turns: int
    replayed: int
    error: str | None = None


@frozen(kw_only=True)
class Acknowledge:
    """Results that are durable in RL; unknown ones are fine (200)."""

    results: tuple[Finished, ...]


@frozen(kw_only=True)
class Retire:
    """Cancel and close these runs: their group was dropped."""

    rollouts: tuple[str, ...]

"""quiesce: consistent snapshots of unfinished agentic rollouts, and their restore.

The one import for people who embed the engine or write a participant:

>>> from quiesce import Config, Engine, FolderStore, Participant

Parts that need an extra are in `quiesce.gym`, `quiesce.transfer_queue`, `quiesce.controller`
and `quiesce.testing`.
"""

from quiesce._guard import check_packages

check_packages()

from fsm.config import EngineConfig as Config  # noqa: E402  after the guard
from fsm.outcome import (  # noqa: E402
    Aborted,
    AbortReason,
    Anchor,
    Cause,
    InvariantError,
    NotReleased,
    QuiesceError,
    Refused,
    Restored,
    RestoreFailed,
    Saved,
    SaveOutcome,
    Skip,
    Skipped,
    SkipReason,
    SnapshotRejected,
    Unavailable,
    Unresolved,
)
from fsm.participant import Attempt, Elsewhere, Participant, Restore  # noqa: E402
from fsm.storing import SavedPart  # noqa: E402
from fsm.token import RestoreToken  # noqa: E402
from participants.barrier import AsyncBarrier  # noqa: E402
from participants.memory import Fault, MemoryParticipant  # noqa: E402
from quiesce.blocking import BlockingEngine  # noqa: E402
from quiesce.engine import Engine  # noqa: E402
from quiesce.failures import TooManyFailures  # noqa: E402
from storage.memory import MemoryStore  # noqa: E402
from storage.store import FolderStore  # noqa: E402

__all__ = [
    "AbortReason",
    "Aborted",
    "Anchor",
    "AsyncBarrier",
    "Attempt",
    "BlockingEngine",
    "Cause",
    "Config",
    "Elsewhere",
    "Engine",
    "Fault",
    "FolderStore",
    "InvariantError",
    "MemoryParticipant",
    "MemoryStore",
    "NotReleased",
    "Participant",
    "QuiesceError",
    "Refused",
    "Restore",
    "RestoreFailed",
    "RestoreToken",
    "Restored",
    "SaveOutcome",
    "Saved",
    "SavedPart",
    "Skip",
    "SkipReason",
    "Skipped",
    "SnapshotRejected",
    "TooManyFailures",
    "Unavailable",
    "Unresolved",
]

"""What a finished operation comes to: an outcome, or an exception for what is not one."""

from __future__ import annotations

import asyncio

from fsm.drive import Drive
from fsm.outcome import (
    Aborted,
    AbortReason,
    InvariantError,
    Restored,
    RestoreFailed,
    Saved,
    SaveOutcome,
    Unresolved,
)
from fsm.restore_steps import Restoring
from fsm.save import STAYING
from fsm.save_steps import Saving


def raise_bug(drive: Drive) -> None:
    """S9: a bug is raised, once everybody has been released."""
    bug, cause = drive.operation.bug, drive.run.cause
    if bug is not None:
        known = cause is not None and cause.reason is AbortReason.BUG
        raise InvariantError(str(cause) if known else repr(bug)) from bug


def of_save(drive: Drive, saving: Saving) -> SaveOutcome:
    """Raises InvariantError for a bug, CancelledError for a cancellation from outside."""
    raise_bug(drive)
    if drive.run.cancelled:
        raise asyncio.CancelledError
    phases = drive.run.trace.phases()
    stays = drive.run.machine.state == STAYING
    unreleased = {} if stays else saving.releasing.silent()
    if saving.publication is not None and saving.publication.published:
        assert saving.draft is not None
        facts, durable = drive.operation.public_facts(), saving.publication.durable
        return Saved(saving.draft.id, durable, phases, drive.pause_s(), unreleased, facts)
    if drive.run.machine.state == "publish_unresolved":
        assert saving.draft is not None
        return Unresolved(saving.draft.id, phases, unreleased)
    assert drive.run.cause is not None, "an attempt that was not published has a cause"
    return Aborted(drive.run.cause, phases, unreleased)


def of_restore(drive: Drive, restoring: Restoring) -> Restored:
    """Raises InvariantError, RestoreFailed, SnapshotRejected, CancelledError."""
    raise_bug(drive)
    run = drive.run
    if run.machine.state == "failed":
        aborted = any(row.target == "aborting" for row in run.machine.fired)
        release = restoring.dropping if aborted else restoring.activation
        silent = sorted(name for names in release.silent().values() for name in names)
        raise RestoreFailed(
            f"{run.cause or 'activation'}: not confirmed by {', '.join(silent)}; start these "
            "servers afresh and restore again, the snapshot is untouched"
        )
    if run.cancelled:
        raise asyncio.CancelledError
    if run.machine.state == "aborted":
        if drive.operation.rejected is not None:
            raise drive.operation.rejected
        raise RestoreFailed(f"{run.cause}; everything was rolled back, the snapshot is untouched")
    snapshot = restoring.snapshot
    return Restored(
        None if snapshot is None else snapshot.id,
        None if snapshot is None else snapshot.anchor,
        drive.operation.facts,
        run.trace.phases(),
    )

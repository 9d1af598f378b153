"""When failures in a row become an error of the trainer (S9)."""

from __future__ import annotations

import logging

from fsm.outcome import (
    Aborted,
    AbortReason,
    QuiesceError,
    Saved,
    SaveOutcome,
    Skipped,
    SkipReason,
    Unresolved,
)

log = logging.getLogger("quiesce")

# Our own disk and data plane: the trainer must hear of it. A Gym server that is away, or a
# rollout that does not park in time, is only warned about.
OUR_REASONS = frozenset({AbortReason.IO_ERROR, AbortReason.NOT_PUBLISHED})
OUR_STEPS = frozenset({"cut", "seal", "discard"})
OUR_SKIPS = frozenset(
    {SkipReason.NO_ROOM, SkipReason.PREVIOUS_CUT_RUNNING, SkipReason.PUBLISH_UNRESOLVED}
)


class TooManyFailures(QuiesceError):
    """Attempts failed `max_consecutive_failures` times in a row for our own I/O (S9)."""


class Failures:
    """Counts failures in a row. A snapshot that is saved starts the count anew."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ours = self._theirs = 0
        self._last = ""

    def note(self, outcome: SaveOutcome) -> None:
        """One more attempt, whoever asked for it. Warns from the limit of others' failures on."""
        if isinstance(outcome, Saved):
            self._ours = self._theirs = 0
        elif _is_ours(outcome):
            self._ours += 1
            self._last = _why(outcome)
        elif isinstance(outcome, Aborted):
            self._theirs += 1
            if self._theirs >= self._limit:
                log.warning("%d attempts failed in a row: %s", self._theirs, outcome.cause)

    def check(self) -> None:
        """Raises TooManyFailures at the limit of our own."""
        if self._ours >= self._limit:
            raise TooManyFailures(f"{self._ours} attempts failed in a row: {self._last}")


def _is_ours(outcome: SaveOutcome) -> bool:
    if isinstance(outcome, Aborted):
        late = outcome.reason is AbortReason.TIMEOUT and outcome.cause.step in OUR_STEPS
        return late or outcome.reason in OUR_REASONS
    if isinstance(outcome, Skipped):
        return outcome.reason in OUR_SKIPS
    return isinstance(outcome, Unresolved)


def _why(outcome: SaveOutcome) -> str:
    if isinstance(outcome, Aborted):
        return str(outcome.cause)
    if isinstance(outcome, Skipped):
        return (
            f"{outcome.reason.value}: {outcome.detail}" if outcome.detail else outcome.reason.value
        )
    return "it is not known whether the last one was published"

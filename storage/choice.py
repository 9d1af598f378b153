"""Which snapshot to restore, and which ones retention lets go: decided without touching a disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fsm.outcome import SnapshotRejected

T = TypeVar("T")


def first_whole(
    chain: Sequence[str], verified: Callable[[str], T], if_bad: str
) -> tuple[T | None, list[SnapshotRejected]]:
    """The newest of `chain` that `verified` accepts, and the rejections of the newer ones.

    if_bad: "raise" looks at the newest only, "older" goes back. If none is accepted, the newest
    one's rejection is raised: a wrong configuration must not put every snapshot aside (R2).
    """
    if if_bad not in ("raise", "older"):
        raise ValueError(f"if_bad must be 'raise' or 'older', not {if_bad!r}")
    rejected: list[SnapshotRejected] = []
    for snapshot in chain if if_bad == "older" else chain[:1]:
        try:
            return verified(snapshot), rejected
        except SnapshotRejected as error:
            rejected.append(error)
    if rejected:
        raise rejected[0]
    return None, []


def surplus(
    chain: Sequence[str],
    newest_durable: str | None,
    keep_latest: int,
    kept_anchors: frozenset[int],
    step_of: Callable[[str], int | None],
) -> list[str]:
    """What may be deleted of `chain` (newest first): nothing without a durable one (F4).

    Kept are all down to the newest durable one, that one and the `keep_latest - 1` before it,
    and the newest snapshot of each trainer step in `kept_anchors`.
    """
    if newest_durable not in chain:
        return []
    kept = set(chain[: chain.index(newest_durable) + keep_latest])
    wanted = set(kept_anchors)
    for snapshot in chain:
        step = step_of(snapshot) if wanted else None
        if step in wanted:
            wanted.discard(step)
            kept.add(snapshot)
    return [snapshot for snapshot in chain if snapshot not in kept]

"""Which snapshots are eligible: those on the chain of what was restored (F6).

A root may hold snapshots that no living history contains: an old controller published one after
a new one had taken over, or somebody chose to go on from an older one. Going back to such a
snapshot would revive rollouts whose results were trained on already. So each incarnation says
durably what it goes on from, and the chain is followed backwards from the last such record.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from fsm.storing import Fence
from storage.names import Order, order_of


@frozen(order=True)
class Record:
    """From `at` (incarnation, sequence) on, the history is that of `restored` (None: nothing)."""

    at: Order
    restored: str | None


def eligible(snapshots: Iterable[str], records: Iterable[Record]) -> list[str]:
    """The ids on the chain, newest first. Raises ValueError for a record that names a later one."""
    in_order = sorted(records, key=lambda record: record.at)
    by_record: dict[Record | None, list[Order]] = {}
    ids = {order_of(snapshot): snapshot for snapshot in snapshots}
    for order in ids:
        by_record.setdefault(_record_of(order, in_order), []).append(order)
    chain: list[Order] = []
    record = in_order[-1] if in_order else None
    limit: Order | None = None
    while record is not None:
        chain += [order for order in by_record.get(record, []) if limit is None or order <= limit]
        if record.restored is None:
            break
        limit = order_of(record.restored)
        if limit >= record.at:
            raise ValueError(
                f"record {record.at} says that it restored {record.restored}, a later one"
            )
        record = _record_of(limit, in_order)
    return [ids[order] for order in sorted(chain, reverse=True)]


def check_take_over(fence: Fence, root: str, incarnation: int, done: Iterable[Order]) -> None:
    """May another process go on in the incarnation of `fence`? done: what was recorded and
    published. Raises ValueError naming what happened since (F6)."""
    if fence.root != root:
        raise ValueError(f"the restore was begun in root {fence.root}, this is {root}")
    if fence.incarnation != incarnation:
        raise ValueError(
            f"controller {incarnation} began after the restore of controller {fence.incarnation}: "
            f"begin another restore"
        )
    if any(order > (fence.incarnation, fence.sequence) for order in done):
        raise ValueError("this restore was taken over and finished already: begin another one")


def _record_of(order: Order, records: list[Record]) -> Record | None:
    """The record under which a snapshot was taken: the last one of its incarnation before it."""
    before = [record for record in records if record.at <= order and record.at[0] == order[0]]
    return before[-1] if before else None

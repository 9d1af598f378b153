"""Every trace that a test leaves is replayed through its table (trace validation).

The rules here hold for any attempt that ran to its end, whoever took part in it: participants in
memory, over HTTP, or in a Ray actor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from fsm.machine import IllegalEvent, Machine
from fsm.operation import Operation
from fsm.participant import hook_of
from fsm.table import PARKED, Table
from fsm.trace import Event, Trace

TELLING = ("pause", "prepare", "fence")
RELEASES = ("resume", "rollback")
STOPPING = ("pause", "prepare", "drain", "commit", "cut", "fence")


def problems(table: Table, trace: Trace, operation: Operation | None) -> list[str]:
    """What a finished attempt did against its table or its rules, in words."""
    found = list(_illegal_rows(table, trace))
    if operation is not None and not found:
        calls = [Call(event) for event in trace.events if event.kind == "call"]
        # Some tables end on purpose with everybody parked.
        if table.states[_last_state(table, trace)].rollouts != PARKED:
            found += _not_released(calls, operation)
        found += _out_of_order(calls, operation)
        found += _renewed_after_release(calls)
    return found


class Call:
    """One hook that ended: who, which, and from when to when."""

    def __init__(self, event: Event) -> None:
        self.who, self.hook = event.what.rsplit(".", 1)
        self.ended_s = event.at_s
        self.began_s = event.at_s - float(event.data["took_s"])

    def __str__(self) -> str:
        return f"{self.who}.{self.hook}"


def _illegal_rows(table: Table, trace: Trace) -> Iterator[str]:
    machine = Machine(table)
    for row in trace.rows():
        event = row.split(" --", 1)[1].split("--> ", 1)[0]
        try:
            fired = machine.fire(event)
        except IllegalEvent as error:
            yield str(error)
            return
        if str(fired) != row:
            yield f"the trace says {row}, the table {fired}"
            return
    if not machine.over:
        yield f"the attempt ended in {machine.state!r}, which is not terminal"


def _last_state(table: Table, trace: Trace) -> str:
    rows = trace.rows()
    return rows[-1].rsplit(" ", 1)[1] if rows else table.initial


def _not_released(calls: list[Call], operation: Operation) -> Iterator[str]:
    """S6: whoever was told is released, after the last time it was told."""
    participants = [one for rank in operation.ranks for one in rank]
    released = {one.who: one.began_s for one in calls if one.hook in RELEASES}
    for one in participants:
        told = [call for call in calls if call.who == one.name and call.hook in TELLING]
        if not told or hook_of(one, "resume") is None:
            continue
        if released.get(one.name, -1.0) < told[-1].began_s:
            yield f"{told[-1]} was called, and no release after it"


def _out_of_order(calls: list[Call], operation: Operation) -> Iterator[str]:
    """S5: stop from the caller's side; open (in the first round) from the callee's side."""
    rank = {one.name: i for i, ranked in enumerate(operation.ranks) for one in ranked}
    for hook in STOPPING:
        some = sorted((one for one in calls if one.hook == hook), key=_began)
        for before, after in itertools.pairwise(some):
            if rank[before.who] > rank[after.who]:
                yield f"{after} began after {before}, which it calls"
    for hook in RELEASES:
        firsts: dict[str, Call] = {}
        for call in sorted((one for one in calls if one.hook == hook), key=_began):
            firsts.setdefault(call.who, call)
        order: list[Any] = list(firsts.values())
        for before, after in itertools.pairwise(order):
            # At one instant the order of beginnings is not known.
            if rank[before.who] < rank[after.who] and before.began_s < after.began_s:
                yield f"{before} began before {after}, which it calls"


def _began(call: Call) -> float:
    return call.began_s


def _renewed_after_release(calls: list[Call]) -> Iterator[str]:
    releases = [call.began_s for call in calls if call.hook in RELEASES]
    for call in calls:
        if call.hook == "renew" and releases and call.began_s > min(releases):
            yield f"{call} began after the first release, and would hold again"

"""Which model calls a policy server made for which rollout: the ledger (specs/wire.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import define, field, frozen

from fsm import strict
from participants.gym import wire
from participants.gym.servers.journal import Reply, call_id
from participants.gym.servers.parts import Export, Read


@define(eq=False)
class Call:
    """One model call. reply: None while it runs, and again when the caller is known to have it.
    moving: what a drain waits for: `upstream`, then `row`; empty when it is recorded."""

    digest: str
    row: str
    moving: str = "upstream"
    reply: Reply | None = None
    task: asyncio.Task[Reply] | None = None


@define(eq=False)
class Ledger:
    """The calls of one rollout, of one lineage."""

    run: wire.RunId
    lineage: int
    calls: dict[int, Call] = field(factory=dict)

    def forget_replies(self, after: int | None) -> None:
        """The caller has the replies up to `after`: it will not ask for them again."""
        for number, call in self.calls.items():
            if after is not None and number <= after and not call.moving:
                call.reply = call.task = None

    def rows(self) -> tuple[str, ...]:
        return tuple(self.calls[number].row for number in sorted(self.calls))

    def close(self) -> None:
        for call in self.calls.values():
            if call.task is not None:
                call.task.cancel()


@frozen
class _SavedCall:
    call: str
    digest: str
    row: str


@frozen
class _SavedLedger:
    rollout_id: str
    attempt_index: int
    lineage: int
    calls: tuple[_SavedCall, ...]


@frozen
class _SavedRows:
    rollout_id: str
    rows: tuple[str, ...]


def export(ledgers: Mapping[str, Ledger], lines: Iterable[wire.Continuation]) -> Export:
    """The turns that the agents' indexes name, and nothing else.

    A rollout of which a named turn is missing here starts over (lineage_lost).
    """
    saved: list[_SavedLedger] = []
    restarts: list[wire.Restart] = []
    for line in lines:
        one = _named(ledgers.get(line.rollout_id), line)
        if one is None:
            restarts.append(wire.Restart(line.rollout_id, wire.LINEAGE_LOST))
        else:
            saved.append(one)
    rows = {one.rollout_id: tuple(call.row for call in one.calls) for one in saved}
    records = {
        "ledger": (strict.write(one) for one in saved),
        "rows": ({"rollout_id": name, "rows": keys} for name, keys in rows.items()),
    }
    return Export(records, report_of(rows, tuple(restarts)))


def _named(ledger: Ledger | None, line: wire.Continuation) -> _SavedLedger | None:
    last_id = line.last_committed_model_call_id
    if last_id is None:
        lineage = line.attempt_index if ledger is None else ledger.lineage
        return _SavedLedger(line.rollout_id, line.attempt_index, lineage, ())
    last = wire.call_number(last_id)
    if ledger is None or last not in ledger.calls or ledger.calls[last].moving:
        return None
    calls = tuple(
        _SavedCall(call_id(number), call.digest, call.row)
        for number, call in sorted(ledger.calls.items())
        if number <= last and not call.moving
    )
    return _SavedLedger(line.rollout_id, line.attempt_index, ledger.lineage, calls)


def checked(read: Read) -> dict[str, Ledger]:
    """A saved part, as a whole. Raises ValueError."""
    found = list(_ledgers(read("ledger")))
    ledgers, index = dict(found), dict(_rows(read("rows")))
    if len(ledgers) != len(found):
        raise ValueError("a rollout is in the ledger twice")
    if index != {name: ledger.rows() for name, ledger in ledgers.items()}:
        raise ValueError("rows.jsonl is not what the ledger says")
    return ledgers


def report_of(
    rows: Mapping[str, tuple[str, ...]], restarts: tuple[wire.Restart, ...] = ()
) -> wire.Report:
    counts = {"rollouts": len(rows), "calls": sum(map(len, rows.values()))}
    return wire.Report(phase="", counts=counts, rows=dict(rows), restarts=restarts)


def _ledgers(records: Iterable[Any]) -> Iterator[tuple[str, Ledger]]:
    for number, record in enumerate(records, start=1):
        saved = strict.read(_SavedLedger, record, f"ledger.jsonl:{number}")
        calls = {
            wire.call_number(one.call): Call(one.digest, one.row, moving="") for one in saved.calls
        }
        yield saved.rollout_id, Ledger(wire.RunId(0, saved.attempt_index), saved.lineage, calls)


def _rows(records: Iterable[Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for number, record in enumerate(records, start=1):
        saved = strict.read(_SavedRows, record, f"rows.jsonl:{number}")
        yield saved.rollout_id, saved.rows

"""The agent server's part of a snapshot: continuations, journals, results that nobody has yet.

continuations.jsonl   one `wire.Continuation` a line, exactly: what others read
journals.jsonl        the journal of each, in the same order
finished.jsonl        results that are kept until acknowledged
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attrs import frozen

from fsm import strict
from participants.gym import wire
from participants.gym.servers.journal import Entry, Journal, call_id, entry_of, record_of
from participants.gym.servers.parts import Export, Read
from participants.gym.servers.runs import Kept, Known, Place, Run, continuation_of


@frozen
class _SavedJournal:
    rollout_id: str
    attempt_index: int
    lineage: int
    task_digest: str
    entries: tuple[Any, ...]


def export(known: Iterable[Known], *, saves_runs: bool = True) -> Export:
    """Everything at this instant. What may not be saved is named in `restarts`."""
    places: list[Run | Place] = []
    kept: list[Kept] = []
    restarts: list[wire.Restart] = []
    for one in known:
        reason = one.start_over_reason() if isinstance(one, Run) else None
        if reason is None and not saves_runs and not isinstance(one, Kept):
            reason = wire.RESTART_ONLY
        if reason is not None:
            restarts.append(wire.Restart(one.rollout_id, reason))
        elif isinstance(one, Kept):
            kept.append(one)
        else:
            places.append(one)
    lines = [continuation_of(place) for place in places]
    copies = [(place, place.journal.entries()) for place in places]
    records = {
        "continuations": [strict.write(line) for line in lines],
        "journals": (_journal_record(place, entries) for place, entries in copies),
        "finished": [strict.write(one.reply) for one in kept],
    }
    return Export(records, _report(lines, places, kept, tuple(restarts)))


def checked(read: Read) -> dict[str, Place | Kept]:
    """A saved part, as a whole. Raises ValueError."""
    found: list[Place | Kept] = [*_places(read), *_results(read("finished"))]
    known = {one.rollout_id: one for one in found}
    if len(known) != len(found):
        raise ValueError("a rollout is there twice")
    return known


def report_of(known: Iterable[Place | Kept]) -> wire.Report:
    places = [one for one in known if isinstance(one, Place)]
    kept = [one for one in known if isinstance(one, Kept)]
    return _report([continuation_of(place) for place in places], places, kept, ())


def _report(
    lines: list[wire.Continuation],
    places: Iterable[Run | Place],
    kept: list[Kept],
    restarts: tuple[wire.Restart, ...],
) -> wire.Report:
    rows = {place.rollout_id: place.journal.rows() for place in places}
    rows |= {one.rollout_id: one.reply.rows for one in kept}
    return wire.Report(
        phase="",
        counts={"continuations": len(lines), "finished": len(kept), "restarts": len(restarts)},
        continuations=tuple(lines),
        rows=rows,
        finished=tuple(one.finished() for one in kept),
        restarts=restarts,
    )


def _journal_record(place: Run | Place, entries: tuple[Entry, ...]) -> dict[str, Any]:
    return {
        "rollout_id": place.rollout_id,
        "attempt_index": place.run.attempt_index,
        "lineage": place.lineage,
        "task_digest": place.task_digest,
        "entries": [record_of(entry) for entry in entries],
    }


def _places(read: Read) -> Iterator[Place]:
    pairs = zip(read("continuations"), read("journals"), strict=True)
    for number, (line, journal) in enumerate(pairs, start=1):
        saved = strict.read(wire.Continuation, line, f"continuations.jsonl:{number}")
        yield _place(saved, strict.read(_SavedJournal, journal, f"journals.jsonl:{number}"))


def _place(line: wire.Continuation, saved: _SavedJournal) -> Place:
    entries = [entry_of(number, data) for number, data in enumerate(saved.entries, start=1)]
    place = Place(
        rollout_id=saved.rollout_id,
        run=wire.RunId(0, saved.attempt_index),
        lineage=saved.lineage,
        task_digest=saved.task_digest,
        journal=Journal(entries),
    )
    if line != continuation_of(place):
        raise ValueError(f"{line.rollout_id}: its continuation is not what its journal says")
    last = place.journal.last_call()
    if last is not None and last.attempt_index > line.attempt_index:
        raise ValueError(f"{line.rollout_id}: {call_id(last.call or 0)} is of a later run")
    return place


def _results(records: Iterable[Any]) -> Iterator[Kept]:
    for number, record in enumerate(records, start=1):
        reply = strict.read(wire.RunReply, record, f"finished.jsonl:{number}")
        yield Kept(reply, incarnation=0, restored=True)

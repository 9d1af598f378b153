"""The recovery ledger: one entry per rollout, the authority of the join.

Entries are frozen; every change is one small method that demands a `Slot`: the proof that it
happens inside a barrier mutation. A trained or dropped rollout leaves the ledger when nothing is
owed for it any more, and stays counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import evolve, field, frozen

from fsm import strict
from fsm.outcome import InvariantError
from participants.data_plane import TRAINING_ROW
from participants.gym.wire import Finished

State = Literal["reserved", "dispatched", "sealed", "claimed", "trained", "dropped"]
UNFINISHED: tuple[State, ...] = ("reserved", "dispatched")
HELD: tuple[State, ...] = ("sealed", "claimed")  # the training row must stay
OVER: tuple[State, ...] = ("trained", "dropped")
Expect = Literal["fresh", "continuation", "finished"]


class Slot:
    """A barrier mutation under way. It is void once the mutation has ended."""

    def __init__(self, kind: str) -> None:
        self.kind, self._open = kind, True

    def close(self) -> None:
        self._open = False

    def check(self, *kinds: str) -> None:
        """Raises InvariantError outside of the mutation, or inside one of another kind."""
        if not self._open:
            raise InvariantError(f"ledger change after its barrier mutation {self.kind!r} ended")
        if self.kind not in kinds:
            raise InvariantError(f"ledger change in mutation {self.kind!r}, not in one of {kinds}")


@frozen(kw_only=True)
class Rollout:
    """One sibling of a prompt group.

    attempt_index: its run. lineage: the run in which its present history began. reserved: this
    run is not sent yet; `expect` and `expect_call` say what its /run will expect (R7).
    rows: capture rows that are to be cleared. row_key: its training row while that is in the
    data plane. start_overs: how often a history was thrown away.
    """

    rollout_id: str
    group: str
    generation: int
    prompt: int
    server: str
    state: State = "reserved"
    attempt_index: int = 0
    lineage: int = 0
    expect: Expect = "fresh"
    expect_call: str | None = None
    start_overs: int = 0
    reason: str = ""
    row_key: str = ""
    row_digest: str = ""
    result_digest: str = ""
    ack_owed: bool = False
    rows: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Nothing is owed for it any more."""
        return self.state in OVER and not (self.ack_owed or self.row_key or self.rows)


@frozen
class Totals:
    """Groups trained, the last trained step, and groups dropped by reason; they only grow."""

    trained: int = 0
    trained_step: int = 0
    dropped: dict[str, int] = field(factory=dict)


class Ledger:
    """All rollouts that something is owed for. Groups are in the order of their prompts."""

    def __init__(self, entries: Iterable[Rollout] = (), totals: Totals | None = None) -> None:
        self._entries: dict[str, Rollout] = {}
        self._groups: dict[str, list[str]] = {}
        # Indexes over the entries; dicts as ordered sets.
        self._expected: dict[str, None] = {}
        self._fresh: dict[str, None] = {}
        self._acks: dict[str, None] = {}
        self._uncleared: dict[str, None] = {}
        self.totals = totals or Totals()
        for entry in entries:
            if entry.rollout_id in self._entries:
                raise ValueError(f"rollout {entry.rollout_id} is in the ledger twice")
            self._put(entry)

    # -- reading -------------------------------------------------------------------------------

    def get(self, rollout_id: str) -> Rollout | None:
        return self._entries.get(rollout_id)

    def entries(self) -> tuple[Rollout, ...]:
        return tuple(self._entries.values())

    def group(self, group: str) -> tuple[Rollout, ...]:
        """Its rollouts; empty for a group that is unknown or has left."""
        return tuple(self._entries[rollout_id] for rollout_id in self._groups.get(group, ()))

    def unsent(self) -> Iterator[str]:
        """Runs to be sent: those that Gym waits for, then the others; each in order of arrival."""
        yield from self._expected
        yield from self._fresh

    def owed(self) -> tuple[Finished, ...]:
        """Results that Gym keeps until they are acknowledged."""
        owing = (self._entries[rollout_id] for rollout_id in self._acks)
        return tuple(Finished(o.rollout_id, o.attempt_index, o.result_digest) for o in owing)

    def uncleared(self) -> tuple[Rollout, ...]:
        """Rollouts with rows that nobody needs any more."""
        return tuple(self._entries[rollout_id] for rollout_id in self._uncleared)

    def places(self) -> dict[str, int]:
        """Groups by where they are. Raises InvariantError for siblings that contradict."""
        counts = Counter({"trained": self.totals.trained})
        counts["dropped"] = sum(self.totals.dropped.values())
        for name in self._groups:
            place = _place(name, {one.state for one in self.group(name)})
            if place not in OVER:
                counts[place] += 1
        return {place: counts[place] for place in PLACES}

    def totals_record(self) -> Any:
        return strict.write(self.totals)

    def records(self) -> list[Any]:
        return [strict.write(one) for one in self._entries.values()]

    @classmethod
    def read(cls, records: Iterable[object], totals: object) -> Ledger:
        """Raises ValueError naming every bad key, or a rollout that is there twice."""
        entries = (strict.read(Rollout, one, "a record of the ledger") for one in records)
        return cls(entries, strict.read(Totals, totals, "the ledger's totals"))

    # -- changes, each inside a barrier mutation -------------------------------------------------

    def reserve(self, slot: Slot, group: str, prompt: int, servers: Sequence[str]) -> None:
        """A prompt was drawn: one rollout per server named."""
        slot.check("draw")
        _must(group not in self._groups and bool(servers), f"group {group} is reserved twice")
        for number, server in enumerate(servers):
            self._put(
                Rollout(
                    rollout_id=f"{group}_g{number}",
                    group=group,
                    generation=number,
                    prompt=prompt,
                    server=server,
                )
            )

    def dispatch(self, slot: Slot, rollout_id: str) -> Rollout:
        slot.check("dispatch")
        return self._move(rollout_id, ("reserved",), "dispatched")

    def seal(
        self, slot: Slot, rollout_id: str, result: str, row: str, rows: tuple[str, ...]
    ) -> None:
        """Its training row is in the data plane. result, row: digests; rows: to be cleared."""
        slot.check("finish")
        before = self._entries[rollout_id]
        self._move(
            rollout_id,
            ("dispatched",),
            "sealed",
            result_digest=result,
            row_digest=row,
            row_key=rollout_id,
            ack_owed=True,
            rows=before.rows + rows,
        )

    def restart(self, slot: Slot, rollout_id: str, reason: str, rows: tuple[str, ...]) -> None:
        """Its history is thrown away: run n+1 begins anew, `rows` are to be cleared."""
        slot.check("start_over")
        before = self._entries[rollout_id]
        run = before.attempt_index + 1
        self._move(
            rollout_id,
            ("dispatched",),
            "reserved",
            attempt_index=run,
            lineage=run,
            expect="fresh",
            expect_call=None,
            start_overs=before.start_overs + 1,
            reason=reason,
            rows=rows,
        )

    def claim(self, slot: Slot, group: str) -> None:
        slot.check("claim")
        for one in self.group(group):
            self._move(one.rollout_id, ("sealed",), "claimed")

    def train(
        self, slot: Slot, groups: Sequence[str], step: int, rows: Mapping[str, tuple[str, ...]]
    ) -> None:
        """The step that used these groups is durable. rows: their capture rows, to be cleared."""
        slot.check("optimizer_commit")
        _must(step == self.totals.trained_step + 1, f"step {step} is not the next one")
        for group in groups:
            for one in self.group(group):
                left = rows.get(one.rollout_id, ())
                self._move(one.rollout_id, ("claimed",), "trained", rows=left)
        trained = self.totals.trained + len(groups)
        self.totals = evolve(self.totals, trained=trained, trained_step=step)

    def drop(
        self, slot: Slot, group: str, reason: str, rows: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Give a group up. rows: capture rows of its rollouts, to be cleared."""
        slot.check("drop")
        for one in self.group(group):
            capture = rows.get(one.rollout_id, ())
            self._move(
                one.rollout_id, (*UNFINISHED, "sealed"), "dropped", reason=reason, rows=capture
            )
        dropped = Counter(self.totals.dropped) + Counter({reason: 1})
        self.totals = evolve(self.totals, dropped=dict(dropped))

    def cleared(self, slot: Slot, rollouts: Iterable[Rollout]) -> None:
        """The rows that these entries named are gone from the data plane. An entry that has moved
        on in between owes only what it has named since."""
        slot.check("finish", "start_over", "drop", "optimizer_commit", "clear")
        for before in rollouts:
            one = self._entries.get(before.rollout_id)
            if one is not None:
                rows = tuple(key for key in one.rows if key not in before.rows)
                row_key = "" if before.state in OVER else one.row_key
                self._put(evolve(one, rows=rows, row_key=row_key))

    def acknowledged(self, slot: Slot, results: Iterable[Finished]) -> None:
        """Gym has dropped these results. One that has left in between is fine."""
        slot.check("acknowledge")
        for result in results:
            one = self._entries.get(result.rollout_id)
            if one is not None and one.attempt_index == result.attempt_index:
                self._put(evolve(one, ack_owed=False))

    # -- helpers -------------------------------------------------------------------------------

    def _move(self, rollout_id: str, of: Sequence[State], to: State, **changes: Any) -> Rollout:
        before = self._entries[rollout_id]
        _must(before.state in of, f"{rollout_id} is {before.state}; {to} follows only {of}")
        after = evolve(before, state=to, **changes)
        _must(bool(after.row_key) or after.state not in HELD, f"{rollout_id}: no training row")
        self._put(after)
        return after

    def _put(self, one: Rollout) -> None:
        """The only place that changes an entry: keeps the indexes with it."""
        name = one.rollout_id
        if name not in self._entries:
            self._groups.setdefault(one.group, []).append(name)
        self._entries[name] = one
        unsent, fresh = one.state == "reserved", one.expect == "fresh"
        _mark(self._expected, name, unsent and not fresh)
        _mark(self._fresh, name, unsent and fresh)
        _mark(self._acks, name, one.ack_owed)
        _mark(self._uncleared, name, bool(one.rows or (one.state in OVER and one.row_key)))
        if one.over:
            self._forget(one)

    def _forget(self, one: Rollout) -> None:
        del self._entries[one.rollout_id]
        siblings = self._groups[one.group]
        siblings.remove(one.rollout_id)
        if not siblings:
            del self._groups[one.group]


PLACES = ("trained", "claimed", "buffered", "in_flight", "reserved", "dropped")
_ALIKE = {"reserved": "reserved", "sealed": "buffered", "claimed": "claimed"}


def _place(group: str, states: set[State]) -> str:
    if len(states) == 1:
        (state,) = states
        return _ALIKE.get(state, "in_flight" if state == "dispatched" else state)
    _must(
        states <= {"reserved", "dispatched", "sealed"},
        f"siblings of {group} contradict: {sorted(states)}",
    )
    return "in_flight"


def _mark(names: dict[str, None], name: str, present: bool) -> None:
    if present:
        names[name] = None
    else:
        names.pop(name, None)


def _must(condition: bool, otherwise: str) -> None:
    if not condition:
        raise InvariantError(otherwise)


def references(records: Iterable[object]) -> dict[str, Any]:
    """What a saved ledger says of other parts, in the words of `quiesce verify`: training rows
    that must be there, and the rollouts (`_live`) whose capture rows still matter."""
    entries = [strict.read(Rollout, one, "a record of the ledger") for one in records]
    rows = {
        o.row_key: o.rollout_id for o in entries if o.row_key and o.state in ("sealed", "claimed")
    }
    live = [one.rollout_id for one in entries if one.state in UNFINISHED]
    return {"_needs": {TRAINING_ROW: rows}, "_live": [*live, *rows.values()]}

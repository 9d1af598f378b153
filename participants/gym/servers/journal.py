"""What one rollout asked of the world, and what it was told: the record that a run replays.

A loop is a function of its task and of the answers it gets. Running it again and answering its
first calls from here brings it to where it stood; a call that was not made before is a mismatch.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import deque
from collections.abc import Iterable
from typing import Any

from attrs import evolve, frozen

from participants.gym import wire

# Fields of a JSON body that name the run: they differ from run to run of one history.
IDENTITY_FIELDS = frozenset({"_ng_rollout_id", "_ng_attempt_index"})


class ReplayMismatch(Exception):
    """The loop did something else than the last time."""


@frozen
class Reply:
    """What a server answered. body: decoded; headers: without those of the connection."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def good(self) -> bool:
        return self.status < 400


@frozen
class Failure:
    """A call that ended in an exception of httpx: its class and message."""

    kind: str
    message: str
    good: bool = False


@frozen
class Entry:
    """One call. outcome: None while it is only issued. call: its number among model calls,
    None for other servers. attempt_index: the run that got the outcome. row, revision: what the
    reply named."""

    number: int
    server: str
    method: str
    route: str
    digest: str
    call: int | None = None
    outcome: Reply | Failure | None = None
    attempt_index: int = 0
    row: str | None = None
    revision: int | None = None

    @property
    def committed(self) -> bool:
        """A finished model call."""
        return self.call is not None and self.outcome is not None and self.outcome.good


class Journal:
    """The calls of one history, in the order in which they were issued."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = list(entries)
        self._unclaimed: dict[tuple[str, ...], deque[int]] | None = None
        self.replayed_turns = 0
        self.revisions: dict[str, int] = {}
        for entry in self._entries:
            self._note(entry)
        self.left = len(self._entries)  # entries that the loop has not asked for again
        self._calls = max((entry.call or 0 for entry in self._entries), default=0)

    def issue(self, server: str, method: str, route: str, digest: str, *, model: bool) -> Entry:
        """The loop makes a call. With an outcome in the entry it was made before.

        Raises ReplayMismatch: while entries are left, each call has to be one of them. The nth
        call of one kind gets the nth entry of that kind.
        """
        if self.left:
            return self._claim(server, method, route, digest)
        self._calls += model
        number = len(self._entries) + 1
        call = self._calls if model else None
        entry = Entry(number, server, method, route, digest, call)
        self._entries.append(entry)
        return entry

    def _claim(self, *key: str) -> Entry:
        if self._unclaimed is None:  # made when a run asks: most journals are only stored
            self._unclaimed = _by_key(self._entries)
        numbers = self._unclaimed.get(key)
        if not numbers:
            server, method, route, _ = key
            raise ReplayMismatch(
                f"{method} {server}{route} with this body is none of the {self.left} calls that "
                "the saved run made and this one has not made yet"
            )
        self.left -= 1
        entry = self._entries[numbers.popleft() - 1]
        self.replayed_turns += entry.committed
        return entry

    def settle(
        self,
        entry: Entry,
        outcome: Reply | Failure,
        attempt_index: int,
        *,
        row: str | None = None,
        revision: int | None = None,
    ) -> None:
        """Record the outcome of a call that was issued."""
        settled = evolve(
            entry, outcome=outcome, attempt_index=attempt_index, row=row, revision=revision
        )
        self._entries[entry.number - 1] = settled
        self._note(settled)

    def _note(self, entry: Entry) -> None:
        if entry.revision is not None:
            self.revisions[entry.server] = entry.revision

    def entries(self) -> tuple[Entry, ...]:
        """A copy; entries never change (H4)."""
        return tuple(self._entries)

    def committed(self) -> list[Entry]:
        """Finished model calls, in their order."""
        return sorted((e for e in self._entries if e.committed), key=lambda e: e.call or 0)

    def rows(self) -> tuple[str, ...]:
        return tuple(entry.row for entry in self.committed() if entry.row is not None)

    def last_call(self) -> Entry | None:
        return next(reversed(self.committed()), None)

    def after(self) -> int | None:
        """The last finished model call before which no call is under way: the policy server may
        forget replies up to it, and must know it (lineage_lost)."""
        after = None
        for entry in self._entries:
            if entry.call is not None:
                if entry.outcome is None:
                    break
                after = entry.call if entry.committed else after
        return after


def body_digest(body: bytes) -> str:
    """Digest of a request's body without identity fields."""
    if any(name.encode() in body for name in IDENTITY_FIELDS):
        body = _without_identity(body)
    return hashlib.sha256(body).hexdigest()


def _without_identity(body: bytes) -> bytes:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(data, dict):
        return body
    kept = {name: value for name, value in data.items() if name not in IDENTITY_FIELDS}
    return json.dumps(kept, sort_keys=True).encode()


def _by_key(entries: Iterable[Entry]) -> dict[tuple[str, ...], deque[int]]:
    numbers: dict[tuple[str, ...], deque[int]] = {}
    for entry in entries:
        key = entry.server, entry.method, entry.route, entry.digest
        numbers.setdefault(key, deque()).append(entry.number)
    return numbers


def call_id(number: int) -> str:
    return f"call-{number}"


# -- as records ------------------------------------------------------------------------------------


def record_of(entry: Entry) -> dict[str, Any]:
    """An entry as JSON-able data. By hand: a snapshot has hundreds of thousands of them."""
    return {
        "server": entry.server,
        "method": entry.method,
        "route": entry.route,
        "digest": entry.digest,
        "call": None if entry.call is None else call_id(entry.call),
        "attempt_index": entry.attempt_index,
        "row": entry.row,
        "revision": entry.revision,
        "outcome": _outcome_record(entry.outcome),
    }


def entry_of(number: int, data: Any) -> Entry:
    """The reverse of `record_of`. Raises ValueError naming what is wrong. By hand, too."""
    try:
        call = _typed(data, "call", str, None)
        return Entry(
            number=number,
            server=_typed(data, "server", str),
            method=_typed(data, "method", str),
            route=_typed(data, "route", str),
            digest=_typed(data, "digest", str),
            call=None if call is None else wire.call_number(call),
            outcome=_outcome_of(data["outcome"]),
            attempt_index=_typed(data, "attempt_index", int),
            row=_typed(data, "row", str, None),
            revision=_typed(data, "revision", int, None),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise ValueError(f"entry {number} of a journal: {problem!r}") from None


def _typed(data: Any, key: str, *kinds: type | None) -> Any:
    value = data[key]
    if type(value) not in kinds and not (value is None and None in kinds):
        raise ValueError(f"{key} is {value!r}")
    return value


def _outcome_record(outcome: Reply | Failure | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    if isinstance(outcome, Failure):
        return {"error": outcome.kind, "message": outcome.message}
    record: dict[str, Any] = {"status": outcome.status, "headers": outcome.headers}
    try:
        return record | {"body": outcome.body.decode()}
    except UnicodeDecodeError:
        return record | {"body_base64": base64.b64encode(outcome.body).decode()}


def _outcome_of(data: Any) -> Reply | Failure | None:
    if data is None:
        return None
    if "error" in data:
        return Failure(_typed(data, "error", str), _typed(data, "message", str))
    headers = tuple((str(name), str(value)) for name, value in data["headers"])
    if "body_base64" in data:
        body = base64.b64decode(data["body_base64"], validate=True)
    else:
        body = data["body"].encode()
    return Reply(_typed(data, "status", int), headers, body)

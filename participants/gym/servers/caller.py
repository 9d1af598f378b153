"""Who makes a model or resource call, by the headers that the journal's transport stamps."""

from __future__ import annotations

import re

from attrs import frozen
from starlette.datastructures import Headers

from fsm.outcome import Refused
from participants.gym import wire
from participants.gym.servers.asgi import check_rollout_id


@frozen
class Caller:
    """Who makes a model or resource call, by its headers."""

    rollout_id: str
    run: wire.RunId
    lineage: int

    @property
    def capture_key(self) -> str:
        return wire.capture_key(self.rollout_id, self.run.attempt_index)

    def is_behind(self, run: wire.RunId, lineage: int) -> bool:
        """Its run, or its history, is over: a later one was here."""
        same_controller = self.run.incarnation == run.incarnation
        return self.run < run or (same_controller and self.lineage < lineage)

    def begins_anew(self, run: wire.RunId, lineage: int) -> bool:
        """It has another history: one that began later, or a controller took over without a
        restore."""
        return self.lineage > lineage or self.run.incarnation > run.incarnation


def caller_of(headers: Headers) -> Caller:
    """Raises Refused(bad_request)."""
    rollout_id = check_rollout_id(headers.get(wire.ROLLOUT, ""))
    try:
        run = wire.RunId.parse(headers.get(wire.RUN, ""))
    except ValueError:
        raise Refused(wire.BAD_REQUEST, f"header {wire.RUN} must be <number>.<number>") from None
    lineage = number_in(headers, wire.LINEAGE)
    if lineage is None or lineage > run.attempt_index:
        raise Refused(wire.BAD_REQUEST, f"header {wire.LINEAGE} is missing or later than the run")
    return Caller(rollout_id, run, lineage)


def call_in(headers: Headers, name: str) -> int | None:
    """The number in a header such as `call-3`; None if it is absent."""
    text = headers.get(name)
    if text is None:
        return None
    try:
        return wire.call_number(text)
    except ValueError as problem:
        raise Refused(wire.BAD_REQUEST, f"header {name}: {problem}") from None


def number_in(headers: Headers, name: str) -> int | None:
    """A header that is a whole number >= 0; None if it is absent."""
    text = headers.get(name)
    if text is not None and not re.fullmatch(r"[0-9]{1,18}", text):
        raise Refused(wire.BAD_REQUEST, f"header {name} must be a number, not {text[:80]!r}")
    return None if text is None else int(text)

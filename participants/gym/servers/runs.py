"""What an agent server knows of a rollout: a run under way, a kept result, or a saved place."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import httpx
from attrs import field, frozen

from fsm.outcome import Refused
from participants.gym import wire
from participants.gym.servers.clock import RunTimers
from participants.gym.servers.journal import Journal, call_id
from storage.jsontext import canonical

# Where a call is. A model call's place may be the gate; only the gate counts as parked (H5).
GATE, MODEL, RESOURCE, RETRY = "gate", "model", "resource", "retry"


class Run:
    """One run of a rollout: its journal, and where each of its calls is."""

    def __init__(self, request: wire.RunRequest, journal: Journal) -> None:
        self.rollout_id, self.run, self.lineage = request.rollout_id, request.run, request.lineage
        self.task, self.task_digest = request.task, digest_of(request.task)
        self.journal = journal
        self.places: dict[int, str] = {}  # number of a call under way: where it is
        self.returned = False  # the loop has ended, its result is not recorded yet
        self.left_out = False  # a straggler: not in the present snapshot
        self.uncertain = False  # a call has an unknown outcome: not in any snapshot (H5)
        self.locks: dict[str, asyncio.Lock] = {}  # one call at a time to each resource server
        self.timers = RunTimers()  # of its loop: they stand still while it is parked (H6)
        self.loop: asyncio.Task[Any] | None = None
        self.reply: asyncio.Future[wire.RunReply] = asyncio.get_running_loop().create_future()
        self.reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())

    @property
    def over(self) -> Refused | None:
        """Why this run ended without a result, if it did."""
        done = self.reply.done() and not self.reply.cancelled()
        error = self.reply.exception() if done else None
        return error if isinstance(error, Refused) else None

    def end(self, code: str, detail: str) -> Refused:
        """No result: answer so, cancel the loop. Its calls are refused from now on."""
        refusal = Refused(code, f"{self.rollout_id} run {self.run}: {detail}")
        if not self.reply.done():
            self.reply.set_exception(refusal)
        if self.loop is not None:
            self.loop.cancel()
        return refusal

    def parked(self, *, replies_held: bool) -> bool:
        """Can nothing of it move? replies_held: a model call under way is not handed on (H5)."""
        still = (GATE, MODEL) if replies_held else (GATE,)
        return (self.returned or bool(self.places)) and all(
            place in still for place in self.places.values()
        )

    def start_over_reason(self) -> str | None:
        """Why it may not be saved."""
        if self.over is not None:
            return self.over.code
        if self.uncertain:
            return wire.UNCERTAIN
        return wire.NOT_PARKED if self.left_out else None


@frozen
class Place:
    """A saved continuation that nobody has claimed yet. run: as which it will be continued."""

    rollout_id: str
    run: wire.RunId
    lineage: int
    task_digest: str
    journal: Journal


@frozen
class Kept:
    """A result, until it is acknowledged. incarnation: of the run in `reply`. restored: from a
    snapshot, and not asked for since."""

    reply: wire.RunReply
    incarnation: int
    restored: bool = field(default=False)

    @property
    def rollout_id(self) -> str:
        return self.reply.rollout_id

    @property
    def run(self) -> wire.RunId:
        return wire.RunId(self.incarnation, self.reply.attempt_index)

    def finished(self) -> wire.Finished:
        reply = self.reply
        return wire.Finished(reply.rollout_id, reply.attempt_index, reply.result_digest)


Known = Run | Place | Kept


def digest_of(value: Any) -> str:
    """Raises ValueError or TypeError for what JSON cannot hold."""
    return hashlib.sha256(canonical(value)).hexdigest()


def result_of(run: Run, result: Any, error: str | None) -> wire.RunReply:
    """The answer to /run. A result that is not JSON becomes an error."""
    try:
        digest = digest_of({"result": result, "error": error})
    except (TypeError, ValueError, RecursionError) as problem:
        result, error = None, f"the loop's result is not JSON: {problem}"
        digest = digest_of({"result": None, "error": error})
    return wire.RunReply(
        rollout_id=run.rollout_id,
        attempt_index=run.run.attempt_index,
        result=result,
        result_digest=digest,
        rows=run.journal.rows(),
        turns=len(run.journal.committed()),
        replayed=run.journal.replayed_turns,
        error=error,
    )


def continuation_of(known: Run | Place) -> wire.Continuation:
    """One line of the continuation index. capture_key: of the run that made the last call."""
    last = known.journal.last_call()
    made_by = known.run.attempt_index if last is None else last.attempt_index
    return wire.Continuation(
        schema_version=wire.SCHEMA_VERSION,
        rollout_id=known.rollout_id,
        attempt_index=known.run.attempt_index,
        capture_key=wire.capture_key(known.rollout_id, made_by),
        last_committed_model_call_id=None if last is None else call_id(last.call or 0),
        resource_state_revisions=dict(known.journal.revisions),
    )


def error_of(kind: str, message: str, request: httpx.Request) -> httpx.TransportError:
    """The httpx error that a journal names, for the loop to see again."""
    found = getattr(httpx, kind, httpx.TransportError)
    if not (isinstance(found, type) and issubclass(found, httpx.TransportError)):
        found = httpx.TransportError
    return found(message, request=request)

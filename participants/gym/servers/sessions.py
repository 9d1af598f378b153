"""What a resource server knows of each rollout's session, and how it is saved."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol

from attrs import define, field, frozen

from fsm import strict
from fsm.outcome import Refused
from participants.gym import wire
from participants.gym.servers.journal import Reply
from participants.gym.servers.parts import Export, Read
from storage.jsontext import canonical

MAX_ANSWERS = 1024  # recorded answers of one session

Mode = Literal["export", "stateless", "restart_only"]


class SessionCodec(Protocol):
    """How an environment's sessions are saved. Called between requests, never during one.

    A call finds its session by the header `x-quiesce-rollout`.
    """

    def export_session(self, rollout_id: str) -> Any:
        """The session as JSON-able data; None if there is nothing to save."""

    def import_session(self, rollout_id: str, state: Any) -> None:
        """Put a session in place, over whatever is there."""

    def drop_session(self, rollout_id: str) -> None:
        """Forget the session; fine if there is none."""


@frozen
class Answer:
    """H2 for tools: what a request id was answered, so that a repeat has no second effect."""

    digest: str
    revision: int
    reply: Reply


@define(eq=False)
class Session:
    """One rollout's session, of one lineage. uncertain: a mutation raised or was cut off, so
    nobody knows what state it left. left_out: not in the present snapshot."""

    run: wire.RunId
    lineage: int
    revision: int = 0
    answers: OrderedDict[str, Answer] = field(factory=OrderedDict)
    uncertain: bool = False
    left_out: bool = False
    lock: asyncio.Lock = field(factory=asyncio.Lock)

    def record(self, request_id: str, answer: Answer) -> None:
        self.answers[request_id] = answer
        if len(self.answers) > MAX_ANSWERS:
            self.answers.popitem(last=False)

    def forget_answers(self, revision: int) -> None:
        """The caller has the answers up to this revision: it will not ask for them again."""
        for request_id in [k for k, v in self.answers.items() if v.revision <= revision]:
            del self.answers[request_id]

    def must_be_at(self, revision: int | None) -> None:
        """Raises Refused when the caller knows another state than this. None: it knows of none."""
        if revision not in (None, self.revision):
            detail = f"the session is at {self.revision}, the caller expects {revision}"
            raise Refused(wire.REVISION_MISMATCH, detail)

    def begin_anew(self, run: wire.RunId, lineage: int) -> None:
        """Another history begins: nothing of the old one stays (but its lock, which we hold)."""
        self.run, self.lineage, self.revision = run, lineage, 0
        self.answers.clear()
        self.uncertain = False

    def start_over_reason(self, mode: Mode) -> str | None:
        if mode == "restart_only":
            return wire.RESTART_ONLY
        if self.uncertain:
            return wire.UNCERTAIN
        return wire.NOT_PARKED if self.left_out else None


@frozen
class Staged:
    """A saved session that is not active yet."""

    session: Session
    state: Any


@frozen
class _SavedAnswer:
    request_id: str
    digest: str
    revision: int
    status: int
    headers: tuple[tuple[str, str], ...]
    body_base64: str


@frozen
class _SavedSession:
    rollout_id: str
    attempt_index: int
    lineage: int
    revision: int
    answers: tuple[_SavedAnswer, ...]
    state: Any


def export(sessions: Mapping[str, Session], codec: SessionCodec | None, mode: Mode) -> Export:
    """One copy of every session that may be saved (H4); the others are named in `restarts`."""
    records: list[dict[str, Any]] = []
    revisions: dict[str, int] = {}
    restarts: list[wire.Restart] = []
    for rollout_id, session in sorted(sessions.items()):
        reason = session.start_over_reason(mode)
        if reason is not None or codec is None:
            restarts.append(wire.Restart(rollout_id, reason or wire.RESTART_ONLY))
            continue
        state = _exported(codec, rollout_id)
        records.append(_record(rollout_id, session, state))
        revisions[rollout_id] = session.revision
    return Export({"sessions": records}, report_of(revisions, tuple(restarts)))


def _exported(codec: SessionCodec, rollout_id: str) -> Any:
    """A copy: the environment may go on changing what it handed out."""
    try:
        return json.loads(canonical(codec.export_session(rollout_id)))
    except Exception as error:
        detail = f"export_session({rollout_id!r}): {type(error).__name__}: {error}"
        raise Refused(wire.BAD_STATE, detail) from error


def _record(rollout_id: str, session: Session, state: Any) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id,
        "attempt_index": session.run.attempt_index,
        "lineage": session.lineage,
        "revision": session.revision,
        "answers": [_answer_record(*item) for item in session.answers.items()],
        "state": state,
    }


def _answer_record(request_id: str, answer: Answer) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "digest": answer.digest,
        "revision": answer.revision,
        "status": answer.reply.status,
        "headers": answer.reply.headers,
        "body_base64": base64.b64encode(answer.reply.body).decode(),
    }


def checked(read: Read) -> dict[str, Staged]:
    """A saved part, as a whole. Raises ValueError."""
    found = list(_sessions(read("sessions")))
    sessions = dict(found)
    if len(sessions) != len(found):
        raise ValueError("a session is there twice")
    return sessions


def _sessions(records: Iterable[Any]) -> Iterator[tuple[str, Staged]]:
    for number, record in enumerate(records, start=1):
        saved = strict.read(_SavedSession, record, f"sessions.jsonl:{number}")
        answers = OrderedDict((one.request_id, _answer(one)) for one in saved.answers)
        run = wire.RunId(0, saved.attempt_index)
        session = Session(run, saved.lineage, saved.revision, answers)
        yield saved.rollout_id, Staged(session, saved.state)


def _answer(saved: _SavedAnswer) -> Answer:
    body = base64.b64decode(saved.body_base64, validate=True)
    return Answer(saved.digest, saved.revision, Reply(saved.status, saved.headers, body))


def report_of(revisions: Mapping[str, int], restarts: tuple[wire.Restart, ...] = ()) -> wire.Report:
    counts = {"sessions": len(revisions), "restarts": len(restarts)}
    return wire.Report(phase="", counts=counts, revisions=dict(revisions), restarts=restarts)

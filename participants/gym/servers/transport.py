"""The one door of a loop to the world: an httpx transport that journals, parks and replays.

The loop sees a plain `httpx.AsyncClient`. `http://policy/...` and `http://tools/...` are the
servers that the agent server was configured with, by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import httpx
from attrs import field, frozen

from fsm import strict
from participants.gym import wire
from participants.gym.servers.gate import Gate
from participants.gym.servers.journal import (
    Entry,
    Failure,
    ReplayMismatch,
    Reply,
    body_digest,
    call_id,
)
from participants.gym.servers.runs import GATE, MODEL, RESOURCE, RETRY, Run, error_of

PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between tries; the last one repeats
MAX_TRIES = 60  # about a minute: a neighbour that is started again takes that long
# Refusals after which this history cannot go on: the rollout starts over.
_START_OVER = frozenset(
    {wire.STALE_ATTEMPT, wire.LINEAGE_LOST, wire.REVISION_MISMATCH, wire.CONFLICT, wire.UNCERTAIN}
)
RETIRE_TIMEOUT_S = 60.0
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_OF_THE_CONNECTION = frozenset(
    {"connection", "content-encoding", "content-length", "date", "server", "transfer-encoding"}
)


@frozen
class Neighbours:
    """The servers that loops may call: base URL and transport by name; which one is the policy."""

    urls: Mapping[str, httpx.URL]
    transports: Mapping[str, httpx.AsyncBaseTransport]
    policy: str
    ours: set[str] = field(factory=set)  # those that answered as our servers do

    async def retire(self, rollouts: Sequence[str], token: str) -> None:
        """Tell our servers that they may forget these rollouts. Best effort: what they keep
        longer costs memory and nothing else."""
        for name in sorted(self.ours):
            headers = {"authorization": f"Bearer {token}"}
            body = strict.write(wire.Retire(rollouts=tuple(rollouts)))
            url = f"{str(self.urls[name]).rstrip('/')}{wire.RETIRE}"
            request = httpx.Request("POST", url, headers=headers, json=body)
            with contextlib.suppress(httpx.TransportError, TimeoutError):
                async with asyncio.timeout(RETIRE_TIMEOUT_S):
                    response = await self.transports[name].handle_async_request(request)
                    await response.aread()


class JournalTransport(httpx.AsyncBaseTransport):
    """One per run."""

    def __init__(self, run: Run, gate: Gate, neighbours: Neighbours) -> None:
        self._run, self._gate, self._neighbours = run, gate, neighbours

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        server, body = request.url.host, await request.aread()
        self._check(server, request)
        model = server == self._neighbours.policy
        route, digest = request.url.raw_path.decode("ascii"), body_digest(body)
        try:
            entry = self._run.journal.issue(server, request.method, route, digest, model=model)
        except ReplayMismatch as mismatch:
            raise self._start_over(wire.REPLAY_MISMATCH, str(mismatch)) from None
        outcome = entry.outcome
        if outcome is None:
            with self._place(entry):
                live = self._model_call if model else self._resource_call
                outcome = await live(entry, request, body)
        if isinstance(outcome, Failure):
            raise error_of(outcome.kind, outcome.message, request)
        return httpx.Response(outcome.status, headers=list(outcome.headers), content=outcome.body)

    def _check(self, server: str, request: httpx.Request) -> None:
        if self._run.over is not None:
            raise httpx.TransportError(str(self._run.over), request=request)
        if server not in self._neighbours.urls:
            known = ", ".join(sorted(self._neighbours.urls))
            raise httpx.ConnectError(f"no server {server!r} here (known: {known})", request=request)

    # -- model calls ---------------------------------------------------------------------------

    async def _model_call(
        self, entry: Entry, request: httpx.Request, body: bytes
    ) -> Reply | Failure:
        """Parks at the gate while it is closed. A repeat is safe: the policy server knows calls
        by their number."""
        for pause_s in _pauses():
            await self._wait_at_gate(entry, lambda: not self._gate.closed)
            outcome, headers, _ = await self._send(entry, MODEL, request, body)
            code = self._check_refusal(outcome)
            lost = isinstance(outcome, Failure) and not outcome.kind.endswith("Timeout")
            if pause_s is None or not (code == wire.PARKED or lost):
                break
            # H5: between two tries it is not parked; when our own gate closes it parks at once.
            await self._pause(entry, pause_s)
        await self._wait_at_gate(entry, lambda: not self._gate.holds_replies)
        self._settle(entry, outcome, row=headers.get(wire.ROW))
        return outcome

    async def _pause(self, entry: Entry, pause_s: float) -> None:
        self._move(entry, RETRY)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gate.until(lambda: self._gate.closed), pause_s)

    # -- calls to other servers ----------------------------------------------------------------

    async def _resource_call(
        self, entry: Entry, request: httpx.Request, body: bytes
    ) -> Reply | Failure:
        """One at a time to each server: the expected revision is that of the call before."""
        async with self._run.locks.setdefault(entry.server, asyncio.Lock()):
            await self._wait_at_gate(entry, lambda: not self._gate.still)
            outcome, headers = await self._until_known(entry, request, body)
            await self._wait_at_gate(entry, lambda: not self._gate.still)
            self._check_refusal(outcome)
            revision = headers.get(wire.REVISION, "")
            self._settle(entry, outcome, revision=int(revision) if revision.isdigit() else None)
        return outcome

    async def _until_known(
        self, entry: Entry, request: httpx.Request, body: bytes
    ) -> tuple[Reply | Failure, httpx.Headers]:
        """Repeats a call whose connection broke, with the same request id: a server that applied
        it gives the recorded answer. If it stays unknown whether it was applied, start over."""
        maybe_applied, kind = False, ""
        for pause_s in _pauses():
            outcome, headers, never_sent = await self._send(entry, RESOURCE, request, body)
            if isinstance(outcome, Reply):
                return outcome, headers
            maybe_applied, kind = maybe_applied or not never_sent, outcome.kind
            if kind.endswith("Timeout") and not never_sent:
                # The loop set this time-out and is told; what the server did is unknown (H5).
                self._run.uncertain = True
                return outcome, headers
            if pause_s is not None:
                self._move(entry, RETRY)
                await asyncio.sleep(pause_s)
        if maybe_applied:
            detail = f"{entry.method} {entry.server}{entry.route}: {kind}: unknown outcome"
            raise self._start_over(wire.UNCERTAIN, detail)
        return outcome, headers

    # -- one try -------------------------------------------------------------------------------

    async def _send(
        self, entry: Entry, place: str, request: httpx.Request, body: bytes
    ) -> tuple[Reply | Failure, httpx.Headers, bool]:
        """The outcome, the reply's headers, and whether it is certain that nothing was sent."""
        self._move(entry, place)
        try:
            transport = self._neighbours.transports[entry.server]
            response = await transport.handle_async_request(self._outgoing(entry, request, body))
            content = await response.aread()
            await response.aclose()
        except httpx.TransportError as error:
            failure = Failure(type(error).__name__, str(error))
            return failure, httpx.Headers(), isinstance(error, _NEVER_SENT)
        if wire.ROW in response.headers or wire.REVISION in response.headers:
            self._neighbours.ours.add(entry.server)
        kept = [(k, v) for k, v in response.headers.multi_items() if k not in _OF_THE_CONNECTION]
        return Reply(response.status_code, tuple(kept), content), response.headers, False

    def _outgoing(self, entry: Entry, request: httpx.Request, body: bytes) -> httpx.Request:
        base = self._neighbours.urls[entry.server]
        url = base.copy_with(raw_path=base.raw_path.rstrip(b"/") + request.url.raw_path)
        headers = httpx.Headers(request.headers)
        headers["host"] = url.netloc.decode("ascii")
        headers.update(self._identity(entry))
        return httpx.Request(
            request.method, url, headers=headers, content=body, extensions=request.extensions
        )

    def _identity(self, entry: Entry) -> dict[str, str]:
        run, journal = self._run, self._run.journal
        headers = {
            wire.ROLLOUT: run.rollout_id,
            wire.RUN: str(run.run),
            wire.LINEAGE: str(run.lineage),
        }
        if entry.call is not None:
            headers[wire.CALL] = call_id(entry.call)
            if (after := journal.after()) is not None:
                headers[wire.AFTER] = call_id(after)
        else:
            headers[wire.REQUEST] = f"{run.lineage}.{entry.number}"
            if not run.uncertain:
                headers[wire.EXPECT_REVISION] = str(journal.revisions.get(entry.server, 0))
        return headers

    # -- bookkeeping ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _place(self, entry: Entry) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            # The loop cut its own call off: nobody knows what became of it (H5).
            self._run.uncertain = True
            raise
        finally:
            self._run.places.pop(entry.number, None)
            self._gate.stir()

    def _move(self, entry: Entry, place: str) -> None:
        self._run.places[entry.number] = place
        self._gate.stir()

    async def _wait_at_gate(self, entry: Entry, condition: Callable[[], bool]) -> None:
        if condition():
            return
        self._move(entry, GATE)
        if self._run.parked(replies_held=self._gate.holds_replies):
            self._run.timers.stop()
        try:
            await self._gate.until(condition)
        finally:
            self._run.timers.go_on()

    def _settle(
        self,
        entry: Entry,
        outcome: Reply | Failure,
        *,
        row: str | None = None,
        revision: int | None = None,
    ) -> None:
        run = self._run
        run.journal.settle(entry, outcome, run.run.attempt_index, row=row, revision=revision)
        self._gate.touch()

    def _check_refusal(self, outcome: Reply | Failure) -> str | None:
        """The code of a refusal by one of our servers. Raises if the rollout has to start over."""
        code = _code_of(outcome)
        if code in _START_OVER:
            raise self._start_over(code, "a server refused to go on with this history")
        return code

    def _start_over(self, code: str, detail: str) -> httpx.TransportError:
        return httpx.TransportError(str(self._run.end(code, detail)))


def _pauses() -> list[float | None]:
    """The pause after each try; None after the last one."""
    pauses = [PAUSES_S[min(n, len(PAUSES_S) - 1)] for n in range(MAX_TRIES - 1)]
    return [*pauses, None]


def _code_of(outcome: Reply | Failure) -> str | None:
    if isinstance(outcome, Failure) or outcome.status != httpx.codes.CONFLICT:
        return None
    try:
        code = json.loads(outcome.body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None
    return code if isinstance(code, str) else None

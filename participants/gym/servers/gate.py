"""The hold of one Gym server: fence, lease, recorded answers, and the HOLD table (specs/hold.md).

A gate knows nothing of HTTP, nor of what its server keeps: that is a `Part`. Everything that
changes state is synchronous, so that a message is either not seen yet or has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

from attrs import evolve, frozen

from fsm import hold, strict
from fsm.hold import HOLD
from fsm.machine import Machine
from fsm.outcome import Refused
from fsm.storing import Fence, FileEntry
from participants.gym import wire
from participants.gym.servers.lease import Clock, Lease
from participants.gym.servers.parts import Export, Part, place_of, read_part, write_part
from storage.jsontext import canonical

log = logging.getLogger("quiesce.gym.gate")

MAX_NAMES = 100  # blockers named in one answer
# What blocks when this much of the prepare time-out is over is given up, if that is allowed: the
# rest is for the answer to arrive in.
GIVE_UP_SHARE = 0.9  # of prepare's time, after which stragglers are left out (H8)
RECOUNT_S = 0.01  # counting thousands of blockers after each change would stall the server
_CLOSED_TO_CALLS = (hold.CLOSING, hold.FENCING)
_FROM_A_RESTORE = (hold.FENCING, hold.FENCED, hold.STAGED)
_RELEASES = (hold.RESUME, hold.ROLLBACK)
M = TypeVar("M", bound=wire.Control)
Work = Callable[[M], Coroutine[Any, Any, wire.Report]]


@frozen
class _Answer:
    """H2: an operation of the present fence, its arguments, and its answer to come."""

    arguments: bytes
    task: asyncio.Task[wire.Report]


class Gate:
    """Opens and closes one server.

    root: the snapshot root as this server sees it. clock: in place of the event loop's (tests).
    """

    def __init__(self, part: Part, root: Path, *, clock: Clock | None = None) -> None:
        self.part = part
        self._instance = uuid4().hex  # a server that was started again is another one
        self.drain_mode: Literal["calls", "none"] = "calls"
        self.fence: Fence | None = None
        self.moved = False
        self._root = root
        self._lease = Lease(self._lapse_if_due, clock)
        self._place = place_of(part.kind, part.name)
        self._machine = Machine(HOLD)
        self._answers: dict[str, _Answer] = {}
        self._ended: str | None = None  # how the present fence ended: an event of HOLD
        self._ended_restore = False
        self._give_up_at: float | None = None
        self._turned = asyncio.Event()  # this gate changed; replaced each time
        self._stirred = asyncio.Event()  # something behind it did
        self._stop_writing = threading.Event()
        self._writing: asyncio.Task[tuple[FileEntry, ...]] | None = None

    # -- for the server behind the gate --------------------------------------------------------

    @property
    def phase(self) -> str:
        return self._machine.state

    @property
    def closed(self) -> bool:
        """No new work: from prepare or fence to release."""
        return self.phase != hold.OPEN

    @property
    def still(self) -> bool:
        """Nothing at all may move: from quiet to release."""
        return self.closed and self.phase not in _CLOSED_TO_CALLS

    @property
    def holds_replies(self) -> bool:
        """No reply of a model call is handed on (drain="none": from close on; H5)."""
        return self.still or (self.closed and self.drain_mode == "none")

    def capabilities(
        self,
        mode: Literal["export", "stateless", "restart_only"],
        isolation: Literal["per_session", "shared"],
    ) -> wire.Capabilities:
        """What the server says of itself. One worker: its state is in this process."""
        return wire.Capabilities(
            schema_version=wire.SCHEMA_VERSION,
            kind=self.part.kind,
            name=self.part.name,
            mode=mode,
            isolation=isolation,
            num_workers=1,
            phase=self.phase,
            instance=self._instance,
            live_runs=self.part.live_runs(),
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition of this gate: it is looked at again whenever the gate changes."""
        while not condition():
            await self._turned.wait()

    async def until_open(self) -> None:
        await self.until(lambda: not self.closed)

    def hold_replies(self) -> None:
        """From now on as with drain="none": for rollouts that would miss the deadline."""
        self.drain_mode = "none"
        self._turn()

    def stir(self) -> None:
        """Something went on or stopped: what a drain waits for may have changed."""
        self._stirred.set()

    def touch(self, *, included: bool = True) -> None:
        """Something changed. Under a hold that is quiet, a change to what is in the part makes
        the attempt void (S4, H9)."""
        self.moved = self.moved or (included and self.still)
        self.stir()

    # -- operations ----------------------------------------------------------------------------

    def status(self) -> wire.Report:
        """Where it stands. Changes nothing, whoever asks."""
        self._lapse_if_due()
        return self._report(blockers=self.part.blockers() if self.closed else ())

    async def prepare(self, message: wire.Prepare) -> wire.Report:
        """Accept no new work. Answers at once; `drain` waits."""

        async def close(message: wire.Prepare) -> wire.Report:
            self.drain_mode = message.drain
            self._close(hold.PREPARE, message.lease_s)
            if message.straggler == "start_over":
                self._give_up_at = self._lease.now_s() + GIVE_UP_SHARE * message.timeout_s
            return self._report()

        return await self._once(hold.PREPARE, message, close)

    async def fence_off(self, message: wire.FenceOff) -> wire.Report:
        """Before a restore: hold what lives here. Answers at once; `drain` waits (R4)."""

        async def close(message: wire.FenceOff) -> wire.Report:
            self.drain_mode = "calls"
            self._close(hold.FENCE, message.lease_s)
            return self._report()

        return await self._once(hold.FENCE, message, close, take_over=message.take_over)

    async def drain(self, message: wire.Drain) -> wire.Report:
        """Wait up to timeout_s until nothing moves. A poll: it may be repeated freely."""
        self._admit("drain", message)
        if self.phase in (hold.OPEN, hold.STAGED):
            raise self._wrong_phase("drain")
        if not self.still:
            self.part.freeze()
            await self._wait_for_quiet(message)
        blockers = () if self.still else self.part.blockers()
        if not blockers and not self.still:
            self._machine.fire(hold.QUIET)
            self._turn()
        return self._report(blockers=blockers)

    async def renew(self, message: wire.Renew) -> wire.Report:
        """Prolong the lease; says whether anything moved (S4)."""
        self._admit("renew", message)
        if not self.closed:
            raise self._wrong_phase("renew")
        self._lease.renew(message.lease_s)
        return self._report()

    async def commit(self, message: wire.Commit) -> wire.Report:
        """Write the part, fsynced, and answer with its files (H4)."""
        return await self._once(hold.COMMIT, message, self._commit)

    async def stage(self, message: wire.Stage) -> wire.Report:
        """Read, check and stage the saved part. Nothing is activated (R1, H10)."""
        return await self._once(hold.STAGE, message, self._stage)

    async def discard(self, message: wire.Discard) -> wire.Report:
        """These rollouts are not continued: they start over, or nobody knows them."""
        self._admit("discard", message)
        if self.phase != hold.STAGED:
            raise self._wrong_phase("discard")
        self.part.discard(message.rollouts)
        return self._report()

    async def resume(self, message: wire.Release) -> wire.Report:
        """Let go: after a save or an abort; after a restore this activates (R1)."""
        return await self._once(hold.RESUME, message, self._resume)

    async def rollback(self, message: wire.Release) -> wire.Report:
        """Drop what is staged, and let go on what lived."""
        return await self._once(hold.ROLLBACK, message, self._rollback)

    # -- H1: fences ----------------------------------------------------------------------------

    def _admit(self, event: str, message: wire.Control, *, take_over: bool = False) -> None:
        self._lapse_if_due()
        fence, known = message.fence, self.fence
        if known is not None and fence.root != known.root:
            if self.part.live_runs() and not take_over:
                raise Refused(
                    wire.FOREIGN_ROOT,
                    f"runs of root {known.root} live here: fence with take_over to end them",
                )
            self._adopt(fence)
        elif known is None or fence > known:
            self._adopt(fence)
        elif fence < known:
            raise Refused(wire.STALE_FENCE, f"{message.label}: a newer fence is known: {known}")
        elif self._ended is not None and not self._may_repeat(event):
            code = wire.LEASE_EXPIRED if self._ended == hold.LAPSE else wire.STALE_FENCE
            raise Refused(code, f"{message.label}: this hold has ended ({self._ended})")

    def _may_repeat(self, event: str) -> bool:
        """A release of what is released already is fine, unless it would claim something else
        than what happened: after a restore only what activated was resumed (R1)."""
        if event not in _RELEASES:
            return False
        if not self._ended_restore:
            return True
        activated = self._ended == hold.RESUME
        return activated == (event == hold.RESUME)

    def _adopt(self, fence: Fence) -> None:
        if self.closed:
            log.warning("hold of %s ended by the newer %s", self.fence, fence)
            self._let_go(hold.NEWER)
        self.fence, self._ended, self._ended_restore = fence, None, False
        self._answers.clear()
        self.moved = False

    # -- H2: recorded answers ------------------------------------------------------------------

    async def _once(
        self, event: str, message: M, work: Work[M], *, take_over: bool = False
    ) -> wire.Report:
        self._admit(event, message, take_over=take_over)
        # How long the sender waits is not part of what it asks for.
        arguments = canonical(strict.write(evolve(message, timeout_s=0.0)))
        known = self._answers.get(event)
        if known is None:
            task = asyncio.create_task(self._perform(event, message, work))
            task.add_done_callback(lambda task: self._forget_failure(event, task))
            self._answers[event] = known = _Answer(arguments, task)
        elif known.arguments != arguments:
            raise Refused(wire.CONFLICT, f"{event} was sent before with other arguments")
        return await asyncio.shield(known.task)

    async def _perform(self, event: str, message: M, work: Work[M]) -> wire.Report:
        self._admit(event, message)  # before this task began, a newer message may have come
        if HOLD.next(self.phase, event) is None:
            raise self._wrong_phase(event)
        return await work(message)

    def _forget_failure(self, event: str, task: asyncio.Task[wire.Report]) -> None:
        known = self._answers.get(event)
        failed = task.cancelled() or task.exception() is not None
        if failed and known is not None and known.task is task:
            del self._answers[event]

    def _wrong_phase(self, event: str) -> Refused:
        return Refused(wire.INVALID_PHASE, f"{event} is not possible while {self.phase}")

    # -- the work ------------------------------------------------------------------------------

    async def _wait_for_quiet(self, message: wire.Drain) -> None:
        now_s, end_s = self._lease.now_s, self._lease.now_s() + message.timeout_s
        while not self.still and (blockers := self.part.blockers()):
            if self._give_up_at is not None and now_s() >= self._give_up_at:
                self.part.give_up()
                break
            if now_s() >= end_s:
                break
            self._stirred.clear()
            wait_s = max(0.0, min(end_s, self._give_up_at or end_s) - now_s())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), wait_s)
            if len(blockers) > MAX_NAMES:
                await asyncio.sleep(RECOUNT_S)
            self._must_stand(message)

    async def _commit(self, message: wire.Commit) -> wire.Report:
        export = self.part.export(message)
        self.moved = False
        files = await self._write(message.folder, export)
        self._must_stand(message)
        self._machine.fire(hold.COMMIT)
        return self._report(evolve(export.report, files=files))

    async def _write(self, folder: str, export: Export) -> tuple[FileEntry, ...]:
        self._stop_writing = stop = threading.Event()
        write = asyncio.to_thread(write_part, self._root, folder, self._place, export.records, stop)
        self._writing = task = asyncio.create_task(write)
        return await task

    async def _stage(self, message: wire.Stage) -> wire.Report:
        checked = await asyncio.to_thread(
            read_part, self._root, message.snapshot, self._place, message.files, self.part.check
        )
        self._must_stand(message)
        report = self.part.stage(checked)
        self._machine.fire(hold.STAGE)
        return self._report(report)

    async def _resume(self, message: wire.Release) -> wire.Report:
        if self.phase == hold.STAGED:
            self.part.activate(message.fence.incarnation)
        elif message.activate:
            raise Refused(wire.INVALID_PHASE, f"{self._place} has nothing staged to activate")
        return await self._release(hold.RESUME)

    async def _rollback(self, _: wire.Release) -> wire.Report:
        return await self._release(hold.ROLLBACK)

    async def _release(self, event: str) -> wire.Report:
        writing = self._writing
        if self._ended is None:
            self._let_go(event)
        report = self._report()
        if writing is not None:  # H4: the rollouts go on, this answer waits
            await asyncio.wait([writing])
        return report

    def _must_stand(self, message: wire.Control) -> None:
        """After waiting: is this still the hold that the message belongs to?"""
        self._admit("", message)
        if not self.closed:
            raise self._wrong_phase("this")

    # -- closing and opening -------------------------------------------------------------------

    def _close(self, event: str, lease_s: float) -> None:
        self._machine.fire(event)
        self._lease.renew(lease_s)
        self.part.begin()
        self._turn()

    def _let_go(self, event: str) -> None:
        """Every way back to open: resume, rollback, lapse, newer. Never waits."""
        self._ended, self._ended_restore = event, self.phase in _FROM_A_RESTORE
        if self._ended_restore and event != hold.RESUME:
            self.part.drop()
        self._machine.fire(event)
        self._stop_writing.set()
        self._give_up_at = None
        self._lease.stop()
        self._turn()

    def _lapse_if_due(self) -> None:
        if self.closed and self._lease.over:
            log.warning("hold of %s ended: its lease was not renewed", self.fence)
            self._let_go(hold.LAPSE)

    def _turn(self) -> None:
        self._turned.set()
        self._turned = asyncio.Event()
        self.stir()

    def _report(
        self, given: wire.Report | None = None, blockers: Sequence[str] = ()
    ) -> wire.Report:
        return evolve(
            given or wire.Report(phase=self.phase),
            phase=self.phase,
            fence=self.fence,
            moved=self.moved,
            quiet=not blockers and not (self.closed and not self.still),
            blockers=tuple(blockers[:MAX_NAMES]),
            blocker_count=len(blockers),
        )

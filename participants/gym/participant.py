"""Gym as one participant: the engine's hooks, turned into calls of one or more NemoGym actors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fsm import hold
from fsm.outcome import NotReleased, Refused, SnapshotRejected
from fsm.participant import Attempt, Facts, Participant, Restore
from fsm.storing import FileEntry, SavedPart
from participants.gym import inspection, merge, wire
from participants.gym.actor import NemoGymActor
from participants.gym.client import past_failures, together
from participants.gym.remote import in_reach

DISCOVER_TIMEOUT_S = 30.0
# What each finished step makes of a server: a hold in another phase does not stand (S4).
CLOSED = frozenset({hold.CLOSING, hold.HELD, hold.COMMITTED})
QUIET = frozenset({hold.HELD, hold.COMMITTED})
FENCED = frozenset({hold.FENCING, hold.FENCED, hold.STAGED})


class Gym(Participant):
    """All Gym servers, by way of their NemoGym actors (in process, or Ray handles).

    Each actor has servers of its own; names are unique over all of them.
    """

    name = "gym"
    restore_step = "restore_gym"

    def __init__(
        self, actors: Sequence[Any], *, discover_timeout_s: float = DISCOVER_TIMEOUT_S
    ) -> None:
        if not actors:
            raise ValueError("Gym needs at least one NemoGym actor")
        self._actors = {f"gym actor {number}": in_reach(one) for number, one in enumerate(actors)}
        self._discover_timeout_s = discover_timeout_s
        self._phases: frozenset[str] = frozenset()

    async def describe(self) -> Mapping[str, Any]:
        """The servers and what each can do, without what changes while they live."""
        found = await self._ask(
            lambda actor: actor.discover_checkpoint_capabilities(self._discover_timeout_s)
        )
        return {
            name: {"kind": one.kind, "mode": one.mode, "isolation": one.isolation}
            for name, one in sorted(found.items())
        }

    # -- save ----------------------------------------------------------------------------------

    async def prepare(self, attempt: Attempt) -> None:
        self._phases = CLOSED
        message = wire.Prepare(
            **_control(attempt),
            lease_s=attempt.lease_s,
            drain=attempt.drain,
            straggler=attempt.straggler,
        )
        await self._ask(lambda actor: actor.prepare_checkpoint(message))

    async def drain(self, attempt: Attempt) -> None:
        message = wire.Drain(**_control(attempt))
        await self._ask(lambda actor: actor.drain(message))
        self._phases = QUIET

    async def commit(self, attempt: Attempt) -> Facts:
        message = wire.Commit(**_control(attempt), folder=attempt.folder)
        reports = await self._ask(lambda actor: actor.commit_checkpoint(message))
        self._phases = frozenset({hold.COMMITTED})
        for report in reports.values():
            attempt.note(report.files)
        return merge.commit_facts(reports)

    # -- restore -------------------------------------------------------------------------------

    async def fence(self, restore: Restore) -> None:
        """Hold everything. A start from nothing stages nothing, so that `resume` closes the runs
        of older incarnations as it does after a restore (R4)."""
        self._phases = FENCED
        message = wire.FenceOff(
            **_control(restore), lease_s=restore.lease_s, take_over=restore.allow_foreign
        )
        await self._ask(lambda actor: actor.fence(message))
        if restore.snapshot is None:
            await self._stage(restore, "", ())

    async def restore(self, restore: Restore) -> Facts:
        if restore.snapshot is None:
            return {}
        files = restore.saved().files()
        reports = await self._stage(restore, restore.snapshot.id, files)
        lost = [entry.path for entry in files if not _owned(entry, reports)]
        if lost:
            why = "no server of this Gym owns it: start the snapshot's servers under their names"
            raise SnapshotRejected(restore.snapshot.id, merge.some(lost), why)
        saved = restore.snapshot.facts.get(self.name, {})
        return merge.restore_facts(reports, saved.get("restarts", {}))

    async def take_over(self, restore: Restore) -> None:
        self._phases = frozenset({hold.STAGED})
        calls = {name: one.take_over(restore.fence) for name, one in self._actors.items()}
        await together(calls)

    async def reconcile(self, restore: Restore) -> None:
        """Drop what the controller's join leaves over, and what starts over by Gym's own word."""
        join = restore.facts.get("controller", {}).get("discard", ())
        own = restore.facts.get(self.name, {}).get("_restarts", {})
        leftovers = tuple(sorted({*join, *own}))
        if leftovers:
            message = wire.Discard(**_control(restore), rollouts=leftovers)
            await self._ask(lambda actor: actor.discard_continuations(message))

    async def rollback(self, restore: Restore) -> None:
        message = wire.Release(**_control(restore))
        await self._let_go(lambda actor: actor.rollback(message))

    async def _stage(
        self, restore: Restore, snapshot: str, files: tuple[FileEntry, ...]
    ) -> dict[str, wire.Report]:
        message = wire.Stage(**_control(restore), snapshot=snapshot, files=files)
        try:
            reports = await self._ask(lambda actor: actor.restore_checkpoint(message))
        except Refused as refusal:
            if refusal.code != wire.BAD_STATE:
                raise
            raise SnapshotRejected(snapshot, self.name, refusal.detail) from refusal
        self._phases = frozenset({hold.STAGED})
        return reports

    # -- both ----------------------------------------------------------------------------------

    async def renew(self, attempt: Attempt | Restore) -> None:
        """Refused("hold_lost") if a server is in another phase, held by another, or has moved."""
        phases = self._phases  # as they are when we ask: a step may end while we wait
        # A lease is at least three renewals long, so that one that is late does no harm (H3).
        message = wire.Renew(
            fence=attempt.fence,
            label=attempt.label,
            timeout_s=attempt.lease_s / 3,
            lease_s=attempt.lease_s,
        )
        reports = await self._ask(lambda actor: actor.renew(message))
        attempt.waiting_for(merge.waited_for(reports))
        if problems := merge.hold_problems(reports, attempt.fence, phases):
            raise Refused("hold_lost", merge.some(problems))

    async def resume(self, attempt: Attempt | Restore) -> None:
        message = wire.Release(**_control(attempt), activate=isinstance(attempt, Restore))
        await self._let_go(lambda actor: actor.resume_checkpoint(message))

    @classmethod
    def inspect(cls, saved: SavedPart) -> Mapping[str, Any]:
        """Where each saved rollout stands. Raises `SnapshotRejected` for a broken reference."""
        return inspection.part(saved)

    # -- the actors ----------------------------------------------------------------------------

    async def _ask(
        self, call: Callable[[NemoGymActor], Coroutine[Any, Any, dict[str, Any]]]
    ) -> dict[str, Any]:
        """Every actor's answers by name of server; the first failure ends the others."""
        answers = await together({name: call(actor) for name, actor in self._actors.items()})
        merged: dict[str, Any] = {}
        for answer in answers.values():
            if twice := merged.keys() & answer.keys():
                raise Refused("duplicate_server", f"two actors have {min(twice)!r}: rename one")
            merged |= answer
        return merged

    async def _let_go(self, call: Callable[[NemoGymActor], Coroutine[Any, Any, None]]) -> None:
        failed = await past_failures({name: call(actor) for name, actor in self._actors.items()})
        if failed:
            silent = (
                error.names if isinstance(error, NotReleased) else frozenset({name})
                for name, error in failed.items()
            )
            detail = "; ".join(error.detail for error in failed.values())
            raise NotReleased(frozenset[str]().union(*silent), detail)


def _control(attempt: Attempt | Restore) -> dict[str, Any]:
    """What every control message carries. It ends a little before the step's own deadline, so
    that an answer that names who is late still arrives."""
    left_s = attempt.remaining_s()
    return {
        "fence": attempt.fence,
        "label": attempt.label,
        "timeout_s": left_s - min(1.0, left_s / 10),
    }


def _owned(entry: FileEntry, reports: Mapping[str, wire.Report]) -> bool:
    parts = entry.path.split("/")
    return len(parts) > 3 and parts[2] in reports and entry.path.startswith(f"gym/{parts[1]}/")

"""The base class of everything that takes part in a snapshot, and what its hooks are given.

A participant overrides the hooks it needs; the engine skips the others. Hooks are coroutines.
They answer by returning (done), by raising `Refused` (no, and why), `Unavailable` (a server is
away), `SnapshotRejected` (in a restore), `OSError` or `TimeoutError` (I/O). Anything else that
they raise is a bug and reaches the trainer as `InvariantError`, after everyone has been released.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar

from attrs import frozen

from fsm.outcome import Anchor
from fsm.storing import Draft, Fence, FileEntry, PartWriter, SavedPart, SavedSnapshot

T = TypeVar("T")
Facts = Mapping[str, Any]


class Operation(Protocol):
    """What the engine offers to a hook during a save or a restore."""

    @property
    def fence(self) -> Fence: ...
    @property
    def label(self) -> str: ...
    @property
    def lease_s(self) -> float: ...
    @property
    def facts(self) -> Mapping[str, Facts]: ...
    @property
    def unreleased(self) -> Mapping[str, frozenset[str]]: ...
    def remaining_s(self) -> float: ...
    def waiting_for(self, participant: str, names: Iterable[str]) -> None: ...
    async def in_thread(self, function: Callable[[], T]) -> T: ...


@frozen
class Context:
    """What a hook sees of a save or a restore alike.

    fence: stamp it on every message to another process (H1). label: for people and logs.
    lease_s: how long a hold may last without a renewal. facts: what earlier steps of other
    participants returned. unreleased: who has not confirmed a release yet.
    """

    participant: str
    _operation: Operation

    @property
    def fence(self) -> Fence:
        return self._operation.fence

    @property
    def label(self) -> str:
        return self._operation.label

    @property
    def lease_s(self) -> float:
        return self._operation.lease_s

    @property
    def facts(self) -> Mapping[str, Facts]:
        return self._operation.facts

    @property
    def unreleased(self) -> Mapping[str, frozenset[str]]:
        return self._operation.unreleased

    def remaining_s(self) -> float:
        """Seconds until the deadline of the running step. Never negative."""
        return self._operation.remaining_s()

    def waiting_for(self, names: Iterable[str]) -> None:
        """Say what is waited for (servers, rollouts): `status` and the log show it."""
        self._operation.waiting_for(self.participant, names)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run what blocks. A thread cannot be stopped: when the step's deadline passes it is left
        behind, and attempts are skipped until it has ended (S3)."""
        return await self._operation.in_thread(function)


@frozen
class Attempt(Context):
    """One save, as one participant sees it.

    drain, straggler: the configuration's choices. anchor: the trainer checkpoint that the snapshot
    belongs to. last_saved: fence of the newest snapshot known to be published in this process.
    """

    _draft: Draft | None
    drain: Literal["calls", "none"] = "calls"
    straggler: Literal["abort", "start_over"] = "abort"
    anchor: Anchor | None = None
    last_saved: Fence | None = None

    @property
    def folder(self) -> str:
        """The unpublished folder's name below the root, for servers that write themselves."""
        return self._open_draft().name

    def part(self) -> PartWriter:
        """This participant's own folder in the snapshot; use it as `async with`."""
        return self._open_draft().part(self.participant)

    def note(self, files: Iterable[FileEntry]) -> None:
        """Enter files that another process wrote into this participant's folder."""
        self._open_draft().note(tuple(files))

    def _open_draft(self) -> Draft:
        if self._draft is None:
            raise ValueError("there is no folder yet in preflight, and none any more after abort")
        return self._draft


@frozen
class Restore(Context):
    """One restore, as one participant sees it; its fence is not the snapshot's own (R3)."""

    _snapshot: SavedSnapshot | None
    allow_foreign: bool = False

    @property
    def snapshot(self) -> SavedSnapshot | None:
        """The snapshot, verified; None in a start from nothing."""
        return self._snapshot

    def saved(self) -> SavedPart:
        """This participant's own folder. Raises ValueError in a start from nothing."""
        if self._snapshot is None:
            raise ValueError("there is no snapshot: this is a start from nothing")
        return self._snapshot.part(self.participant)


class Participant:
    """Something whose state belongs into the snapshot.

    name: its folder in the snapshot, its key in facts and outcomes. format_version: of what it
    writes; a snapshot of another version is refused with both numbers.
    called_by / calls: names of participants that call this one, or that it calls. Stopping goes
    from callers to callees, opening from callees to callers (S5).
    restore_step: the step of RESTORE in which `restore` runs.
    """

    name: str
    format_version: int = 1
    called_by: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset()
    restore_step: str = "restore_gym"

    # -- both ----------------------------------------------------------------------------------

    async def describe(self) -> Mapping[str, Any]:
        """Facts of the topology that must be equal at restore; part of the fingerprint."""
        return {}

    async def resume(self, attempt: Attempt | Restore) -> None:
        """Let go. After a save or an abort: everyone continues. After a restore: activate what is
        staged. Idempotent; tries everyone; raises `NotReleased` with the names that are silent."""

    async def renew(self, attempt: Attempt | Restore) -> None:
        """Prolong the lease. Raises `Refused` if a hold ended or anything moved under it (S4)."""

    # -- save ----------------------------------------------------------------------------------

    async def preflight(self, attempt: Attempt) -> None:
        """Before anybody is told: raise `Skip` to leave this attempt out (S7)."""

    async def pause(self, attempt: Attempt) -> None:
        """Send no new work."""

    async def prepare(self, attempt: Attempt) -> None:
        """Accept no new work; begin to park. Returns at once; `drain` waits."""

    async def drain(self, attempt: Attempt) -> None:
        """Return when nothing moves any more."""

    async def commit(self, attempt: Attempt) -> Facts | None:
        """Write the part, fsynced. Returns facts for the manifest and for later steps."""

    async def cut(self, attempt: Attempt) -> Facts | None:
        """As commit, but under the data-plane barrier: no call to Gym in here (S3)."""

    # -- restore -------------------------------------------------------------------------------

    async def fence(self, restore: Restore) -> None:
        """Hold what still lives, as prepare and drain do; refuse all older incarnations."""

    async def restore(self, restore: Restore) -> Facts | None:
        """Read, validate and stage the saved part. Nothing is activated before `resume` (R1).
        Not called in a start from nothing."""

    async def take_over(self, restore: Restore) -> None:
        """Another process fenced and restored; this one goes on (R8). Set what later hooks look
        for in memory; `restore.facts` has what the first process returned."""

    async def reconcile(self, restore: Restore) -> None:
        """After the controller's join: drop what no rollout names; `restore.facts` has the join."""

    async def rollback(self, restore: Restore) -> None:
        """Drop what was staged, lift the fence, let go on what lived."""

    # -- offline -------------------------------------------------------------------------------

    @classmethod
    def inspect(cls, saved: SavedPart) -> Mapping[str, Any]:  # noqa: ARG003
        """What the part holds, for `quiesce show` and `verify`; raises `SnapshotRejected`."""
        return {}


class Elsewhere(Participant):
    """Stands for a participant that lives in another process, in an engine that only begins a
    restore (R8): its name, its place in the order and what must be equal are known, no more."""

    def __init__(
        self,
        name: str,
        *,
        format_version: int = 1,
        calls: Iterable[str] = (),
        called_by: Iterable[str] = (),
        topology: Facts | None = None,
    ) -> None:
        self.name, self.format_version = name, format_version
        self.calls, self.called_by = frozenset(calls), frozenset(called_by)
        self._topology = dict(topology or {})

    async def describe(self) -> Facts:
        return self._topology

    async def preflight(self, attempt: Attempt) -> None:  # noqa: ARG002
        raise ValueError(f"{self.name!r} lives in another process: save there")


Hook = Callable[[Any], Awaitable[Any]]
HOOKS = (
    "preflight", "pause", "prepare", "drain", "commit", "cut", "renew", "resume",
    "fence", "restore", "take_over", "reconcile", "rollback", "describe",
)  # fmt: skip
RESTORE_STEPS = ("load_data_plane", "restore_gym", "load_controller")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def hook_of(participant: Participant, name: str) -> Hook | None:
    """The participant's own hook, or None where it does not override the base class."""
    if getattr(type(participant), name) is getattr(Participant, name):
        return None
    hook: Hook = getattr(participant, name)
    return hook


def ranks(participants: Iterable[Participant]) -> list[list[Participant]]:
    """Participants from callers to callees: each rank calls only later ones (S5).

    Raises ValueError for two of one name, an unknown name, a cycle, and what is no participant.
    """
    by_name: dict[str, Participant] = {}
    for one in participants:
        _check(one)
        if one.name in by_name:
            raise ValueError(f"two participants are called {one.name!r}; give one another name")
        by_name[one.name] = one
    callers: dict[str, set[str]] = {name: set() for name in by_name}
    for one in by_name.values():
        for other in one.called_by | one.calls:
            if other not in by_name:
                known = ", ".join(sorted(by_name))
                raise ValueError(
                    f"participant {one.name!r} names {other!r}, which is not one of: {known}"
                )
        callers[one.name] |= one.called_by
        for callee in one.calls:
            callers[callee].add(one.name)
    return _layers(by_name, callers)


def _check(one: object) -> None:
    """What would fail in the first save fails at construction, with what to do."""
    if not isinstance(one, Participant):
        raise ValueError(f"{one!r} is no participant: give an instance of a Participant subclass")
    kind = type(one).__name__
    name = getattr(one, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{kind}.name is {name!r}: set it to letters, digits and '_.-'; it names a folder"
        )
    if one.restore_step not in RESTORE_STEPS:
        raise ValueError(f"{kind}.restore_step is {one.restore_step!r}, not of {RESTORE_STEPS}")
    for hook in HOOKS:
        if not inspect.iscoroutinefunction(getattr(one, hook)):
            raise ValueError(f"{kind}.{hook} is not a coroutine: write `async def {hook}`")


def _layers(
    by_name: Mapping[str, Participant], callers: dict[str, set[str]]
) -> list[list[Participant]]:
    result: list[list[Participant]] = []
    placed: set[str] = set()
    while len(placed) < len(by_name):
        free = sorted(n for n in by_name if n not in placed and callers[n] <= placed)
        if not free:
            cycle = ", ".join(sorted(by_name.keys() - placed))
            raise ValueError(f"these participants call each other in a circle: {cycle}")
        result.append([by_name[name] for name in free])
        placed |= set(free)
    return result

"""What the tests of the trainer's side of Gym share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from attrs import define, field

from fsm.outcome import Anchor
from fsm.participant import Attempt, Restore
from fsm.storing import Fence, FileEntry
from participants.gym import wire
from participants.gym.actor import NemoGymActor
from participants.gym.fake import TOKEN, FakeGym

T = TypeVar("T")
FENCE = Fence("root", 3, 7)
LABEL = "a test"


def fake_gym() -> FakeGym:
    """Two policy servers, two agents, one resource server, in no helpful order."""
    return FakeGym(
        ("resource", "tools"),
        ("agent", "a0"),
        ("policy", "p0"),
        ("agent", "a1"),
        ("policy", "p1"),
    )


def actor_of(gym: FakeGym) -> NemoGymActor:
    return NemoGymActor(gym.servers, TOKEN, transport=gym, retry_pauses_s=(0.0, 0.0))


def control(timeout_s: float = 5.0, fence: Fence = FENCE) -> dict[str, Any]:
    return {"fence": fence, "label": LABEL, "timeout_s": timeout_s}


def prepare(timeout_s: float = 5.0, fence: Fence = FENCE) -> wire.Prepare:
    return wire.Prepare(**control(timeout_s, fence), lease_s=60.0)


def drain(timeout_s: float = 5.0) -> wire.Drain:
    return wire.Drain(**control(timeout_s))


def commit(timeout_s: float = 5.0) -> wire.Commit:
    return wire.Commit(**control(timeout_s), folder="tmp_1")


def release(timeout_s: float = 5.0, fence: Fence = FENCE) -> wire.Release:
    return wire.Release(**control(timeout_s, fence))


def continuation(rollout: str, call: str | None = "call-2", **revisions: int) -> wire.Continuation:
    return wire.Continuation(1, rollout, 0, rollout, call, revisions)


def entry(path: str) -> FileEntry:
    return FileEntry(path, 1, "0" * 64)


def run(main: Callable[[], Any]) -> Any:
    """A test's coroutine, with a limit so that a hang fails here and not at the runner's."""
    return asyncio.run(asyncio.wait_for(main(), 20))


async def until(condition: Callable[[], bool]) -> None:
    """Lets other tasks run until the condition holds; `run` limits how long that may take."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


@define
class Operation:
    """The engine's side of an Attempt or Restore."""

    fence: Fence = FENCE
    label: str = LABEL
    lease_s: float = 60.0
    facts: dict[str, Mapping[str, Any]] = field(factory=dict)
    unreleased: dict[str, frozenset[str]] = field(factory=dict)
    left_s: float = 5.0
    waited_for: list[str] = field(factory=list)

    def remaining_s(self) -> float:
        return self.left_s

    def waiting_for(self, participant: str, names: Iterable[str]) -> None:
        self.waited_for = list(names)

    async def in_thread(self, function: Callable[[], T]) -> T:
        return function()


@define
class Draft:
    name: str = "tmp_1"
    id: str = "snapshot_1"
    fence: Fence = FENCE
    files: list[FileEntry] = field(factory=list)

    def part(self, folder: str) -> Any:
        raise AssertionError("Gym's servers write their parts themselves")

    def note(self, files: tuple[FileEntry, ...]) -> None:
        self.files.extend(files)


@define
class Part:
    entries: tuple[FileEntry, ...] = ()

    def files(self) -> tuple[FileEntry, ...]:
        return self.entries


@define
class Snapshot:
    """A published snapshot, as far as Gym looks at it."""

    entries: tuple[FileEntry, ...] = ()
    facts: dict[str, Any] = field(factory=dict)
    id: str = "snapshot_1"
    anchor: Anchor | None = None

    def part(self, folder: str) -> Part:
        assert folder == "gym"
        return Part(self.entries)


def attempt_of(operation: Operation, draft: Draft | None = None) -> Attempt:
    return Attempt("gym", operation, draft or Draft())


def restore_of(operation: Operation, snapshot: Any = None) -> Restore:
    return Restore("gym", operation, snapshot)

"""For each rule a participant that breaks it: the suite must say so, and what to change."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fsm.storing import FileEntry, SavedPart
from participants.conformance import rules
from participants.conformance.rules import Rule
from quiesce import Attempt, MemoryParticipant, Participant, Refused, Restore, Unavailable
from quiesce.testing import Conformance
from tests.conformance.plain import Plain, PlainSuite
from tests.conformance.test_memory import TestMemory as MemorySuite

count = itertools.count()
elsewhere: dict[str, list[str]] = {}


class TestPlain(PlainSuite):
    """What the wrong ones are derived from is right."""


# -- saving ------------------------------------------------------------------------------------


class Versionless(Plain):
    format_version = 0


class NewTopologyEachTime(Plain):
    async def describe(self) -> Mapping[str, Any]:
        return {"started": next(count)}


class Raises(Plain):
    async def commit(self, attempt: Attempt) -> None:
        raise KeyError("items")


class Refuses(Plain):
    async def prepare(self, attempt: Attempt) -> None:
        raise Refused("never")


class NeverQuiet(Plain):
    async def drain(self, attempt: Attempt) -> None:
        await asyncio.Event().wait()


class Empties(Plain):
    async def commit(self, attempt: Attempt) -> None:
        await super().commit(attempt)
        self.items.clear()


class NeverLetsGo(Plain):
    async def resume(self, attempt: Attempt | Restore) -> None:
        if isinstance(attempt, Restore):
            await super().resume(attempt)


class ClosesInCommit(Plain):
    """It is not told by `commit`, so a failure after it never releases it."""

    prepare = Participant.prepare  # not overridden

    async def commit(self, attempt: Attempt) -> None:
        self.open.clear()
        await super().commit(attempt)


class LetsGoWithAnError(Plain):
    async def resume(self, attempt: Attempt | Restore) -> None:
        await super().resume(attempt)
        raise Unavailable("somebody else")


class WritesOn(Plain):
    """A writer that no release stops."""

    path: Path | None = None

    async def commit(self, attempt: Attempt) -> None:
        async with attempt.part() as part:
            self.path = part.path
            part.document("items", self.items)

    async def add(self, item: str) -> None:
        await super().add(item)
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)


class StaysShut(Plain):
    shut = False

    async def resume(self, attempt: Attempt | Restore) -> None:
        await super().resume(attempt)
        self.shut = True

    async def add(self, item: str) -> None:
        if not self.shut:
            await super().add(item)


class ReleasedOnlyOnce(Plain):
    async def resume(self, attempt: Attempt | Restore) -> None:
        if self.open.is_set():
            raise Refused("not_held")
        await super().resume(attempt)


class HeldAlready(MemoryParticipant):
    async def prepare(self, attempt: Attempt) -> None:
        if self.is_held:
            raise Refused("busy")
        await super().prepare(attempt)


# -- hold --------------------------------------------------------------------------------------


class NeverHolds(Plain):
    async def prepare(self, attempt: Attempt) -> None:
        """Nothing."""


class WorksOn(Plain):
    async def add(self, item: str) -> None:
        self.items.append(item)


class CopiesTooEarly(WorksOn):
    async def prepare(self, attempt: Attempt) -> None:
        self.copy = list(self.items)

    async def commit(self, attempt: Attempt) -> None:
        async with attempt.part() as part:
            part.document("items", self.copy)


class WakesNobody(Plain):
    async def resume(self, attempt: Attempt | Restore) -> None:
        self.open = asyncio.Event()  # those who wait, wait for the old one
        await super().resume(attempt)


class ForgetsFences(MemoryParticipant):
    def _admit(self, fence: Any) -> None:
        self.active_fence = fence


class RenewsWhatIsOver(MemoryParticipant):
    async def renew(self, attempt: Attempt | Restore) -> None:
        if not self.is_held:
            self._machine.fire("prepare")


class ClosesOnlyWhatItHolds(MemoryParticipant):
    def _close(self, fence: Any) -> None:
        if self.is_held:
            super()._close(fence)


class ObeysOldReleases(MemoryParticipant):
    def _close(self, fence: Any) -> None:
        self.closed_fence = fence


class KeepsItsHold(MemoryParticipant):
    def _admit(self, fence: Any) -> None:
        if self.active_fence not in (None, fence):
            raise Refused("busy")
        super()._admit(fence)


class NoLease(MemoryParticipant):
    def _rearm(self, lease_s: float) -> None:
        """Held until somebody says otherwise."""


class CannotRenew(MemoryParticipant):
    renew = Participant.renew


class AnswersAfterItsLease(MemoryParticipant):
    def _expect(self, fence: Any, *phases: str) -> None:
        """Whatever comes is fine."""


class KeepsWhatItStaged(AnswersAfterItsLease):
    def _lapse(self) -> None:
        staged = self.staged
        super()._lapse()
        self.staged = staged


# -- restoring ---------------------------------------------------------------------------------


class RefusesItsOwn(Plain):
    async def restore(self, restore: Restore) -> None:
        raise Refused("unreadable")


class ForgetsTheLast(Plain):
    async def commit(self, attempt: Attempt) -> None:
        async with attempt.part() as part:
            part.document("items", self.items[:-1])


class ActivatesAtOnce(Plain):
    async def restore(self, restore: Restore) -> None:
        self.items = restore.saved().document("items")


class NoRollback(Plain):
    async def rollback(self, restore: Restore) -> None:
        """Nothing."""


class Adds(Plain):
    async def resume(self, attempt: Attempt | Restore) -> None:
        self.items, self.staged = self.items + (self.staged or []), None
        await super().resume(attempt)


class ActivatesAgain(Plain):
    async def resume(self, attempt: Attempt | Restore) -> None:
        if isinstance(attempt, Restore) and self.staged is not None:
            self.items = list(self.staged)
        self.open.set()


class NeedsASnapshot(Plain):
    async def resume(self, attempt: Attempt | Restore) -> None:
        if isinstance(attempt, Restore) and self.staged is None:
            raise Refused("nothing_staged")
        await super().resume(attempt)


class SavesWhatIsNew(Plain):
    saved = 0

    async def commit(self, attempt: Attempt) -> None:
        async with attempt.part() as part:
            part.document("items", self.items[self.saved :])
        self.saved = len(self.items)


class Client(Participant):
    """Reaches a server, and remembers whether a restore holds it."""

    name = "client"

    def __init__(self, server: MemoryParticipant) -> None:
        self.server, self.knows = server, False

    async def prepare(self, attempt: Attempt) -> None:
        await self.server.prepare(attempt)
        await self.server.drain(attempt)

    async def commit(self, attempt: Attempt) -> Mapping[str, Any]:
        return await self.server.commit(attempt)

    async def fence(self, restore: Restore) -> None:
        self.knows = True
        await self.server.fence(restore)

    async def restore(self, restore: Restore) -> Mapping[str, Any]:
        return await self.server.restore(restore)

    async def take_over(self, restore: Restore) -> None:
        self.knows = True

    async def renew(self, attempt: Attempt | Restore) -> None:
        if self.knows or isinstance(attempt, Attempt):
            await self.server.renew(attempt)

    async def resume(self, attempt: Attempt | Restore) -> None:
        if self.knows or isinstance(attempt, Attempt):
            await self.server.resume(attempt)

    async def rollback(self, restore: Restore) -> None:
        if self.knows:
            await self.server.rollback(restore)


class ClientSuite(Conformance):
    virtual_time = True
    plugin: type[Client] = Client

    async def make(self) -> Client:
        return self.plugin(MemoryParticipant("server"))

    async def in_another_process(self, one: Client) -> Client:
        return self.plugin(one.server)

    async def work(self, one: Client, number: int) -> None:
        one.server.work(f"turn {number}")

    async def observe(self, one: Client) -> list[str]:
        return list(one.server.items)

    async def is_held(self, one: Client) -> bool:
        return one.server.is_held


class TestClient(ClientSuite):
    """What the wrong one is derived from is right."""


class TakesNothingOver(Client):
    async def take_over(self, restore: Restore) -> None:
        """Nothing."""


# -- folder ------------------------------------------------------------------------------------


class WritesElsewhere(Plain):
    async def commit(self, attempt: Attempt) -> None:
        elsewhere[self.name] = list(self.items)

    async def restore(self, restore: Restore) -> None:
        self.staged = list(elsewhere[self.name])


class NotDurable(Plain):
    async def commit(self, attempt: Attempt) -> None:
        part = attempt.part()
        async with part:
            (part.path / "items.json").write_text("[]")
            digest = hashlib.sha256(b"[]").hexdigest()
        attempt.note([FileEntry(f"{self.name}/items.json", 2, digest)])


class WrongDigest(Plain):
    async def commit(self, attempt: Attempt) -> None:
        part = attempt.part()
        async with part:
            (part.path / "items.json").write_text("[]")
        attempt.note([FileEntry(f"{self.name}/items.json", 2, "0" * 64)])


class OpensInPlace(Plain):
    async def restore(self, restore: Restore) -> None:
        await super().restore(restore)
        (restore.saved().path / "items.json").write_text('["opened"]\n')


class CannotInspect(Plain):
    @classmethod
    def inspect(cls, saved: SavedPart) -> Mapping[str, Any]:
        return {"items": set(saved.document("items"))}


# -- the suites --------------------------------------------------------------------------------


class Blind(PlainSuite):
    async def observe(self, one: Plain) -> list[str]:
        return []


class WithoutHold(PlainSuite):
    no_hold = "as the author says"


class OnDisk(PlainSuite):
    virtual_time = False


def plain(plugin: type[Plain], suite: type[PlainSuite] = PlainSuite) -> type[Conformance]:
    return type(plugin.__name__, (suite,), {"plugin": plugin})


def server(plugin: type[MemoryParticipant]) -> type[Conformance]:
    async def make(self: Conformance) -> MemoryParticipant:
        return plugin("server")

    return type(plugin.__name__, (MemorySuite,), {"make": make})


def client(plugin: type[Client]) -> type[Conformance]:
    return type(plugin.__name__, (ClientSuite,), {"plugin": plugin})


Case = tuple[Rule, type[Conformance], str, tuple[str, ...]]
ABORT, FAILED = "abort_from_every_phase", "a_failed_restore_into_a_fresh_one"
CASES: list[Case] = [
    (rules.VISIBLE, Blind, "work_can_be_observed", ()),
    (rules.NAME, plain(Versionless), "name_and_version", ()),
    (rules.DESCRIBE, plain(NewTopologyEachTime), "describe_is_stable", ()),
    (rules.ERRORS, plain(Raises), "a_save_changes_nothing", ()),
    (rules.SAVES, plain(Refuses), "a_save_changes_nothing", ()),
    (rules.SAVES, plain(NeverQuiet), "a_save_changes_nothing", ()),
    (rules.HARMLESS, plain(Empties), "a_save_changes_nothing", ()),
    (rules.RELEASED, plain(NeverLetsGo), "a_save_changes_nothing", ()),
    (rules.RELEASED, plain(ClosesInCommit), ABORT, ("cut", "refused by another")),
    (rules.CONFIRMED, plain(LetsGoWithAnError), "a_save_changes_nothing", ()),
    (rules.UNCHANGED, plain(Empties), ABORT, ("cut", "refused by another")),
    (rules.SWEPT, plain(WritesOn, OnDisk), ABORT, ("cut", "refused by another")),
    (rules.GOES_ON, plain(StaysShut), "a_save_changes_nothing", ()),
    (rules.REPEATED_RELEASE, plain(ReleasedOnlyOnce), "a_repeated_release_changes_nothing", ()),
    (rules.REPEATED, server(HeldAlready), "messages_may_arrive_twice", ()),
    (rules.HELD, plain(NeverHolds), "held_from_prepare_to_resume", ()),
    (rules.MOVED, plain(WorksOn), "a_snapshot_is_of_one_instant", ()),
    (rules.INSTANT, plain(CopiesTooEarly, WithoutHold), "a_snapshot_is_of_one_instant", ()),
    (rules.WAITING, plain(WakesNobody), "a_snapshot_is_of_one_instant", ()),
    (rules.LATE, server(ForgetsFences), "a_late_message_of_a_save_does_not_hold", ("prepare",)),
    (rules.LATE, server(ForgetsFences), "a_late_fence_of_a_restore_does_not_hold", ()),
    (rules.LATE, server(RenewsWhatIsOver), "a_late_message_of_a_save_does_not_hold", ("renew",)),
    (rules.OVERTAKEN, server(ClosesOnlyWhatItHolds), "a_release_may_overtake_its_prepare", ()),
    (rules.LATE_RELEASE, server(ObeysOldReleases), "a_late_release_leaves_a_newer_hold_alone", ()),
    (rules.NEWER, server(KeepsItsHold), "a_newer_attempt_takes_over", ()),
    (rules.LEASE, server(NoLease), "a_hold_ends_with_its_lease", ()),
    (rules.RENEWED, server(CannotRenew), "a_renewed_hold_stands", ()),
    (rules.LAPSED, server(AnswersAfterItsLease), "a_lapsed_hold_is_not_published", ()),
    (rules.LAPSED_RESTORE, server(KeepsWhatItStaged), "a_lapsed_restore_is_not_activated", ()),
    (rules.RESTORES, plain(RefusesItsOwn), "round_trip", ()),
    (rules.ROUND_TRIP, plain(ForgetsTheLast), "round_trip", ()),
    (rules.STAGED, plain(ActivatesAtOnce), "what_is_staged_is_inert", ()),
    (rules.ROLLED_BACK, plain(NoRollback), FAILED, ("restore", "itself")),
    (rules.ROLLED_BACK, plain(ActivatesAtOnce), FAILED, ("reconcile", "another")),
    (rules.LIVED_ON, plain(Adds), "restore_into_one_that_lived_on", ()),
    (rules.REPEATED_ACTIVATION, plain(ActivatesAgain), "a_repeated_activation_changes_nothing", ()),
    (rules.FROM_NOTHING, plain(NeedsASnapshot), "start_from_nothing", ()),
    (rules.AGAIN, plain(SavesWhatIsNew), "save_and_restore_again_and_again", ()),
    (rules.TAKEN_OVER, client(TakesNothingOver), "another_process_renews_and_activates", ()),
    (rules.TAKEN_BACK, client(TakesNothingOver), "another_process_rolls_back", ()),
    (rules.INSIDE, plain(WritesElsewhere), "the_manifest_describes_its_files", ()),
    (rules.FSYNC, plain(NotDurable), "the_part_is_on_the_disk_when_it_is_answered", ()),
    (rules.DIGESTS, plain(WrongDigest), "the_manifest_describes_its_files", ()),
    (rules.UNTOUCHED, plain(OpensInPlace), "a_restore_leaves_the_snapshot_untouched", ()),
    (rules.INSPECTED, plain(CannotInspect), "inspect_understands_the_part", ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "suite", "test", "arguments"),
    CASES,
    ids=[f"{suite.__name__}-{test}" for _, suite, test, _ in CASES],
)
def test_the_suite_says_what_is_wrong_and_what_to_change(
    rule: Rule, suite: type[Conformance], test: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    running = suite()
    running.folder = tmp_path
    with pytest.raises(pytest.fail.Exception) as caught:
        getattr(running, f"test_{test}")(*arguments)
    message = caught.value.msg or ""
    assert message.startswith(f"{rule.clause}: {rule.broken}")
    assert message.endswith(f"fix: {rule.fix}")


def test_every_rule_is_broken_by_somebody() -> None:
    known = {name: rule for name, rule in vars(rules).items() if isinstance(rule, Rule)}
    assert {rule.broken for rule in known.values()} == {rule.broken for rule, *_ in CASES}


def test_a_rule_that_does_not_apply_is_skipped_with_its_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match="as the author says"):
        WithoutHold().test_held_from_prepare_to_resume()


def test_stand_ins_are_made_for_whom_it_calls_and_who_calls_it() -> None:
    class Called(Plain):
        called_by, calls = frozenset({"gym"}), frozenset({"data_plane"})

    assert [other.name for other in PlainSuite().others(Called())] == ["data_plane", "gym"]

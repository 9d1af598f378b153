"""What the steps of SAVE do. Which follows which is in `fsm.save`; rule numbers: specs/save.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from attrs import asdict, field, frozen

from fsm.config import EngineConfig
from fsm.operation import Call, HookFailed, NotPublished, Operation, TrainerMoved, judge
from fsm.outcome import Anchor, Cause, InvariantError, Skip, SkipReason
from fsm.participant import Attempt, Participant
from fsm.release import Release
from fsm.renewal import Renewal
from fsm.save import HOLD_LOST
from fsm.storing import Draft, Fence, Publication, Store

AnchorSource = Callable[[], Anchor | None]
Barrier = Callable[[], AbstractAsyncContextManager[None]]

# Which deadline of `EngineConfig` a step runs under; steps of one budget share it.
BUDGETS = {
    "pause": "prepare_timeout_s",
    "prepare": "prepare_timeout_s",
    "drain": "prepare_timeout_s",
    "commit": "commit_timeout_s",
    "cut": "cut_timeout_s",
    "seal": "seal_timeout_s",
    "publish": "hold_after_seal_s",
    "discard": "seal_timeout_s",
    "resume": "release_timeout_s",
    "abort": "abort_timeout_s",
}


@frozen
class Setting:
    """What every attempt of one engine has in common.

    held_off: is the trainer holding snapshots off? hold_offs: how many times it began to.
    cutting: held during the cut, for trainers in another thread.
    """

    config: EngineConfig
    store: Store
    anchor: AnchorSource
    held_off: Callable[[], bool]
    hold_offs: Callable[[], int]
    barrier: Barrier | None = None
    cutting: asyncio.Lock = field(factory=asyncio.Lock)


class Saving:
    """The steps of one save attempt."""

    def __init__(
        self,
        setting: Setting,
        operation: Operation,
        anchor: Anchor | None,
        last_saved: Fence | None = None,
    ) -> None:
        self.setting, self.operation, self.anchor = setting, operation, anchor
        self.last_saved = last_saved
        self.draft: Draft | None = None
        self.publication: Publication | None = None
        self.post: Callable[[str, Cause | None], None] = lambda *_: None
        self.let_go = asyncio.Event()
        config = setting.config
        self.renewal = Renewal(operation, self.view, config.renew_every_s, self._hold_lost)
        self.releasing = Release(operation, "resume", self.view, config.resume_timeout_s)

    def view(self, participant: Participant) -> Attempt:
        config = self.setting.config
        return Attempt(
            participant.name,
            self.operation,
            self.draft,
            config.drain,
            config.straggler,
            self.anchor,
            self.last_saved,
        )

    def steps(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        return {
            "pause": self.pause,
            "prepare": self.prepare,
            "drain": self.drain,
            "commit": self.commit,
            "cut": self.cut,
            "seal": self.seal,
            "publish": self.publish,
            "stay": self.stay,
            "resume": self.release,
            "abort": self.abort,
            "discard": self.discard,
        }

    async def preflight(self) -> None:
        """Before anybody is told: ask everyone, then make the folder. Raises Skip for everything
        that goes wrong (S7), InvariantError for a bug, ValueError before the first restore."""
        limit_s = self.setting.config.prepare_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self.operation.callers_first(self._calling("preflight"))
                self.draft = await self.setting.store.begin(self.operation.fence)
        except TimeoutError as late:
            detail = f"preflight took longer than {limit_s:g} s"
            raise Skip(SkipReason.PARTICIPANT, detail) from late
        except HookFailed as failed:
            if isinstance(failed.__cause__, Skip):
                raise failed.__cause__ from None
            _, cause = judge("preflight", failed)
            if self.operation.bug is not None:
                raise InvariantError(str(cause)) from self.operation.bug
            raise Skip(SkipReason.PARTICIPANT, str(cause)) from failed
        except OSError as error:
            raise Skip(SkipReason.NO_ROOM, str(error)) from error

    async def pause(self) -> None:
        await self.operation.callers_first(self._telling("pause"))

    async def prepare(self) -> None:
        self.renewal.start()
        await self.operation.callers_first(self._telling("prepare"))

    async def drain(self) -> None:
        await self.operation.callers_first(self._calling("drain"))

    async def commit(self) -> None:
        await self.operation.callers_first(self._collecting("commit"))

    async def cut(self) -> None:
        async with self.setting.cutting, self._barrier():
            if self.setting.held_off() or self.setting.anchor() != self.anchor:
                raise TrainerMoved(f"the attempt began at {self.anchor}")
            before = self.setting.hold_offs()
            await self.operation.callers_first(self._collecting("cut"))
            # With a barrier the trainer's changes wait for the end of the cut by themselves.
            if self.setting.barrier is None and self.setting.hold_offs() != before:
                raise TrainerMoved("snapshots were held off during the cut")
        # Outside the barrier: a renewal waits for Gym (S3), and must come after the cut (S4).
        await self.renewal.check()

    async def seal(self) -> None:
        await self.setting.store.seal(self._draft(), await self._body())

    async def publish(self) -> None:
        self.publication = await self.setting.store.publish(self._draft())
        if not self.publication.published:
            raise NotPublished("the folder was claimed before its rename happened")

    async def stay(self) -> None:
        """Nobody is released. A hold that was lost since the cut did no harm until now (S11)."""
        await self.renewal.stop()
        self.renewal.start()
        await self.renewal.check()
        await self.let_go.wait()

    async def release(self) -> None:
        await self.renewal.stop()
        await self.releasing.rounds(self.setting.config.resume_attempts)

    async def abort(self) -> None:
        """Everyone is let go first; a release never waits for the disk (S6)."""
        try:
            await self.release()
        finally:
            await self.discard()

    async def discard(self) -> None:
        draft, self.draft = self.draft, None
        if draft is None:
            return
        try:
            await self.setting.store.discard(draft)
        except OSError as error:
            # Unpublished it stays in any case; the next start sweeps it.
            self.operation.trace.add("note", "discard failed", error=repr(error))

    # -- helpers -------------------------------------------------------------------------------

    def _hold_lost(self, cause: Cause) -> None:
        self.post(HOLD_LOST, cause)

    def _draft(self) -> Draft:
        assert self.draft is not None, "preflight makes the folder before any step runs"
        return self.draft

    def _calling(self, hook: str) -> Call:
        return lambda one: self.operation.call(one, hook, self.view(one))

    def _telling(self, hook: str) -> Call:
        return lambda one: self.operation.call(one, hook, self.view(one), tell=True)

    def _collecting(self, hook: str) -> Call:
        async def collect(one: Participant) -> None:
            self.operation.add_facts(one.name, await self.operation.call(one, hook, self.view(one)))

        return collect

    @asynccontextmanager
    async def _barrier(self) -> AsyncIterator[None]:
        if self.setting.barrier is None:
            yield
            return
        begun_s = self.operation.trace.clock()
        async with self.setting.barrier():
            waited_s = self.operation.trace.clock() - begun_s
            self.operation.trace.add("note", "barrier", waited_s=waited_s)
            yield

    async def _body(self) -> dict[str, Any]:
        participants = [one for rank in self.operation.ranks for one in rank]
        descriptions = await asyncio.gather(*(one.describe() for one in participants))
        return {
            "anchor": self.anchor,
            "topology": {
                one.name: dict(facts) for one, facts in zip(participants, descriptions, strict=True)
            },
            "formats": {one.name: one.format_version for one in participants},
            "facts": self.operation.public_facts(),
            "config": asdict(self.setting.config),
        }

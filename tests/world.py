"""A small system around the real engine: servers, wires that lose answers, controllers that die.

The controller calls the Gym, the Gym calls the data plane. What really happened is kept by a
`Witness`, which no engine ever sees: it is what the oracle of the model tests asks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from attrs import define, field

from fsm import hold
from fsm.config import EngineConfig
from fsm.engine import SnapshotEngine
from fsm.outcome import Unavailable
from fsm.participant import Attempt, Participant, Restore
from fsm.storing import Fence
from participants.memory import MemoryParticipant, _Call
from storage.manifest import decode
from storage.memory import MemoryDisk, MemoryStore
from storage.names import order_of

T = TypeVar("T")
NAMES = ("controller", "gym", "data_plane")
CALLEES = {"controller": ("gym", "data_plane"), "gym": ("data_plane",), "data_plane": ()}
HANGING_UP_S = 0.1  # a call that is cancelled does not end at once,
STUBBORN_S = 2.0  # or waits for its answer all the same
RELEASES = ("resume", "rollback")
HOOKS = (
    "pause", "prepare", "drain", "commit", "cut", "renew", "resume",
    "fence", "restore", "reconcile", "rollback",
)  # fmt: skip
CONFIG = EngineConfig(
    prepare_timeout_s=60,
    commit_timeout_s=60,
    cut_timeout_s=60,
    seal_timeout_s=60,
    hold_after_seal_s=20,
    resume_timeout_s=10,
    restore_timeout_s=60,
    lease_s=30,
    renew_every_s=5,
)


@define
class Witness:
    """What really happened. history: the items of everybody after each change.

    committed, activated: (fence, name) → the items that were written or brought back.
    spoiled: fences under which something moved before everybody had written.
    broken: rules that were seen broken, in words.
    """

    stations: dict[str, Station] = field(factory=dict)
    history: list[tuple[tuple[str, ...], ...]] = field(factory=list)
    committed: dict[tuple[Fence, str], tuple[str, ...]] = field(factory=dict)
    activated: dict[tuple[Fence, str], tuple[str, ...]] = field(factory=dict)
    spoiled: set[Fence] = field(factory=set)
    broken: list[str] = field(factory=list)

    def items(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(self.stations[name].items) for name in NAMES)

    def observe(self) -> None:
        self.history.append(self.items())


class Station(MemoryParticipant):
    """A server: the participant in memory, with the hooks that it leaves out, and a witness."""

    witness: Witness
    calls_under_way: set[asyncio.Task[Any]]

    async def pause(self, attempt: Attempt) -> None:
        async with _Call(self, "pause"):
            pass

    async def cut(self, attempt: Attempt) -> None:
        async with _Call(self, "cut"):
            pass

    async def reconcile(self, restore: Restore) -> None:
        async with _Call(self, "reconcile"):
            pass

    async def commit(self, attempt: Attempt) -> Any:
        items = tuple(self.items)
        facts = await super().commit(attempt)
        self.witness.committed[attempt.fence, self.name] = items
        return facts

    async def resume(self, attempt: Attempt | Restore) -> None:
        before = self._activated_by
        try:
            await super().resume(attempt)
        finally:
            if self._activated_by != before:
                self.witness.activated[attempt.fence, self.name] = tuple(self.items)
                self.witness.observe()


@define
class Cable:
    """One controller's connection to the world. After `cut` no call and no answer gets through.

    fences, called: what went through, in order. latency_s: how long each answer is under way.
    stubborn: this many calls that are cancelled wait for the answer all the same.
    """

    witness: Witness
    fences: list[Fence] = field(factory=list)
    called: list[tuple[str, str]] = field(factory=list)
    latency_s: float = 0.0
    is_cut: bool = False
    stubborn: int = 0
    barrier_held: bool = False
    under_way: list[str] = field(factory=list)

    async def carry(self, call: Awaitable[T]) -> T:
        """The answer of `call`; of a cut cable nothing ever comes back."""
        try:
            if self.is_cut:
                await never()
            answer = await call
            await asyncio.sleep(self.latency_s)
        except Exception:
            if self.is_cut:
                await never()
            raise
        if self.is_cut:
            await never()
        return answer

    async def answer(self, task: asyncio.Task[T]) -> T:
        """The answer of what goes on over there, whether its caller is still there or not."""
        try:
            return await self.carry(asyncio.shield(task))
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            stubborn = self.stubborn > 0
            self.stubborn -= stubborn
            await asyncio.wait({task}, timeout=STUBBORN_S if stubborn else HANGING_UP_S)
            if stubborn and task.done():
                return task.result()
            raise

    @asynccontextmanager
    async def barrier(self) -> AsyncIterator[None]:
        self.barrier_held = True
        try:
            yield
        finally:
            self.barrier_held = False


async def never() -> None:
    await asyncio.get_running_loop().create_future()


class Line(Participant):
    """A station as a controller sees it. A call goes on in the station when its caller is gone;
    rules about who may be called when are checked here, at the moment of the call."""

    def __init__(self, station: Station, cable: Cable, everyone: dict[str, Station]) -> None:
        self.name, self.restore_step = station.name, station.restore_step
        self.called_by, self.calls = station.called_by, station.calls
        self._station, self._cable, self._everyone = station, cable, everyone

    async def call(self, hook: str, seen: Any) -> Any:
        if self._cable.is_cut:
            await never()
        self._check(hook, seen)
        self._cable.called.append((self.name, hook))
        task = asyncio.ensure_future(getattr(self._station, hook)(seen))
        self._station.calls_under_way.add(task)
        task.add_done_callback(self._ended)
        self._cable.under_way.append(hook)
        try:
            return await self._answer(task, hook)
        finally:
            self._cable.under_way.remove(hook)

    async def _answer(self, task: asyncio.Task[Any], hook: str) -> Any:
        try:
            return await self._cable.answer(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable(f"{self.name} died during {hook}") from None
            raise

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._station.calls_under_way.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller may be gone

    def _check(self, hook: str, seen: Attempt | Restore) -> None:
        broken = self._cable.witness.broken
        # Renewals are not the cut's: they go on beside it, and it does not wait for them.
        if self._cable.barrier_held and hook not in ("cut", "renew"):
            broken.append(f"S3: {self.name}.{hook} is called under the data-plane barrier")
        if hook not in RELEASES:
            return
        running = [one for one in self._cable.under_way if one not in (*RELEASES, "renew")]
        if running:
            broken.append(f"S6: {self.name}.{hook} begins while {running} still runs")
        silent = set().union(*seen.unreleased.values())
        for name in CALLEES[self.name]:
            callee = self._everyone[name]
            if callee.is_held and callee.active_fence == seen.fence and name not in silent:
                broken.append(f"S5: {self.name}.{hook} begins before {name} has opened")


def _through(hook: str) -> Callable[[Line, Any], Coroutine[Any, Any, Any]]:
    async def through(self: Line, seen: Any) -> Any:
        return await self.call(hook, seen)

    return through


for _hook in HOOKS:
    setattr(Line, _hook, _through(_hook))


class WiredStore:
    """A store behind a cable, each operation of which can be made slow: {operation: seconds}."""

    def __init__(self, store: MemoryStore, cable: Cable) -> None:
        self._store, self._cable = store, cable
        self.slow: dict[str, float] = {}

    @property
    def incarnation(self) -> int:
        return self._store.incarnation

    def __getattr__(self, operation: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def work(*args: Any, **kwargs: Any) -> Any:
            if operation in self.slow:
                await asyncio.sleep(self.slow[operation])
            return await getattr(self._store, operation)(*args, **kwargs)

        async def run(*args: Any, **kwargs: Any) -> Any:
            if self._cable.is_cut:
                await never()
            answer = await self._cable.carry(work(*args, **kwargs))
            if operation == "fence":
                self._cable.fences.append(answer)
            return answer

        return run


class Controller:
    """One engine with its own store on the world's disk, and its own cable."""

    def __init__(self, world: World, config: EngineConfig) -> None:
        self.cable = Cable(world.witness, latency_s=world.latency_s)
        self.memory = MemoryStore(world.disk)
        self.store = WiredStore(self.memory, self.cable)
        lines = [Line(one, self.cable, world.stations) for one in world.stations.values()]
        self.engine = SnapshotEngine(config, self.store, lines, barrier=self.cable.barrier)

    def lose_lock(self) -> None:
        """It lives on, but the root is no longer its own."""
        self.memory.crash()

    def die(self) -> None:
        """The process ends here: nothing that it does is seen by anybody any more."""
        self.cable.is_cut = True
        self.lose_lock()
        for task in self.memory._publishing:
            task.cancel()


class World:
    """Three stations, a disk that outlives everybody, and the controller in charge."""

    def __init__(self, config: EngineConfig = CONFIG, latency_s: float = 0.0) -> None:
        self.config, self.latency_s = config, latency_s
        self.disk = MemoryDisk()
        self.stations = {
            "controller": Station("controller", calls={"gym"}, restore_step="load_controller"),
            "gym": Station("gym"),
            "data_plane": Station("data_plane", called_by={"gym"}, restore_step="load_data_plane"),
        }
        self.witness = Witness(self.stations)
        self.witness.observe()
        for one in self.stations.values():
            one.witness, one.calls_under_way = self.witness, set()
        self.controllers: list[Controller] = []  # all of them: the dead ones still wait
        self.new_controller()

    @property
    def controller(self) -> Controller:
        """The one in charge."""
        return self.controllers[-1]

    @property
    def engine(self) -> SnapshotEngine:
        return self.controller.engine

    def new_controller(self) -> Controller:
        self.controllers.append(Controller(self, self.config))
        return self.controller

    # -- what happens to stations ----------------------------------------------------------------

    def work(self, name: str, item: str) -> bool:
        done = self.stations[name].work(item)
        self.witness.observe()
        return done

    def move(self, name: str, item: str) -> None:
        self._spoil(name)
        self.stations[name].move(item)
        self.witness.observe()

    def crash(self, name: str) -> None:
        self._spoil(name)
        station = self.stations[name]
        for task in station.calls_under_way:
            task.cancel()
        station.crash()
        self.witness.observe()

    def _spoil(self, name: str) -> None:
        """S4: parts written before and after this do not describe one instant."""
        station, committed = self.stations[name], self.witness.committed
        fence = station.active_fence
        if fence is None or station.phase not in (hold.HELD, hold.COMMITTED):
            return
        if any((fence, other) not in committed for other in NAMES):
            self.witness.spoiled.add(fence)

    # -- what is there ---------------------------------------------------------------------------

    def held(self) -> list[str]:
        return [name for name in NAMES if self.stations[name].is_held]

    def snapshots(self) -> list[str]:
        return sorted(self.disk.snapshots)

    def saved_items(self, snapshot: str) -> tuple[tuple[str, ...], ...]:
        """Read from the bytes on the disk."""
        files = self.disk.snapshots[snapshot]
        return tuple(
            tuple(json.loads(line)["item"] for line in files[f"{name}/items.jsonl"].splitlines())
            for name in NAMES
        )

    def problems_of(self, snapshot: str) -> list[str]:
        """What is wrong with a published snapshot, by what really happened (S4, F2)."""
        files = self.disk.snapshots[snapshot]
        missing = [name for name in NAMES if f"{name}/items.jsonl" not in files]
        if missing:
            return [f"{snapshot} is published without the part of {missing}"]
        fence = decode(files["manifest.json"]).fence
        items = self.saved_items(snapshot)
        problems = []
        if (fence.incarnation, fence.sequence) != order_of(snapshot):
            problems.append(f"{snapshot} was written under {fence}")
        if items != tuple(self.witness.committed.get((fence, name)) for name in NAMES):
            problems.append(f"{snapshot} holds {items}, not what was committed under its fence")
        if items not in self.witness.history:
            problems.append(f"{snapshot} holds {items}, which was never true at one instant")
        if fence in self.witness.spoiled:
            problems.append(f"S4: {snapshot} is published though something moved under its holds")
        return problems

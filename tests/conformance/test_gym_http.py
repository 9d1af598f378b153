"""Gym: one agent, one policy and one resource server, over real HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from fsm.participant import Attempt, Restore
from participants.gym import wire
from participants.gym.actor import NemoGymActor
from participants.gym.client import GymServer
from participants.gym.participant import Gym
from participants.gym.servers.agent import AgentServer
from participants.gym.servers.policy import PolicyServer
from participants.gym.servers.resource import ResourceServer
from participants.gym.servers.runs import Kept
from participants.memory_data_plane import MemoryDataPlane
from quiesce.testing import Conformance
from tests.gym_world import TOKEN, Counter, Upstream, play, run_request
from tests.integration.http_support import Ports, served

KINDS: dict[str, wire.Kind] = {"agent0": "agent", "policy": "policy", "tools": "resource"}


class ServedGym(Gym):
    """Gym with its servers in this process, on ports of their own."""

    def __init__(self, root: Path) -> None:
        self.ports = Ports(dict.fromkeys([*KINDS, "upstream"]))
        urls = self.ports.urls
        self.network = httpx.AsyncHTTPTransport()
        self.counter, self.incarnation = Counter(), 1
        self.agent = AgentServer(
            "agent0", play, {"policy": urls["policy"], "tools": urls["tools"]}, root, TOKEN,
            inner=self.network,
        )  # fmt: skip
        self.policy = PolicyServer(
            "policy", urls["upstream"], MemoryDataPlane(), root, TOKEN, inner=self.network
        )
        self.tools = ResourceServer(
            "tools", self.counter.app, codec=self.counter, root=root, token=TOKEN
        )
        self.actor = NemoGymActor(
            [GymServer(kind, name, urls[name]) for name, kind in KINDS.items()], TOKEN
        )
        self._up = contextlib.AsyncExitStack()
        super().__init__([self.actor])

    async def start(self) -> None:
        servers = {"agent0": self.agent, "policy": self.policy, "tools": self.tools}
        apps = {name: server.app for name, server in servers.items()}
        await self._up.enter_async_context(served({**apps, "upstream": Upstream().app}, self.ports))
        self._up.push_async_callback(self.network.aclose)
        self._up.push_async_callback(self.actor.close)

    def at_stop(self, close: Callable[[], Awaitable[None]]) -> None:
        self._up.push_async_callback(close)

    async def stop(self) -> None:
        await self._up.aclose()

    async def resume(self, attempt: Attempt | Restore) -> None:
        await super().resume(attempt)
        self.incarnation = attempt.fence.incarnation


class GymInAnotherProcess(Gym):
    """Its own actor of the same servers."""

    def __init__(self, served: ServedGym) -> None:
        self.served = served
        servers = [GymServer(kind, name, served.ports.urls[name]) for name, kind in KINDS.items()]
        self.actor = NemoGymActor(servers, TOKEN)
        super().__init__([self.actor])

    async def resume(self, attempt: Attempt | Restore) -> None:
        await super().resume(attempt)
        self.served.incarnation = attempt.fence.incarnation


class TestGym(Conformance):
    async def make(self) -> ServedGym:
        gym = ServedGym(self.root)
        await gym.start()
        return gym

    async def in_another_process(self, one: ServedGym) -> Gym:
        other = GymInAnotherProcess(one)
        one.at_stop(other.actor.close)
        return other

    async def close(self, one: ServedGym) -> None:
        await one.stop()

    async def work(self, one: ServedGym, number: int) -> None:
        """One rollout of three turns; its result is kept, since nobody acknowledges it."""
        request = run_request(f"p{number}_g0", incarnation=one.incarnation)
        await one.actor.run_rollout("agent0", request)

    async def observe(self, one: ServedGym) -> Any:
        kept = {name: r for name, r in one.agent._known.items() if isinstance(r, Kept)}
        results = {name: (r.reply.result, r.reply.rows) for name, r in kept.items()}
        return results, dict(one.counter.counts)

    async def is_held(self, one: ServedGym) -> bool:
        return any(server.gate.closed for server in (one.agent, one.policy, one.tools))

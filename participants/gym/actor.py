"""The NemoGym actor: the one place on the trainer's side that talks HTTP to Gym servers.

The class runs in process, or as a Ray actor (`start_actor`): its methods are coroutines, their
arguments and answers plain attrs data. Orders between kinds of server come from `wire.STOP_ORDER`
and `wire.OPEN_ORDER` only (S5). Several actors may be driven at once, each for its own servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import httpx
from attrs import evolve

from fsm.outcome import NotReleased, Refused
from fsm.storing import Fence
from participants.gym import merge, wire
from participants.gym.client import GymClient, GymServer, past_failures, together
from participants.gym.told import Told

M = TypeVar("M", bound=wire.Control)
Reports = dict[str, wire.Report]  # by name of server

POLL_S = 1.0  # one long poll of a drain
POLL_PAUSE_S = 0.02  # between polls: a server that answers at once must not be asked in a circle
# What these codes say of a hold is what a release is for: it is over (H1, H3).
LET_GO = frozenset({wire.STALE_FENCE, wire.LEASE_EXPIRED})


class NemoGymActor:
    """Fans operations out to the Gym servers it was given.

    Every method raises `Refused` (a server says no) or `Unavailable` (one is away), naming the
    server. A message's `timeout_s` is the time for all servers together.
    """

    def __init__(
        self,
        servers: Iterable[GymServer],
        token: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        retry_pauses_s: tuple[float, ...] | None = None,
    ) -> None:
        pauses = {} if retry_pauses_s is None else {"retry_pauses_s": retry_pauses_s}
        self._client = GymClient(servers, token, transport=transport, **pauses)
        self._told = Told()

    async def discover_checkpoint_capabilities(
        self, timeout_s: float
    ) -> dict[str, wire.Capabilities]:
        """What each server can do. Refused("not_checkpointable"): every problem, its way out."""
        servers = self._client.servers
        found = await together(
            {name: self._client.capabilities(server, timeout_s) for name, server in servers.items()}
        )
        if problems := merge.capability_problems(servers, found):
            raise Refused("not_checkpointable", "; ".join(problems))
        return found

    # -- save ----------------------------------------------------------------------------------

    async def prepare_checkpoint(self, message: wire.Prepare) -> Reports:
        """Close the servers; answers at once. `drain` waits."""
        return await self._stop(message, self._client.prepare)

    async def drain(self, message: wire.Drain) -> Reports:
        """Wait until nothing moves: policy and agents, then resources freeze.

        Refused("not_parked") at the deadline, naming at most 100 rollouts.
        """
        return await self._drain(message, "not_parked")

    async def renew(self, message: wire.Renew) -> Reports:
        """Prolong the lease on every server that confirmed its hold."""
        held = self._told.holding(message.fence)
        return await together(
            {name: self._client.renew(self._client.servers[name], message) for name in held}
        )

    async def commit_checkpoint(self, message: wire.Commit) -> Reports:
        """Each server writes its part: agents; policy, with the agents' indexes; resources.

        Refused("revision_mismatch"): an index and a session do not describe one instant.
        """
        clock = _Clock(message.timeout_s)
        reports = await self._each("agent", clock, message, self._client.commit)
        roots = evolve(message, continuations=merge.continuations(reports))
        reports |= merge.lost_by_all(await self._each("policy", clock, roots, self._client.commit))
        reports |= await self._each("resource", clock, message, self._client.commit)
        if wrong := merge.revision_mismatches(reports):
            raise Refused(wire.REVISION_MISMATCH, merge.some(wrong))
        return reports

    async def resume_checkpoint(self, message: wire.Release) -> None:
        """Let go. Tries every server that was told (S6), past failures.

        With `message.activate`, a hold that is over means that nothing was activated.
        Raises `NotReleased` with the names of those that did not confirm.
        """
        over = frozenset[str]() if message.activate else LET_GO
        await self._release(message, self._client.resume, over)

    async def abort_checkpoint(self, message: wire.Release) -> None:
        """The same routes in the same order as `resume_checkpoint`."""
        await self.resume_checkpoint(message)

    # -- restore -------------------------------------------------------------------------------

    async def fence(self, message: wire.FenceOff) -> Reports:
        """Hold what still lives, and wait for it. Refused("busy"): what does not end."""
        clock = _Clock(message.timeout_s)
        await self._stop(message, self._client.fence)
        drain = wire.Drain(fence=message.fence, label=message.label, timeout_s=clock.left_s())
        return await self._drain(drain, wire.BUSY)

    async def restore_checkpoint(self, message: wire.Stage) -> Reports:
        """Policy, agents, resources read and stage; each gets the files of its own part."""

        async def stage(server: GymServer, whole: wire.Stage) -> wire.Report:
            prefix = merge.part_of(server.kind, server.name)
            own = tuple(entry for entry in whole.files if entry.path.startswith(prefix))
            return await self._client.restore(server, evolve(whole, files=own))

        return await self._in_order(wire.STOP_ORDER, message, stage)

    async def take_over(self, fence: Fence) -> None:
        """Another actor staged under this fence: its holds are this one's to renew and release.
        The actor that staged them itself knows them already."""
        for name in self._client.servers:
            self._told.telling(fence, name)
            self._told.confirmed(fence, name)

    async def discard_continuations(self, message: wire.Discard) -> Reports:
        """Drop what is staged for these rollouts, on every server."""
        return await self._in_order(wire.STOP_ORDER, message, self._client.discard)

    async def rollback(self, message: wire.Release) -> None:
        """Drop what is staged, lift the fence, let go. As `resume_checkpoint`, past failures."""
        await self._release(message, self._client.rollback, LET_GO)

    # -- at any time ---------------------------------------------------------------------------

    async def acknowledge(self, results: Sequence[wire.Finished], timeout_s: float) -> None:
        """These results are durable in RL. Agents that never had them answer 200."""
        message = wire.Acknowledge(results=tuple(results))
        agents = self._client.of("agent")
        await together(
            {one.name: self._client.acknowledge(one, message, timeout_s) for one in agents}
        )

    async def retire(self, rollouts: Sequence[str], timeout_s: float) -> None:
        """Cancel and close these rollouts' runs: their group was dropped."""
        message = wire.Retire(rollouts=tuple(rollouts))
        agents = self._client.of("agent")
        await together({one.name: self._client.retire(one, message, timeout_s) for one in agents})

    async def run_rollout(self, server_name: str, request: wire.RunRequest) -> wire.RunReply:
        """One rollout on one agent server, however long it takes."""
        server = self._client.servers.get(server_name)
        if server is None or server.kind != "agent":
            known = ", ".join(one.name for one in self._client.of("agent"))
            raise Refused("unknown_server", f"no agent server {server_name!r} (known: {known})")
        return await self._client.run(server, request)

    async def close(self) -> None:
        await self._client.aclose()

    # -- fan-out -------------------------------------------------------------------------------

    async def _each(
        self,
        kind: wire.Kind,
        clock: _Clock,
        message: M,
        call: Callable[[GymServer, M], Coroutine[Any, Any, wire.Report]],
    ) -> Reports:
        timed = evolve(message, timeout_s=clock.left_s())
        return await together({one.name: call(one, timed) for one in self._client.of(kind)})

    async def _in_order(
        self,
        kinds: Sequence[wire.Kind],
        message: M,
        call: Callable[[GymServer, M], Coroutine[Any, Any, wire.Report]],
    ) -> Reports:
        clock, reports = _Clock(message.timeout_s), Reports()
        for kind in kinds:
            reports |= await self._each(kind, clock, message, call)
        return reports

    async def _stop(
        self, message: M, call: Callable[[GymServer, M], Coroutine[Any, Any, wire.Report]]
    ) -> Reports:
        async def tell(server: GymServer, timed: M) -> wire.Report:
            self._told.telling(message.fence, server.name)  # S6: before it is sent
            report = await call(server, timed)
            self._told.confirmed(message.fence, server.name)
            return report

        return await self._in_order(wire.STOP_ORDER, message, tell)

    async def _drain(self, message: wire.Drain, code: str) -> Reports:
        clock, reports = _Clock(message.timeout_s), Reports()
        # Policy and agents wait for each other; resources freeze when nobody calls them any more.
        for kinds in (wire.STOP_ORDER[:2], wire.STOP_ORDER[2:]):
            servers = [server for kind in kinds for server in self._client.of(kind)]
            reports |= await together(
                {one.name: self._quiet(one, message, clock) for one in servers}
            )
            if names := merge.blockers(reports):
                raise Refused(code, names)
        return reports

    async def _quiet(self, server: GymServer, message: wire.Drain, clock: _Clock) -> wire.Report:
        """Polls until the server is quiet, or the deadline has passed."""
        while True:
            poll = evolve(message, timeout_s=min(POLL_S, clock.left_s()))
            report = await self._client.drain(server, poll)
            if report.quiet or clock.left_s() <= POLL_PAUSE_S:
                return report
            await asyncio.sleep(POLL_PAUSE_S)

    async def _release(
        self,
        message: wire.Release,
        call: Callable[[GymServer, wire.Release], Coroutine[Any, Any, wire.Report]],
        over: frozenset[str],
    ) -> None:
        async def let_go(server: GymServer, timed: wire.Release) -> None:
            try:
                await call(server, timed)
            except Refused as refusal:
                if refusal.code not in over:
                    raise
            self._told.released(message.fence, server.name)

        targets = self._told.targets(message.fence, self._client.servers)
        clock, silent = _Clock(message.timeout_s), dict[str, Refused]()
        for kinds_left, kind in zip((3, 2, 1), wire.OPEN_ORDER, strict=True):
            # A silent server uses up the share of its kind, not the time of those after it.
            timed = evolve(message, timeout_s=clock.left_s() / kinds_left)
            servers = [one for one in self._client.of(kind) if one.name in targets]
            silent |= await past_failures({one.name: let_go(one, timed) for one in servers})
        if silent:
            raise NotReleased(frozenset(silent), "; ".join(map(str, silent.values())))


class _Clock:
    """Seconds left of one deadline that several calls share."""

    def __init__(self, timeout_s: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._end = self._now() + timeout_s

    def left_s(self) -> float:
        return max(0.0, self._end - self._now())


def start_actor(
    servers: Sequence[GymServer], token: str, options: Mapping[str, Any] | None = None
) -> Any:
    """A `NemoGymActor` as a Ray actor; returns its handle.

    options: of `ray.remote`, above these: no restarts (a fresh actor does not know whom it told;
    its owner decides), and room for as many calls at once as a rollout pump sends.
    """
    import ray

    ours = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 10_000, "num_cpus": 0}
    return ray.remote(NemoGymActor).options(**(ours | dict(options or {}))).remote(servers, token)

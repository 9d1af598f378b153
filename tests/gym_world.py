"""The three Gym servers in one process, wired through ASGI transports: no sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from fsm import strict
from fsm.storing import Fence, FileEntry
from participants.gym import wire
from participants.gym.servers.agent import AgentServer
from participants.gym.servers.policy import PolicyServer
from participants.gym.servers.resource import ResourceServer

TOKEN = "secret"
KINDS = ("policy", "agent", "resource")


async def until(condition: Callable[[], Any]) -> None:
    """Let the other tasks run until it holds. Bounded, and no clock."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


class Upstream:
    """A model that answers with what it was told; `hold()` makes it wait, `fail` makes it fail."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.fail: list[int] = []  # statuses for the next calls
        self.app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.asked.append(body)
        await self.open.wait()
        if self.fail:
            return JSONResponse({"error": "as told"}, self.fail.pop(0))
        said = f"reply to {body['messages'][-1]['content']}"
        tokens = [{"token": "token_id:7", "logprob": -0.5}]
        choice = {"message": {"content": said}, "logprobs": {"content": tokens}}
        return JSONResponse({"choices": [choice]})


class Counter:
    """A tool that counts per rollout, and the codec of its sessions."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.applied: list[str] = []  # every effect ever, outside the sessions
        self.open = asyncio.Event()
        self.open.set()
        self.app = Starlette(
            routes=[
                Route("/add", self.add, methods=["POST"]),
                Route("/look", self.look, methods=["POST"]),
                Route("/break", self.broken, methods=["POST"]),
            ]
        )

    async def add(self, request: Request) -> JSONResponse:
        rollout = request.headers.get(wire.ROLLOUT, "nobody")
        await self.open.wait()
        self.counts[rollout] = self.counts.get(rollout, 0) + (await request.json())["n"]
        self.applied.append(rollout)
        return JSONResponse({"count": self.counts[rollout]})

    async def look(self, request: Request) -> JSONResponse:
        return JSONResponse({"count": self.counts.get(request.headers[wire.ROLLOUT], 0)})

    async def broken(self, request: Request) -> JSONResponse:
        raise RuntimeError("half done")

    def export_session(self, rollout_id: str) -> Any:
        return {"count": self.counts.get(rollout_id, 0)}

    def import_session(self, rollout_id: str, state: Any) -> None:
        self.counts[rollout_id] = state["count"]

    def drop_session(self, rollout_id: str) -> None:
        self.counts.pop(rollout_id, None)


class Rows:
    """A capture sink in memory."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}
        self.open = asyncio.Event()
        self.open.set()

    async def put(self, key: str, row: Any) -> None:
        await self.open.wait()
        self.rows[key] = dict(row)


async def play(task: dict[str, Any], http: httpx.AsyncClient) -> Any:
    """Ask the model, call the tool, `turns` times; the history is the result."""
    history: list[Any] = []
    for turn in range(task["turns"]):
        message = {"role": "user", "content": f"{task['say']} {turn} {history[-1:]}"}
        reply = await http.post("http://policy/v1/chat/completions", json={"messages": [message]})
        reply.raise_for_status()
        said = reply.json()["choices"][0]["message"]["content"]
        tool = await http.post("http://tools/add", json={"n": turn + 1})
        history.append([said, tool.json()["count"]])
    return history


class World:
    """One policy, one agent, one resource server, each with a control client."""

    def __init__(self, root: Path, loop: Any = play, **tools: Any) -> None:
        self.root, self.upstream, self.counter, self.sink = root, Upstream(), Counter(), Rows()
        self.policy = PolicyServer(
            "policy0", "http://up", self.sink, root, TOKEN,
            policy_version=3, inner=httpx.ASGITransport(self.upstream.app),
        )  # fmt: skip
        self.resource = ResourceServer(
            "tools", self.counter.app, **{"codec": self.counter, **tools}, root=root, token=TOKEN
        )
        self.inner = {
            "policy": httpx.ASGITransport(self.policy.app),
            "tools": httpx.ASGITransport(self.resource.app),
        }
        self.agent = AgentServer(
            "agent0", loop, {"policy": "http://p", "tools": "http://t"}, root, TOKEN,
            inner=self.inner,
        )  # fmt: skip
        self.servers = {"policy": self.policy, "agent": self.agent, "resource": self.resource}
        self.clients = {kind: control(server) for kind, server in self.servers.items()}

    async def ask(self, kind: str, operation: str, message: Any) -> wire.Report:
        """One control operation; raises AssertionError for anything but 200."""
        return report(await send(self.clients[kind], operation, message))

    def start(self, rollout: str = "p7_g2", **changes: Any) -> asyncio.Task[httpx.Response]:
        request = run_request(rollout, **changes)
        return asyncio.create_task(self.clients["agent"].post("/run", json=strict.write(request)))

    async def run(self, rollout: str = "p7_g2", **changes: Any) -> wire.RunReply:
        response = await self.start(rollout, **changes)
        assert response.status_code == 200, response.text
        return strict.read(wire.RunReply, response.json(), "/run")

    # -- the protocol, as an actor drives it -------------------------------------------------

    async def close(self, fence: Fence, **options: Any) -> None:
        for kind in KINDS:
            await self.ask(kind, "prepare", prepare(fence, **options))
        for kind in KINDS:
            assert (await self.ask(kind, "drain", drain(fence))).quiet, kind

    async def commit(self, fence: Fence) -> dict[str, wire.Report]:
        folder = folder_of(fence)
        (self.root / folder).mkdir()
        agent = await self.ask("agent", "commit", commit(fence))
        policy = await self.ask("policy", "commit", commit(fence, agent.continuations))
        return {
            "agent": agent,
            "policy": policy,
            "resource": await self.ask("resource", "commit", commit(fence)),
        }

    async def save(self, fence: Fence, **options: Any) -> tuple[str, dict[str, wire.Report]]:
        """A whole snapshot; the servers stay held. Returns its id, and what each wrote."""
        await self.close(fence, **options)
        reports = await self.commit(fence)
        snapshot = f"snapshot_{fence.incarnation:06}-{fence.sequence:06}"
        (self.root / folder_of(fence)).rename(self.root / snapshot)
        return snapshot, reports

    async def release(self, fence: Fence, operation: str = "resume") -> None:
        for kind in ("resource", "policy", "agent"):
            await self.ask(kind, operation, release(fence))

    async def stage(self, fence: Fence, snapshot: str, saved: dict[str, wire.Report]) -> None:
        for kind in KINDS:
            await self.ask(kind, "fence", wire.FenceOff(fence=fence, lease_s=60, **TIMED))
        for kind in KINDS:
            assert (await self.ask(kind, "drain", drain(fence))).quiet, kind
        for kind in KINDS:
            await self.ask(kind, "restore", stage(fence, snapshot, saved[kind].files))


TIMED: dict[str, Any] = {"label": "test", "timeout_s": 30.0}


def control(server: Any, token: str = TOKEN) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(server.app),
        base_url="http://server",
        headers={"authorization": f"Bearer {token}"},
    )


async def send(client: httpx.AsyncClient, operation: str, message: Any) -> httpx.Response:
    path = operation if operation.startswith("/") else f"{wire.CHECKPOINT}/{operation}"
    return await client.post(path, json=strict.write(message))


def report(response: httpx.Response) -> wire.Report:
    assert response.status_code == 200, response.text
    return strict.read(wire.Report, response.json(), "report")


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def fence(sequence: int, incarnation: int = 1, root: str = "root") -> Fence:
    return Fence(root, incarnation, sequence)


def folder_of(fence: Fence) -> str:
    return f"tmp_{fence.incarnation:06}-{fence.sequence:06}_abcdef01"


def prepare(fence: Fence, **options: Any) -> wire.Prepare:
    return wire.Prepare(fence=fence, **{"lease_s": 60.0, **TIMED, **options})


def drain(fence: Fence, timeout_s: float = 30.0) -> wire.Drain:
    return wire.Drain(fence=fence, label="test", timeout_s=timeout_s)


def commit(fence: Fence, continuations: tuple[wire.Continuation, ...] = ()) -> wire.Commit:
    return wire.Commit(fence=fence, folder=folder_of(fence), continuations=continuations, **TIMED)


def release(fence: Fence) -> wire.Release:
    return wire.Release(fence=fence, **TIMED)


def stage(fence: Fence, snapshot: str, files: tuple[FileEntry, ...]) -> wire.Stage:
    return wire.Stage(fence=fence, snapshot=snapshot, files=files, **TIMED)


def run_request(rollout: str = "p7_g2", **changes: Any) -> wire.RunRequest:
    fields = {"attempt_index": 0, "incarnation": 1, "expect": "fresh"} | changes
    fields.setdefault("lineage", fields["attempt_index"] if fields["expect"] == "fresh" else 0)
    fields.setdefault("task", {"turns": 3, "say": "hello"})
    return wire.RunRequest(rollout_id=rollout, **fields)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]

"""The demo's parts behind the real Gym servers, in one process: from /run to the rows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gymnasium", reason="the demo's lake is Gymnasium's (extra demo)")

from fsm.strict import read, write
from participants.data_plane import CAPTURE
from participants.gym import wire
from participants.gym.servers.agent import AgentServer
from participants.gym.servers.policy import PolicyServer
from participants.gym.servers.resource import ResourceServer
from participants.memory_data_plane import MemoryDataPlane
from quiesce.demo.audit import Finish, tool_calls
from quiesce.demo.effects import read_effects
from quiesce.demo.frozenlake import Lake, turns_of
from quiesce.demo.loop import play
from quiesce.demo.sabotage import double_effect
from quiesce.demo.scripted import Scripted

TOKEN, SEED = "secret", 5


def rollout(folder: Path, plane: MemoryDataPlane, *, sabotaged: bool = False) -> wire.RunReply:
    """Run 0 of p0_g0."""
    lake = Lake(folder / "effects.jsonl")
    app = double_effect(lake.app) if sabotaged else lake.app
    tools = ResourceServer("tools", app, codec=lake, root=folder, token=TOKEN, reads=["/verify"])
    model = httpx.ASGITransport(Scripted().app)
    policy = PolicyServer(
        "policy", upstream="http://model", sink=plane, root=folder, token=TOKEN, inner=model
    )
    inner = {"policy": httpx.ASGITransport(policy.app), "tools": httpx.ASGITransport(tools.app)}
    servers = {"policy": "http://policy", "tools": "http://tools"}
    agent = AgentServer("agent", play, servers=servers, root=folder, token=TOKEN, inner=inner)
    request = wire.RunRequest(
        rollout_id="p0_g0",
        attempt_index=0,
        incarnation=1,
        lineage=0,
        expect="fresh",
        task={"seed": SEED},
    )

    async def main() -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        transport = httpx.ASGITransport(agent.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as http:
            reply = await http.post("/run", json=write(request), headers=headers)
        return reply.raise_for_status().json()

    return read(wire.RunReply, asyncio.run(main()), "the reply")


def test_a_rollout_leaves_one_row_per_turn_and_an_unbroken_chain(tmp_path: Path) -> None:
    plane = MemoryDataPlane()
    reply = rollout(tmp_path, plane)
    assert reply.error is None
    assert reply.turns == reply.result["turns"] == len(reply.rows) == turns_of(SEED)
    finish = Finish("p0_g0", reply.turns, reply.result["token"])
    effects = read_effects(tmp_path / "effects.jsonl")
    assert tool_calls([finish], effects) == []
    assert {(effect.run, effect.lineage) for effect in effects} == {("1.0", "0")}
    rows = asyncio.run(plane.get_rows(CAPTURE, reply.rows))
    assert sorted(rows) == sorted(asyncio.run(plane.keys(CAPTURE)))
    for row in rows.values():
        assert len(row["token_ids"]) == len(row["logprobs"]) > 0


def test_an_effect_applied_twice_behind_the_wrapper_is_found(tmp_path: Path) -> None:
    reply = rollout(tmp_path, MemoryDataPlane(), sabotaged=True)
    finish = Finish("p0_g0", reply.turns, reply.result["token"])
    found = "\n".join(tool_calls([finish], read_effects(tmp_path / "effects.jsonl")))
    assert "was applied 2 times" in found

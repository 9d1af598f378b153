"""The agent: an ordinary loop, as people write it. It knows nothing of snapshots.

It asks the model for a move, makes it, and looks again, until the lake says that it is over.
Deterministic given the answers that it gets, which is all that a replay needs.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

MOVES = ("left", "down", "right", "up")
CHOICE = "left, down, right or up"
FALLBACK = "down"  # when an answer is no legal move: a weak model costs a turn, not the rollout
REMEMBERED = 3  # moves in the prompt; short prompts are what makes a small model quick
SYSTEM = (
    "You walk over a frozen lake from S to G. A is you, F is ice, H is a hole. "
    "Ice is slippery. Answer with one move as JSON."
)
SCHEMA = {
    "type": "object",
    "properties": {"action": {"enum": list(MOVES)}},
    "required": ["action"],
    "additionalProperties": False,
}


async def play(task: dict[str, Any], http: httpx.AsyncClient) -> dict[str, Any]:
    """Play one rollout. Raises httpx.HTTPStatusError when the model or the lake says no.

    task: `seed` of the lake, and `generation`, which sibling of the group this is (default 0).
    """
    seen = await _post(http, "http://tools/seed", {"seed": task["seed"]})
    history: list[list[Any]] = []  # [action, reward] of each turn
    while not seen["done"]:
        moves = [action for action, _ in history]
        action = await _ask(http, seen["board"], moves, task.get("generation", 0))
        seen = await _post(http, "http://tools/step", {"action": action})
        history.append([action, seen["reward"]])
    end = await _post(http, "http://tools/verify", {})
    return {
        "reward": end["reward"],
        "turns": len(history),
        "token": end["token"],
        "history": history,
    }


async def _ask(http: httpx.AsyncClient, board: str, moves: list[str], sample: int) -> str:
    moved = ", ".join(moves[-REMEMBERED:]) or "not yet"
    body = {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"You moved {moved}.\n{board}\nChoose {CHOICE}."},
        ],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "move", "schema": SCHEMA, "strict": True},
        },
        "max_tokens": 32,
        "temperature": 1.5,  # at 1 a small model repeats its last move for ever
        "seed": 1000 * sample + len(moves),
        "logprobs": True,
    }
    answer = await _post(http, "http://policy/v1/chat/completions", body)
    return _move(answer["choices"][0]["message"]["content"])


def _move(content: str) -> str:
    try:
        action = json.loads(content)["action"]
    except (ValueError, TypeError, KeyError):
        return FALLBACK
    return action if action in MOVES else FALLBACK


async def _post(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = await http.post(url, json=body)
    reply.raise_for_status()
    answer: dict[str, Any] = reply.json()
    return answer

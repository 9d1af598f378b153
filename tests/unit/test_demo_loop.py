"""The agent and the scripted model: deterministic, and at home with weak answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gymnasium", reason="the demo's lake is Gymnasium's (extra demo)")

from participants.gym import wire
from quiesce.demo.frozenlake import ACTIONS, Lake, turns_of
from quiesce.demo.loop import FALLBACK, MOVES, play
from quiesce.demo.scripted import VOCABULARY, Scripted


def run(model: Any, lake: Lake, task: dict[str, Any]) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        mounts = {
            "all://policy": httpx.ASGITransport(model),
            "all://tools": httpx.ASGITransport(lake.app),
        }
        async with httpx.AsyncClient(mounts=mounts, headers={wire.ROLLOUT: "p0_g0"}) as http:
            return await play(task, http)

    return asyncio.run(main())


def answering(content: str) -> Any:
    """A model that always says the same."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return app


def test_the_loop_and_the_lake_name_the_same_moves() -> None:
    assert MOVES == ACTIONS


def test_a_rollout_is_played_to_its_end_and_verified(tmp_path: Path) -> None:
    model, lake = Scripted(), Lake(tmp_path / "effects.jsonl")
    result = run(model.app, lake, {"seed": 5})
    assert result["turns"] == len(result["history"]) == turns_of(5) == model.calls
    assert {action for action, _ in result["history"]} <= set(MOVES)
    assert 0 <= result["reward"] <= 1
    assert result["token"] == lake.export_session("p0_g0")["token"]


def test_the_same_task_gives_the_same_history_and_a_sibling_another(tmp_path: Path) -> None:
    def history(task: dict[str, Any], model_seed: int = 0) -> Any:
        result = run(Scripted(model_seed).app, Lake(tmp_path / "effects.jsonl"), task)
        return result["history"], result["reward"]

    first = history({"seed": 5, "generation": 0})
    assert history({"seed": 5}) == first
    assert history({"seed": 5, "generation": 1}) != first
    assert history({"seed": 5}, model_seed=1) != first


@pytest.mark.parametrize("content", ["", "up", "[]", '{"action": "jump"}', '{"action": ["up"]}'])
def test_an_answer_that_is_no_move_costs_a_turn_only(tmp_path: Path, content: str) -> None:
    result = run(answering(content), Lake(tmp_path / "effects.jsonl"), {"seed": 2})
    assert [action for action, _ in result["history"]] == [FALLBACK] * turns_of(2)


def test_a_legal_answer_is_taken(tmp_path: Path) -> None:
    result = run(answering('{"action": "left"}'), Lake(tmp_path / "effects.jsonl"), {"seed": 2})
    assert {action for action, _ in result["history"]} == {"left"}


def test_a_refusal_of_the_lake_is_raised(tmp_path: Path) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        run(Scripted().app, Lake(tmp_path / "effects.jsonl"), {"seed": -1})


def ask(model: Scripted, method: str, path: str, body: Any = None) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(model.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://model") as http:
            return await http.request(method, path, json=body)

    return asyncio.run(main())


def question(text: str = "board") -> dict[str, Any]:
    schema = {"properties": {"action": {"enum": ["a", "b", "c", "d"]}}}
    return {
        "messages": [{"role": "user", "content": text}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }


def test_a_reply_has_token_ids_and_logprobs_where_llama_cpp_has_them() -> None:
    answer = ask(Scripted(), "POST", "/v1/chat/completions", question()).json()
    choice = answer["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    assert all(0 <= token["id"] < VOCABULARY and token["logprob"] <= 0 for token in tokens)
    assert answer["usage"]["completion_tokens"] == len(tokens) > 3


def test_answers_depend_on_seed_and_conversation_alone() -> None:
    def answers(model: Scripted) -> list[Any]:
        bodies = [question(f"board {number}") for number in range(30)]
        return [ask(model, "POST", "/v1/chat/completions", body).json() for body in bodies]

    said = answers(Scripted(1))
    assert answers(Scripted(1)) == said
    assert answers(Scripted(2)) != said
    assert len({answer["choices"][0]["message"]["content"] for answer in said}) == 4


def test_calls_are_counted_and_bad_ones_are_not() -> None:
    model = Scripted()
    assert ask(model, "GET", "/health").json() == {"status": "ok"}
    assert ask(model, "POST", "/v1/chat/completions", {"messages": []}).status_code == 400
    assert (
        ask(model, "POST", "/v1/chat/completions", {**question(), "messages": []}).status_code
        == 400
    )
    assert ask(model, "GET", "/calls").json() == {"calls": 0}
    ask(model, "POST", "/v1/chat/completions", question())
    assert ask(model, "GET", "/calls").json() == {"calls": 1}

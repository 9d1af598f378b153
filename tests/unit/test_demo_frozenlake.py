"""The lake is random, yet a restored session continues exactly as an uninterrupted one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gymnasium", reason="the demo's lake is Gymnasium's (extra demo)")

from fsm.strict import BadInput
from participants.gym import wire
from quiesce.demo.effects import Effect, EffectLog, read_effects
from quiesce.demo.frozenlake import ACTIONS, MAX_TURNS, MIN_TURNS, Lake, turns_of

Post = Callable[..., Awaitable[httpx.Response]]


def at_lake(lake: Lake, play: Callable[[Post], Awaitable[Any]], rollout: str = "p0_g0") -> Any:
    """Run `play(post)` against the server in process."""

    async def main() -> Any:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(lake.app),
            base_url="http://tools",
            headers={wire.ROLLOUT: rollout, wire.RUN: "1.0", wire.LINEAGE: "0"},
        )

        async def post(path: str, body: Any, **headers: str) -> httpx.Response:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.post(path, json=body, headers=named)

        async with client:
            return await play(post)

    return asyncio.run(main())


async def steps(post: Post, first: int, last: int) -> list[dict[str, Any]]:
    """Turns first..last; each action depends on its number alone."""
    seen = []
    for turn in range(first, last + 1):
        action = ACTIONS[(turn * 7 + 2) % 4]
        reply = await post("/step", {"action": action}, x_quiesce_request=f"r{turn}")
        assert reply.status_code == 200, reply.text
        seen.append(reply.json())
    return seen


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "effects.jsonl")


def test_every_rollout_has_12_to_20_turns() -> None:
    turns = {turns_of(seed) for seed in range(300)}
    assert turns == set(range(MIN_TURNS, MAX_TURNS + 1))


def test_a_rollout_ends_after_its_turns_and_then_refuses(lake: Lake) -> None:
    async def play(post: Post) -> None:
        assert not (await post("/seed", {"seed": 3})).json()["done"]
        seen = await steps(post, 1, turns_of(3))
        assert [view["done"] for view in seen] == [False] * (turns_of(3) - 1) + [True]
        late = await post("/step", {"action": "up"})
        assert late.status_code == 409
        assert late.json()["error"] == {
            "code": "rollout_over",
            "detail": f"p0_g0 has played its {turns_of(3)} turns",
        }

    at_lake(lake, play)


@pytest.mark.parametrize("cut", [0, 1, 5, 11])
@pytest.mark.parametrize("seed", [0, 4, 8])
def test_a_restored_session_continues_identically(tmp_path: Path, seed: int, cut: int) -> None:
    turns = turns_of(seed)

    async def uninterrupted(post: Post) -> Any:
        await post("/seed", {"seed": seed})
        return await steps(post, 1, turns), (await post("/verify", {})).json()

    async def before(post: Post) -> Any:
        await post("/seed", {"seed": seed})
        return await steps(post, 1, cut)

    async def after(post: Post) -> Any:
        return await steps(post, cut + 1, turns), (await post("/verify", {})).json()

    expected, verdict = at_lake(Lake(tmp_path / "whole.jsonl"), uninterrupted)
    first = Lake(tmp_path / "effects.jsonl")
    head = at_lake(first, before)
    state = json.loads(json.dumps(first.export_session("p0_g0")))
    second = Lake(tmp_path / "effects.jsonl")
    second.import_session("p0_g0", state)
    assert second.export_session("p0_g0") == first.export_session("p0_g0")
    tail, restored = at_lake(second, after)

    assert head + tail == expected
    assert {**restored, "token": ""} == {**verdict, "token": ""}


def test_seeds_differ_and_episodes_are_chained(tmp_path: Path) -> None:
    async def play(post: Post) -> Any:
        played = []
        for seed in range(40):
            await post("/seed", {"seed": seed})
            seen = await steps(post, 1, turns_of(seed))
            over = [view for view in seen if view["episode_over"]]
            assert seen[-1]["episode"] == len(over) + 1
            assert all(view["board"].startswith("A") for view in over)  # the next one has begun
            played.append((tuple(view["board"] for view in seen), over))
        return played

    played = at_lake(Lake(tmp_path / "e.jsonl"), play)
    assert len({boards for boards, _ in played}) > 30
    assert sum(len(over) for _, over in played) > 10


def test_effects_form_a_chain_with_a_token_each(lake: Lake, tmp_path: Path) -> None:
    async def play(post: Post) -> str:
        await post("/seed", {"seed": 1}, x_quiesce_request="r0")
        await steps(post, 1, 4)
        return str((await post("/verify", {})).json()["token"])

    token = at_lake(lake, play)
    log = read_effects(tmp_path / "effects.jsonl")
    assert [effect.kind for effect in log] == ["seed", "step", "step", "step", "step"]
    assert [effect.turn for effect in log] == [0, 1, 2, 3, 4]
    assert [effect.request for effect in log] == ["r0", "r1", "r2", "r3", "r4"]
    assert [effect.parent for effect in log] == ["", *(effect.token for effect in log[:-1])]
    assert {(effect.rollout, effect.run, effect.lineage) for effect in log} == {
        ("p0_g0", "1.0", "0")
    }
    assert token == log[-1].token == lake.export_session("p0_g0")["token"]


def test_the_same_call_applied_again_has_another_token(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "effects.jsonl")
    at_lake(lake, lambda post: post("/seed", {"seed": 1}))
    state = lake.export_session("p0_g0")
    for _ in range(2):
        lake.import_session("p0_g0", state)
        at_lake(lake, lambda post: post("/step", {"action": "up"}, x_quiesce_request="r1"))
    one, other = read_effects(tmp_path / "effects.jsonl")[1:]
    assert (one.parent, one.request) == (other.parent, other.request)
    assert one.token != other.token


def test_an_effect_that_is_not_logged_is_an_error(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_lake(lake, lambda post: post("/seed", {"seed": 1}))
    monkeypatch.setattr("os.write", lambda *_: 0)  # as on a full disk
    with pytest.raises(OSError, match=r"effects.jsonl: only a part of an effect was written"):
        lake.log.append(read_effects(lake.log.path)[0])


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/step", {"action": "jump"}, 400, "action must be one of left, down, right, up"),
        ("/step", {"action": ["up"]}, 400, "action must be one of"),
        ("/step", {"action": "up"}, 404, "p0_g0 has no session here"),
        ("/verify", {}, 404, "no session here"),
        ("/seed", {"seed": True}, 400, "seed must be an int >= 0, not True"),
        ("/seed", {"seed": -1}, 400, "seed must be an int >= 0, not -1"),
        ("/seed", [1], 400, "must be a JSON object, not list"),
    ],
)
def test_bad_calls_get_a_clear_error(
    lake: Lake, path: str, body: Any, status: int, words: str
) -> None:
    reply = at_lake(lake, lambda post: post(path, body))
    assert reply.status_code == status
    assert words in reply.json()["error"]["detail"]
    assert not lake.sessions


def test_a_call_without_a_rollout_is_refused(lake: Lake) -> None:
    reply = at_lake(lake, lambda post: post("/seed", {"seed": 1}), rollout="")
    assert reply.status_code == 400
    assert wire.ROLLOUT in reply.json()["error"]["detail"]


def damaged(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, **changes}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damaged(position=64), "position"),
        (damaged(turns=11), "turns"),
        (damaged(extra=1), "unknown key 'extra'"),
        (damaged(turn="3"), "expected int, got '3'"),
        (damaged(generator={"bit_generator": "MT19937"}), "generator"),
        (damaged(generator={}), "generator"),
        (lambda _: "nonsense", "expected a mapping"),
    ],
)
def test_a_bad_state_is_refused_and_loses_nothing(lake: Lake, damage: Any, words: str) -> None:
    at_lake(lake, lambda post: post("/seed", {"seed": 1}))
    good = lake.export_session("p0_g0")
    with pytest.raises(BadInput, match="p0_g0") as caught:
        lake.import_session("p0_g0", damage(good))
    assert words in str(caught.value)
    assert lake.export_session("p0_g0") == good


def test_a_dropped_session_is_gone_and_may_be_dropped_twice(lake: Lake) -> None:
    at_lake(lake, lambda post: post("/seed", {"seed": 1}))
    lake.drop_session("p0_g0")
    lake.drop_session("p0_g0")
    assert lake.export_session("p0_g0") is None


def test_the_log_outlives_the_server(tmp_path: Path) -> None:
    effect = Effect(
        kind="seed", rollout="p", run="1.0", lineage="0", request="r", turn=0, parent="", token="t"
    )
    for _ in range(2):
        log = EffectLog(tmp_path / "log")
        log.append(effect)
        log.close()
    assert read_effects(tmp_path / "log") == (effect, effect)


def test_an_effect_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"kind": "se')
    assert read_effects(path) == ()
    at_lake(Lake(path), lambda post: post("/seed", {"seed": 1}))
    assert [effect.kind for effect in read_effects(path)] == ["seed"]


def test_a_damaged_log_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("{}\n")
    with pytest.raises(BadInput, match="log, line 1"):
        read_effects(tmp_path / "log")
    (tmp_path / "log").write_text("{\n")
    with pytest.raises(BadInput, match="not JSON"):
        read_effects(tmp_path / "log")

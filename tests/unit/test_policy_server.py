"""The policy model server: the ledger, capture rows, refusals and held replies (H5, H7)."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from participants.gym import wire
from participants.gym.servers.capture import capture_row
from tests.gym_world import (
    TIMED,
    World,
    code,
    commit,
    drain,
    fence,
    folder_of,
    lines,
    prepare,
    release,
    send,
    until,
)

PATH = "/v1/chat/completions"


def ask(text: str = "hello") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def mark(call: int, *, run: str = "1.0", lineage: int = 0, after: int | None = None) -> Any:
    headers = {
        wire.ROLLOUT: "p7_g2",
        wire.RUN: run,
        wire.LINEAGE: str(lineage),
        wire.CALL: f"call-{call}",
    }
    return headers if after is None else headers | {wire.AFTER: f"call-{after}"}


class Policy:
    def __init__(self, root: Any) -> None:
        self.world = World(root)
        self.server, self.upstream = self.world.policy, self.world.upstream
        self.rows, self.client = self.world.sink.rows, self.world.clients["policy"]

    async def call(self, number: int, text: str = "hello", **marks: Any) -> httpx.Response:
        return await self.client.post(PATH, json=ask(text), headers=mark(number, **marks))

    def start(self, number: int, **marks: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.call(number, **marks))

    async def control(self, operation: str, message: Any) -> wire.Report:
        return await self.world.ask("policy", operation, message)


def run(root: Any, main: Any) -> None:
    asyncio.run(main(Policy(root)))


# -- the ledger -------------------------------------------------------------------------------


def test_a_repeat_gets_the_recorded_or_the_running_answer(tmp_path):
    async def main(policy):
        policy.upstream.open.clear()
        first, second = policy.start(1), policy.start(1)
        await until(lambda: policy.upstream.asked)
        first.cancel()  # the caller goes away; the call goes on
        policy.upstream.open.set()
        answer = await second
        assert answer.json() == (await policy.call(1)).json()
        assert answer.headers[wire.ROW] == "p7_g2/call-1"
        assert len(policy.upstream.asked) == len(policy.rows) == 1

    run(tmp_path, main)


def test_another_body_for_the_same_call_is_a_conflict(tmp_path):
    async def main(policy):
        await policy.call(1)
        assert code(await policy.call(1, "other")) == (409, wire.CONFLICT)
        assert len(policy.upstream.asked) == 1

    run(tmp_path, main)


def test_the_row_is_in_the_sink_before_the_reply_goes_out(tmp_path):
    async def main(policy):
        policy.world.sink.open.clear()
        call = policy.start(1)
        await until(lambda: policy.server.blockers() == ["p7_g2/call-1"])
        await until(lambda: policy.upstream.asked)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not call.done()
        policy.world.sink.open.set()
        assert (await call).status_code == 200
        assert policy.rows["p7_g2/call-1"] == {
            "prompt_token_ids": [], "token_ids": [7], "logprobs": [-0.5], "policy_version": 3,
            "prompt_chars": 5, "completion_chars": 14,
        }  # fmt: skip

    run(tmp_path, main)


def test_no_reply_without_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr("participants.gym.servers.policy.ROW_PAUSES_S", (0.0, None))

    async def main(policy):
        tries = []

        async def full(key, row):
            tries.append(key)
            raise OSError("no space left")

        put, policy.world.sink.put = policy.world.sink.put, full
        assert code(await policy.call(1)) == (500, wire.IO_ERROR)
        assert tries == ["p7_g2/call-1"] * 2
        policy.world.sink.put = put
        assert (await policy.call(1)).status_code == 200  # nothing was recorded: asked again

    run(tmp_path, main)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_upstream_errors_pass_through_and_are_not_recorded(tmp_path, status):
    async def main(policy):
        policy.upstream.fail = [status]
        answer = await policy.call(1)
        assert (answer.status_code, answer.json()) == (status, {"error": "as told"})
        assert wire.ROW not in answer.headers
        assert policy.rows == {}
        assert (await policy.call(1)).status_code == 200

    run(tmp_path, main)


def test_an_upstream_that_is_away_is_502(tmp_path):
    async def main(policy):
        async def down(request):
            raise httpx.ConnectError("refused")

        policy.server._upstream = httpx.AsyncClient(
            base_url="http://up", transport=httpx.MockTransport(down)
        )
        assert code(await policy.call(1)) == (502, "upstream_unreachable")
        plain = await policy.client.post(PATH, json=ask())
        assert code(plain) == (502, "upstream_unreachable")
        assert policy.server.blockers() == []

    run(tmp_path, main)


def test_a_server_that_lost_the_history_says_so(tmp_path):
    async def main(policy):
        assert code(await policy.call(3, after=2)) == (409, wire.LINEAGE_LOST)
        await policy.call(1)
        await policy.call(2, after=1)
        assert code(await policy.call(9, after=7)) == (409, wire.LINEAGE_LOST)
        assert len(policy.upstream.asked) == 2

    run(tmp_path, main)


def test_replies_that_the_caller_has_are_forgotten(tmp_path):
    async def main(policy):
        await policy.call(1)
        await policy.call(2, after=1)
        calls = policy.server._ledgers["p7_g2"].calls
        assert (calls[1].reply, calls[2].reply is None) == (None, False)
        assert code(await policy.call(1)) == (409, wire.CONFLICT)
        assert (await policy.call(2, after=1)).status_code == 200

    run(tmp_path, main)


def test_newer_runs_and_histories(tmp_path):
    async def main(policy):
        await policy.call(1)
        assert (await policy.call(2, run="1.1", after=1)).headers[wire.ROW] == "p7_g2-a1/call-2"
        assert code(await policy.call(2, after=1)) == (409, wire.STALE_ATTEMPT)
        started_over = await policy.call(1, run="1.2", lineage=2)
        assert started_over.headers[wire.ROW] == "p7_g2-a2/call-1"
        assert set(policy.server._ledgers["p7_g2"].calls) == {1}
        assert code(await policy.call(3, run="1.2", lineage=1)) == (409, wire.STALE_ATTEMPT)
        # Another controller without a restore: it knows nothing of this history.
        assert (await policy.call(1, "anew", run="3.0")).status_code == 200

    run(tmp_path, main)


@pytest.mark.parametrize(
    "wrong",
    [
        {wire.ROLLOUT: "../x"},
        {wire.ROLLOUT: ""},
        {wire.RUN: "1"},
        {wire.RUN: "-1.0"},
        {wire.RUN: "1.²"},
        {wire.LINEAGE: "x"},
        {wire.LINEAGE: "5"},
        {wire.CALL: "call-x"},
        {wire.CALL: "7"},
        {wire.AFTER: "call-"},
    ],
)
def test_bad_headers_are_400(tmp_path, wrong):
    async def main(policy):
        headers = {k: v.encode() for k, v in (mark(1) | wrong).items()}
        answer = await policy.client.post(PATH, json=ask(), headers=headers)
        assert code(answer) == (400, wire.BAD_REQUEST)
        assert policy.upstream.asked == []

    run(tmp_path, main)


def test_streams_cannot_be_captured(tmp_path):
    async def main(policy):
        body = ask() | {"stream": True}
        answer = await policy.client.post(PATH, json=body, headers=mark(1))
        assert code(answer) == (400, wire.BAD_REQUEST)

    run(tmp_path, main)


# -- closed -----------------------------------------------------------------------------------


def test_marked_callers_are_refused_others_wait(tmp_path):
    """H7."""

    async def main(policy):
        by = fence(1)
        await policy.control("prepare", prepare(by))
        assert code(await policy.call(1)) == (409, wire.PARKED)
        stock = asyncio.create_task(policy.client.post(PATH, json=ask("stock")))
        assert (await policy.control("drain", drain(by))).quiet
        assert policy.upstream.asked == []
        assert not stock.done()
        await policy.control("resume", release(by))
        assert (await stock).status_code == 200

    run(tmp_path, main)


@pytest.mark.parametrize("marked", [True, False])
def test_drain_calls_waits_for_calls_under_way(tmp_path, marked):
    async def main(policy):
        policy.upstream.open.clear()
        headers = mark(1) if marked else {}
        call = asyncio.create_task(policy.client.post(PATH, json=ask(), headers=headers))
        await until(lambda: policy.upstream.asked)
        by = fence(1)
        await policy.control("prepare", prepare(by))
        report = await policy.control("drain", drain(by, timeout_s=0.0))
        assert report.blockers == (("p7_g2/call-1",) if marked else ("1 calls without a rollout",))
        policy.upstream.open.set()
        assert (await policy.control("drain", drain(by))).quiet
        assert (await call).status_code == 200  # handed on while closing
        if marked:
            assert code(await policy.call(1)) == (409, wire.PARKED)  # but not under the hold

    run(tmp_path, main)


def test_drain_none_keeps_row_and_reply_until_the_release(tmp_path):
    async def main(policy):
        policy.upstream.open.clear()
        call = policy.start(1)
        await until(lambda: policy.upstream.asked)
        by = fence(1)
        await policy.control("prepare", prepare(by, drain="none"))
        assert (await policy.control("drain", drain(by))).quiet
        policy.upstream.open.set()
        for _ in range(200):
            await asyncio.sleep(0)
        assert (call.done(), policy.rows) == (False, {})
        renew = wire.Renew(fence=by, lease_s=60, **TIMED)
        assert not (await policy.control("renew", renew)).moved
        await policy.control("resume", release(by))
        assert (await call).status_code == 200
        assert set(policy.rows) == {"p7_g2/call-1"}

    run(tmp_path, main)


def test_drain_none_waits_for_a_row_that_is_being_written(tmp_path):
    async def main(policy):
        policy.world.sink.open.clear()
        call = policy.start(1)
        await until(
            lambda: (
                "p7_g2" in policy.server._ledgers
                and policy.server._ledgers["p7_g2"].calls[1].moving == "row"
            )
        )
        by = fence(1)
        await policy.control("prepare", prepare(by, drain="none"))
        assert not (await policy.control("drain", drain(by, timeout_s=0.0))).quiet
        policy.world.sink.open.set()
        assert (await policy.control("drain", drain(by))).quiet
        assert (await call).status_code == 200

    run(tmp_path, main)


# -- its part ---------------------------------------------------------------------------------


def _continuation(call: str | None, rollout: str = "p7_g2") -> wire.Continuation:
    return wire.Continuation(1, rollout, 0, rollout, call, {})


def test_only_the_turns_that_the_index_names_are_saved(tmp_path):
    async def main(policy):
        await policy.call(1)
        await policy.call(2, after=1)
        await policy.call(3, after=2)
        by = fence(1)
        await policy.control("prepare", prepare(by))
        await policy.control("drain", drain(by))
        folder = tmp_path / folder_of(by)
        folder.mkdir()
        named = (_continuation("call-2"), _continuation("call-9", "p8"), _continuation(None, "p9"))
        report = await policy.control("commit", commit(by, named))
        assert report.rows == {"p7_g2": ("p7_g2/call-1", "p7_g2/call-2"), "p9": ()}
        assert report.restarts == (wire.Restart("p8", wire.LINEAGE_LOST),)
        assert lines(folder / "gym/policy/policy0/rows.jsonl") == [
            {"rollout_id": "p7_g2", "rows": ["p7_g2/call-1", "p7_g2/call-2"]},
            {"rollout_id": "p9", "rows": []},
        ]
        ledger = lines(folder / "gym/policy/policy0/ledger.jsonl")
        assert [call["call"] for call in ledger[0]["calls"]] == ["call-1", "call-2"]

    run(tmp_path, main)


# -- capture ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "ids", "logprobs"),
    [
        (b"not json", [], []),
        (b"[]", [], []),
        (b'{"choices": []}', [], []),
        (b'{"choices": [{"logprobs": null}]}', [], []),
        (b'{"choices": [{"token_ids": [5, 6]}]}', [5, 6], []),
        (
            b'{"choices": [{"logprobs": {"content": [{"token": "token_id:4", "logprob": -1}]}}]}',
            [4],
            [-1.0],
        ),
        (
            b'{"choices": [{"logprobs": {"content": [{"token": "42", "logprob": -1}]}}]}',
            [],
            [-1.0],
        ),
    ],
)
def test_capture_reads_what_upstreams_give(reply, ids, logprobs):
    row = capture_row(b'{"messages": [{"content": "abc"}]}', reply, 9)
    assert (row["token_ids"], row["logprobs"], row["policy_version"]) == (ids, logprobs, 9)
    assert row["prompt_chars"] == 3


def test_retire_forgets(tmp_path):
    async def main(policy):
        await policy.call(1)
        answer = await send(policy.client, wire.RETIRE, wire.Retire(rollouts=("p7_g2", "p0")))
        assert answer.status_code == 200
        assert policy.server.live_runs() == 0

    run(tmp_path, main)


def test_a_stock_caller_that_goes_away_is_not_waited_for(tmp_path):
    async def main(policy):
        async def away(message):
            raise OSError("the caller closed the connection")

        scope = {
            "type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": [],
        }  # fmt: skip
        body = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive():
            return next(body, {"type": "http.disconnect"})

        policy.upstream.fail = [500]
        with pytest.raises(OSError, match="closed the connection"):
            await policy.server.app(scope, receive, away)
        assert policy.server.blockers() == []

    run(tmp_path, main)

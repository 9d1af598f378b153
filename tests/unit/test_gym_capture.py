"""Token ids are found wherever an upstream puts them; half an answer is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from participants.gym.servers.capture import capture_row


def token_ids(reply: dict[str, Any]) -> Any:
    return capture_row(b"{}", json.dumps(reply).encode(), 0)["token_ids"]


def with_tokens(*tokens: dict[str, Any]) -> dict[str, Any]:
    content = [{"logprob": -0.5, **token} for token in tokens]
    return {"choices": [{"logprobs": {"content": content}}]}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"choices": [{"token_ids": [7, 8]}]}, [7, 8]),
        ({"token_ids": [7, 8], "choices": [{}]}, [7, 8]),
        (with_tokens({"id": 7, "token": "a"}, {"id": 8, "token": ""}), [7, 8]),
        (with_tokens({"token_id": 7, "token": "a"}), [7]),
        (with_tokens({"token": "token_id:7"}, {"token": "token_id:8"}), [7, 8]),
        (with_tokens({"token": "7"}), []),
        (with_tokens({"token": "token_id:x"}), []),
        (with_tokens({"id": 7}, {"token": "a"}), []),
        (with_tokens({"id": "7"}), []),
        (with_tokens({"id": True}), []),
        ({"choices": [{"logprobs": None}]}, []),
        ({"choices": []}, []),
    ],
)
def test_token_ids(reply: dict[str, Any], expected: list[int]) -> None:
    assert token_ids(reply) == expected

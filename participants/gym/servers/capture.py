"""The token-capture row of one model call, from an OpenAI-compatible request and reply."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from participants.data_plane import Row

POLICY_VERSION = "x-policy-version"  # reply header of an upstream that knows which weights it has


def capture_row(request: bytes, reply: bytes, policy_version: int) -> Row:
    """Columns of the row: prompt_token_ids, token_ids, logprobs (lists, empty where the upstream
    gives none), policy_version, prompt_chars, completion_chars.

    Token ids are read from where upstreams put them: `token_ids` and `prompt_token_ids` beside
    the choice or on top; or in each token of the logprobs, as `token_id`, as `id` (llama.cpp), or
    as a text `token_id:123` (vLLM).
    """
    asked, said = _mapping(request), _mapping(reply)
    choice = _first(said.get("choices"))
    tokens = _tokens(choice)
    return {
        "prompt_token_ids": _numbers(said.get("prompt_token_ids"), choice.get("prompt_token_ids")),
        "token_ids": _numbers(choice.get("token_ids"), said.get("token_ids"), _ids_in(tokens)),
        "logprobs": [float(token["logprob"]) for token in tokens if "logprob" in token],
        "policy_version": policy_version,
        "prompt_chars": _text_length(asked.get("messages", asked.get("input"))),
        "completion_chars": _text_length(choice.get("message", said.get("output"))),
    }


def is_streamed(request: bytes) -> bool:
    return b'"stream"' in request and bool(_mapping(request).get("stream"))


def version_of(header: str | None, default: int) -> int:
    """The policy version that the upstream says, else the server's own."""
    return int(header) if header is not None and header.isascii() and header.isdigit() else default


def _mapping(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _first(items: Any) -> Mapping[str, Any]:
    first = items[0] if isinstance(items, list) and items else {}
    return first if isinstance(first, dict) else {}


def _tokens(choice: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [token for token in content or () if isinstance(token, dict)]


def _ids_in(tokens: Iterable[Mapping[str, Any]]) -> list[int]:
    """The id of every token, or none at all."""
    ids = [_id_of(token) for token in tokens]
    return [one for one in ids if one is not None] if None not in ids else []


def _id_of(token: Mapping[str, Any]) -> int | None:
    for name in ("token_id", "id"):
        if type(token.get(name)) is int:
            return int(token[name])
    mark, _, digits = str(token.get("token", "")).partition(":")
    return int(digits) if mark == "token_id" and digits.isascii() and digits.isdigit() else None


def _numbers(*candidates: Any) -> list[int]:
    """The first candidate that is a list of whole numbers."""
    for one in candidates:
        if isinstance(one, list) and one and all(type(number) is int for number in one):
            return one
    return []


def _text_length(value: Any) -> int:
    """Characters in all texts of the `content` or `text` fields below `value`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_text_length, value))
    if isinstance(value, dict):
        return sum(_text_length(value[key]) for key in ("content", "text") if key in value)
    return 0

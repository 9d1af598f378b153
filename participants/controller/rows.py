"""From token-capture rows to a training row. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from participants.data_plane import Row
from participants.gym.wire import RunReply

# `p7_g2/call-0`, `p7_g2-a1/call-4`: capture key, slash, model call (wire.capture_key).
_CAPTURE = re.compile(r"(?P<rollout>.+?)(-a[0-9]+)?/[^/]+")


def owner(capture_row: str) -> str:
    """The rollout that a token-capture row belongs to. Raises ValueError for another key."""
    found = _CAPTURE.fullmatch(capture_row)
    if found is None:
        raise ValueError(f"{capture_row!r} is not the key of a token-capture row")
    return found["rollout"]


def owned(capture_rows: Iterable[str], rollouts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Of these keys, those of these rollouts, by rollout."""
    found: dict[str, list[str]] = {rollout_id: [] for rollout_id in rollouts}
    for key in capture_rows:
        if (mine := found.get(owner(key))) is not None:
            mine.append(key)
    return {rollout_id: tuple(keys) for rollout_id, keys in found.items()}


def digest(value: Any) -> str:
    """SHA-256 of canonical JSON, in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def assemble(calls: Sequence[Row], reply: RunReply) -> dict[str, Any]:
    """One training row: list columns joined in the order of the calls, numbers as one list item
    a call, texts as a JSON list of them (a row has no list of texts); `result` as JSON text.

    calls: the capture rows of the history. Raises ValueError when their columns differ, or the
    result has no numeric `reward`.
    """
    if len({frozenset(call) for call in calls}) > 1:
        raise ValueError(f"{reply.rollout_id}: capture rows have different columns")
    columns = sorted(calls[0]) if calls else ()
    row = {name: _joined([call[name] for call in calls]) for name in columns}
    result = json.dumps(reply.result, sort_keys=True)
    return row | {"reward": reward(reply), "turns": reply.turns, "result": result}


def _joined(values: Sequence[Any]) -> Any:
    if isinstance(values[0], str):
        return json.dumps(values)
    if isinstance(values[0], list | tuple):
        return [item for value in values for item in value]
    return list(values)


def reward(reply: RunReply) -> float:
    """Raises ValueError rather than to take a failure for a reward of 0."""
    value = reply.result.get("reward") if isinstance(reply.result, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{reply.rollout_id}: the result has no numeric `reward`: {value!r}")
    return float(value)

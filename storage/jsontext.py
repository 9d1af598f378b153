"""JSON as this package writes and reads it: no NaN, no key twice, one form per value."""

from __future__ import annotations

import json
from typing import Any


def canonical(value: Any) -> bytes:
    """The one byte form of a JSON-able value, for digests: sorted keys, no spaces.

    Raises ValueError for NaN and infinities, TypeError for what JSON has no form for.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def line(value: Any) -> bytes:
    """One record of a JSONL file. Raises as `canonical`."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def strict_loads(data: bytes) -> Any:
    """A document that somebody else wrote. ValueError: no JSON, NaN, a key twice, too deep."""
    try:
        return json.loads(data, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the same key twice: {', '.join(repeated)}")
    return result

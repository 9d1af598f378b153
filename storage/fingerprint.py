"""The fingerprint of a topology: what must be equal at restore."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from storage.jsontext import canonical

_AT_MOST = 5  # differences named; the rest is counted


def fingerprint(topology: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the topology's canonical JSON. Order of keys does not matter.

    Raises ValueError or TypeError for what JSON cannot hold.
    """
    return hashlib.sha256(canonical(topology)).hexdigest()


def difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs, as a sentence for people; empty when nothing does."""
    found = list(_differences(saved, now, ""))
    if not found:
        return ""
    more = f"; and {len(found) - _AT_MOST} more" if len(found) > _AT_MOST else ""
    return "; ".join(found[:_AT_MOST]) + more


def _differences(saved: Any, now: Any, path: str) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in sorted(saved.keys() | now.keys()):
            below = f"{path}.{key}" if path else str(key)
            if key not in now:
                yield f"{below} was {saved[key]!r}, is now absent"
            elif key not in saved:
                yield f"{below} was absent, is now {now[key]!r}"
            else:
                yield from _differences(saved[key], now[key], below)
    elif canonical(saved) != canonical(now):
        yield f"{path} was {saved!r}, is now {now!r}"

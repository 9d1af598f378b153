"""What Gym's folder in a snapshot holds, read without any server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsm.storing import SavedPart


def part(saved: SavedPart) -> Mapping[str, Any]:
    return {}

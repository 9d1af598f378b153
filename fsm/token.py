"""What goes from the process that began a restore to the one that goes on with it (R8)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from attrs import frozen

from fsm import strict
from fsm.storing import Fence


@frozen(kw_only=True)
class RestoreToken:
    """A restore that stands at `gym_restored`: staged everywhere, activated nowhere.

    It can be pickled, and is JSON-able by `to_json`. Use it once, with `Engine.restore(token)`.
    formats: version of every participant of the first process. told, holding: who was told, and
    who confirmed a hold. facts: what they returned, the ones for this restore alone included.
    left_s: seconds left for all that is still to be read; counted anew by whoever takes over.
    """

    fence: Fence
    label: str
    snapshot: str | None
    formats: dict[str, int]
    told: tuple[str, ...]
    holding: tuple[str, ...]
    facts: dict[str, dict[str, Any]]
    left_s: float
    schema_version: int = 1

    def to_json(self) -> str:
        """Raises TypeError when a participant's facts are not JSON-able."""
        return json.dumps(strict.write(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `BadInput` (a ValueError) that names every bad key."""
        token = strict.read(cls, json.loads(text), "the restore token")
        if token.schema_version != 1:
            raise strict.BadInput("the restore token", [f"version {token.schema_version}, not 1"])
        return token

    def check(self, formats: Mapping[str, int]) -> None:
        """Raises ValueError unless this process has the same participants as the first one."""
        if self.formats == formats:
            return
        raise ValueError(
            f"the restore was begun with participants {self.formats}, this engine has "
            f"{dict(formats)}: give both the same ones (`Elsewhere` stands for one that lives in "
            f"another process)"
        )

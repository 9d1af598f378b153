"""Who was told of a hold, for a release that leaves nobody out."""

from __future__ import annotations

from collections.abc import Iterable

from fsm.storing import Fence


class Told:
    """Which servers know of the hold with this fence, and which of them confirmed it (S6)."""

    def __init__(self) -> None:
        self._fence: Fence | None = None
        self._servers: dict[str, bool] = {}  # told, and did it confirm its hold?

    def telling(self, fence: Fence, name: str) -> None:
        if fence != self._fence:
            self._fence, self._servers = fence, {}  # a newer hold ends the older (H1)
        self._servers.setdefault(name, False)

    def confirmed(self, fence: Fence, name: str) -> None:
        if fence == self._fence and name in self._servers:
            self._servers[name] = True

    def released(self, fence: Fence, name: str) -> None:
        if fence == self._fence:
            self._servers.pop(name, None)

    def holding(self, fence: Fence) -> list[str]:
        if fence != self._fence:
            return []
        return [name for name, confirmed in self._servers.items() if confirmed]

    def targets(self, fence: Fence, everybody: Iterable[str]) -> frozenset[str]:
        """Whom a release must reach. An actor that started afresh knows of nobody: everybody."""
        return frozenset(self._servers if fence == self._fence else everybody)

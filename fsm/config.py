"""The engine's configuration: every deadline, and its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import Attribute, field, frozen

from fsm.strict import read


def _seconds(minimum: float, maximum: float = 86_400.0) -> Any:
    def check(_: object, attribute: Attribute[Any], value: float) -> None:
        if not minimum <= value <= maximum:
            raise ValueError(
                f"{attribute.name} must be between {minimum:g} and {maximum:g}, not {value:g}"
            )

    return check


def _count(minimum: int, maximum: int) -> Any:
    return _seconds(minimum, maximum)


@frozen(kw_only=True)
class EngineConfig:
    """Deadlines in seconds, counts, and the three choices. Ranges are checked on construction."""

    snapshot_attempt_interval_s: float | None = field(default=None)
    prepare_timeout_s: float = field(default=300.0, validator=_seconds(0.01))
    commit_timeout_s: float = field(default=300.0, validator=_seconds(0.01))
    cut_timeout_s: float = field(default=300.0, validator=_seconds(0.01))
    seal_timeout_s: float = field(default=300.0, validator=_seconds(0.01))
    hold_after_seal_s: float = field(default=60.0, validator=_seconds(0.01))
    resume_timeout_s: float = field(default=60.0, validator=_seconds(0.01))
    resume_attempts: int = field(default=3, validator=_count(1, 100))
    restore_timeout_s: float = field(default=600.0, validator=_seconds(0.01))
    lease_s: float = field(default=60.0, validator=_seconds(0.03))
    renew_every_s: float = field(default=10.0, validator=_seconds(0.01))
    drain: Literal["calls", "none"] = "calls"
    release_at: Literal["publish", "cut"] = "publish"
    straggler: Literal["abort", "start_over"] = "abort"
    keep_latest: int = field(default=2, validator=_count(1, 10_000))
    max_consecutive_failures: int = field(default=3, validator=_count(1, 10_000))

    @snapshot_attempt_interval_s.validator
    def _interval(self, attribute: Attribute[Any], value: float | None) -> None:
        if value is not None:
            _seconds(0.01)(self, attribute, value)

    def __attrs_post_init__(self) -> None:
        if self.lease_s < 3 * self.renew_every_s:
            raise ValueError(
                f"lease_s ({self.lease_s:g}) must be at least 3 x renew_every_s "
                f"({self.renew_every_s:g}): one late renewal must not end a hold (H3)"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> EngineConfig:
        """From a dict, an OmegaConf node or any other mapping. Raises `BadInput` (a ValueError)
        that names every unknown key, wrong type and value out of range at once."""
        return read(cls, mapping, "the configuration of quiesce")

    @property
    def release_timeout_s(self) -> float:
        """All rounds of one rank's release together, with the pauses between them."""
        return self.resume_attempts * (self.resume_timeout_s + 1.0)

    @property
    def abort_timeout_s(self) -> float:
        """A release, and then the disk."""
        return self.release_timeout_s + self.seal_timeout_s

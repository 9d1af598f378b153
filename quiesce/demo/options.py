"""What `quiesce demo` can be told."""

from __future__ import annotations

from typing import Literal

from attrs import Attribute, field, frozen

GENERATIONS = 4  # rollouts of one prompt group


def _whole_groups(_: object, attribute: Attribute[int], value: int) -> None:
    if value < GENERATIONS or value % GENERATIONS:
        raise ValueError(
            f"--{attribute.name} must be a multiple of {GENERATIONS} (a prompt group has "
            f"{GENERATIONS} generations), not {value}"
        )


@frozen(kw_only=True)
class Options:
    """policy: a small real LLM, or a deterministic scripted upstream. data_plane: the real
    TransferQueue on a local Ray, or one in the trainer's memory. delay_s: of a scripted reply.
    drain: whether a pause waits for model replies; by default not for the LLM, whose one thread
    makes calls wait for each other for longer than a turn takes.
    """

    policy: Literal["llm", "scripted"] = "llm"
    data_plane: Literal["transfer_queue", "memory"] = "transfer_queue"
    rollouts: int = field(default=16, validator=_whole_groups)
    crashes: int = 2
    seed: int = 0
    concurrency: int = 8
    drain: Literal["calls", "none"] | None = None
    interval_s: float = 2.0
    delay_s: float = 0.3
    deadline_s: float = 900.0
    sabotage: str | None = None
    plain: bool = False

    @property
    def drains(self) -> Literal["calls", "none"]:
        return self.drain or ("none" if self.policy == "llm" else "calls")

    @property
    def groups(self) -> int:
        return self.rollouts // GENERATIONS

"""The train pump of the small trainer: claims complete groups, "learns", makes steps durable."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fsm.outcome import Anchor
from participants.controller.controller import RlController
from participants.controller.rows import digest
from quiesce.demo.anchors import Anchors


def advantages(rewards: Sequence[float]) -> list[float]:
    """Group-relative: how far each reward is from its group's mean, in standard deviations."""
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [0.0 if spread == 0 else (reward - mean) / spread for reward in rewards]


class TrainPump:
    """One optimizer step at a time. The policy version is the step.

    groups_per_step: complete groups that one step uses; the last step takes what is left.
    on_version: told the new version after each durable step (the policy servers).
    """

    def __init__(
        self,
        rl: RlController,
        anchors: Anchors,
        *,
        groups_per_step: int,
        on_version: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        if groups_per_step < 1:
            raise ValueError("groups_per_step must be at least 1")
        self.rl, self.anchors, self.groups_per_step = rl, anchors, groups_per_step
        self.anchor = anchors.newest()
        self._on_version = on_version

    @property
    def version(self) -> int:
        return self.anchor.step

    def load(self, anchor: Anchor | None) -> None:
        """After a restore: go on from the checkpoint that it named (R6). Raises ValueError."""
        if anchor is not None:
            self.anchors.load(anchor)
        self.anchor = self.anchors.newest()
        if self.anchor.step != self.rl.step:
            raise ValueError(
                f"the checkpoint is of step {self.anchor.step}, the ledger of step {self.rl.step}"
            )

    async def run(self, steps: int | None = None) -> None:
        """Until step `steps` is durable, or everything drawn is trained and nothing more comes."""
        while steps is None or self.rl.step < steps:
            heard = self.rl.bell.heard()
            step, groups = self.rl.step + 1, self._next_groups()
            if groups == 0:
                return
            if await self.rl.claim(step, groups) is None:
                await heard.wait()
            else:
                await self._train(step)

    def _next_groups(self) -> int:
        """How many groups the next step waits for; 0: there will be none."""
        if not self.rl.loader.exhausted:
            return self.groups_per_step
        return min(self.groups_per_step, self.rl.open_groups)

    async def _train(self, step: int) -> None:
        body = learn(step, await self.rl.rows(step), self.anchor)

        async def write_anchor() -> None:
            writing = asyncio.ensure_future(asyncio.to_thread(self.anchors.write, step, body))
            try:
                self.anchor = await asyncio.shield(writing)
            finally:
                await asyncio.wait({writing})  # no step appears after we were cancelled

        await self.rl.commit(step, write_anchor)
        if self._on_version is not None:
            await self._on_version(step)


def learn(step: int, rows: Mapping[str, Mapping[str, Any]], before: Anchor) -> dict[str, Any]:
    """What a step keeps of the rows that it used: enough to count each of them once."""
    groups: dict[str, list[str]] = {}
    for rollout_id, row in rows.items():
        groups.setdefault(row["group"], []).append(rollout_id)
    used = {}
    for members in groups.values():
        values = advantages([rows[rollout_id]["reward"] for rollout_id in members])
        for rollout_id, advantage in zip(members, values, strict=True):
            row = rows[rollout_id]
            result = json.loads(row["result"])
            used[rollout_id] = {"digest": digest(row), "advantage": advantage, "result": result}
    return {"step": step, "version": step, "parent": before.fingerprint, "rows": used}

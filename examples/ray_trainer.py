"""A controller that is a Ray actor: the driver begins the restore, the actor goes on with it.

    python examples/ray_trainer.py FOLDER

Sandboxes live in a Ray actor of their own. Each run of the program plays a few turns and ends with
a snapshot; run it again and it goes on from there.
"""

import asyncio
import os
import sys
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
import ray

from quiesce import (
    Attempt,
    Config,
    Elsewhere,
    Engine,
    FolderStore,
    Participant,
    Restore,
    RestoreToken,
)
from quiesce.controller import Controller, Found, Loaded, Records, RlCut

TURNS = 3


@ray.remote(num_cpus=0)
class Sandboxes:
    """The server side: it holds state, and stages what a restore brings."""

    def __init__(self) -> None:
        self.images: dict[str, list[int]] = {}
        self.staged: dict[str, list[int]] | None = None

    def run(self, rollout: str, turn: int) -> None:
        self.images.setdefault(rollout, []).append(turn)

    def export(self) -> dict[str, list[int]]:
        return self.images

    def stage(self, images: dict[str, list[int]] | None) -> None:
        self.staged = images

    def activate(self) -> None:
        if self.staged is not None:
            self.images, self.staged = self.staged, None


class Pool(Participant):
    """The sandboxes as a participant; both processes have one."""

    name = "pool"

    def __init__(self, sandboxes: Any) -> None:
        self.sandboxes = sandboxes

    async def commit(self, attempt: Attempt) -> None:
        async with attempt.part() as part:
            part.document("images", await self.sandboxes.export.remote())

    async def restore(self, restore: Restore) -> None:
        await self.sandboxes.stage.remote(restore.saved().document("images"))

    async def resume(self, attempt: Attempt | Restore) -> None:
        if isinstance(attempt, Restore):
            await self.sandboxes.activate.remote()

    async def rollback(self, restore: Restore) -> None:
        await self.sandboxes.stage.remote(None)


@ray.remote(num_cpus=0)
class Trainer:
    """The controller process: its books are the number of turns played (`RlState`)."""

    def __init__(self, folder: str, sandboxes: Any) -> None:
        self.sandboxes, self.played, self.open = sandboxes, 0, asyncio.Event()
        self.engine = Engine(
            Config(), FolderStore(folder), [Pool(sandboxes), Controller(self, ["pool"])]
        )

    def stop_dispatch(self) -> None:
        self.open.clear()

    def open_dispatch(self, unavailable: frozenset[str]) -> None:
        self.open.set()

    async def flush_acks(self, limit_s: float) -> int:
        return 0

    def state(self) -> RlCut:
        return RlCut({"played": [self.played]})

    async def load(self, state: Records | None, found: Found | None) -> Loaded:
        self.played = state["played"][0] if state else 0
        return Loaded()

    async def go_on(self, token: RestoreToken) -> str:
        return (await self.engine.restore(token)).snapshot or "nothing"

    async def train(self) -> str:
        for _ in range(TURNS):
            await self.open.wait()
            await self.sandboxes.run.remote("p0", self.played)
            self.played += 1
        saved = await self.engine.save()
        await self.engine.close()
        return f"{saved.snapshot}: {await self.sandboxes.export.remote()}"


async def main(folder: str) -> None:
    sandboxes = Sandboxes.remote()
    engine = Engine(
        Config(), FolderStore(folder), [Pool(sandboxes), Elsewhere("controller", calls=["pool"])]
    )
    token = await engine.restore(if_none="start", until="gym_restored")
    trainer = Trainer.remote(folder, sandboxes)  # may take its time: the driver renews
    print("from", await trainer.go_on.remote(token), flush=True)
    await engine.let_go()
    print("done", await trainer.train.remote(), flush=True)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    asyncio.run(main(os.path.abspath(sys.argv[1])))
    ray.shutdown()

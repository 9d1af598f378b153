"""A trainer with its own controller: own ledger, own loader, no Ray, no torch.

    python examples/own_controller.py FOLDER

Five calls (`RlState`) are all that quiesce needs of it. Training rows are in a data plane in
memory; they die with the process, and come back with the snapshot.
"""

import asyncio
import copy
import json
import sys
from pathlib import Path

from quiesce import Anchor, AsyncBarrier, Config, Engine, FolderStore
from quiesce.controller import (
    TRAIN,
    Controller,
    DataPlanePart,
    Found,
    Loaded,
    MemoryDataPlane,
    Records,
    RlCut,
)

PROMPTS, BATCH, SAVE_PERIOD = 24, 3, 2


class Ledger:
    """Prompts are drawn in order. A row waits, then a step claims it, then a checkpoint has it."""

    def __init__(self, plane: MemoryDataPlane, barrier: AsyncBarrier) -> None:
        self.plane, self.barrier = plane, barrier
        self.drawn, self.waiting = 0, []  # the loader's place; rows for the trainer
        self.claimed: dict[int, list[str]] = {}  # step → rows that no checkpoint has yet
        self.open, self.grown = asyncio.Event(), asyncio.Event()

    # -- RlState -------------------------------------------------------------------------------

    def stop_dispatch(self) -> None:
        self.open.clear()

    def open_dispatch(self, unavailable: frozenset[str]) -> None:
        self.open.set()

    async def flush_acks(self, limit_s: float) -> int:
        return 0  # nobody is owed any

    def state(self) -> RlCut:
        books = (self.drawn, self.waiting, list(self.claimed.items()))
        return RlCut({"books": [copy.deepcopy(books)]}, {"drawn": self.drawn})

    async def load(self, state: Records | None, found: Found | None) -> Loaded:
        try:
            books = (0, [], []) if state is None else copy.deepcopy(state["books"][0])
            (self.drawn, self.waiting, claimed), self.claimed = books, {}
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"these are no books of this trainer: {error!r}") from error
        for step, rows in reversed(claimed):
            if found is None:  # a restore that failed: as it was
                self.claimed[step] = rows
            elif step > (found.anchor_step or 0):  # not in the restored weights: used again
                self.waiting[:0] = rows
        return Loaded(keep_train=tuple(self.waiting))

    # -- the rollouts and the training ---------------------------------------------------------

    async def generate(self) -> None:
        while self.drawn < PROMPTS:
            await self.open.wait()
            await asyncio.sleep(0.02)  # the model call
            async with self.barrier.mutation("finish"):  # row and ledger: both or none
                row = {"token_ids": [self.drawn] * 3, "reward": self.drawn % 5}
                await self.plane.put_rows(TRAIN, {f"p{self.drawn}": row}, {})
                self.waiting.append(f"p{self.drawn}")
                self.drawn += 1
            self.grown.set()

    async def claim(self, step: int) -> list[float]:
        while len(self.waiting) < BATCH:
            self.grown.clear()
            await self.grown.wait()
        async with self.barrier.mutation("claim"):
            self.claimed[step], self.waiting = self.waiting[:BATCH], self.waiting[BATCH:]
        rows = await self.plane.get_rows(TRAIN, self.claimed[step])
        return [row["reward"] for row in rows.values()]

    async def trained(self) -> None:
        """A checkpoint has them: the rows may go."""
        async with self.barrier.mutation("trained"):
            await self.plane.clear(TRAIN, [key for rows in self.claimed.values() for key in rows])
            self.claimed = {}


async def main(folder: Path) -> None:
    plane, barrier, anchor = MemoryDataPlane(), AsyncBarrier(), Anchor(0, "base")
    ledger, rewards = Ledger(plane, barrier), []
    engine = Engine(
        Config(snapshot_attempt_interval_s=0.03),
        FolderStore(folder / "snapshots"),
        [DataPlanePart(plane), Controller(ledger, calls=["data_plane"])],
        barrier=barrier,
        anchor=lambda: anchor,
    )
    restored = await engine.restore(if_none="start")
    if restored.anchor is not None and restored.anchor.step:
        anchor = restored.anchor
        rewards = json.loads((folder / f"step_{anchor.step}.json").read_text())
    print(f"from {restored.snapshot or 'nothing'}, step {anchor.step}", flush=True)
    async with engine.running(), asyncio.TaskGroup() as group:
        group.create_task(ledger.generate())
        for step in range(anchor.step + 1, PROMPTS // BATCH + 1):
            rewards += await ledger.claim(step)
            if step % SAVE_PERIOD == 0:
                async with engine.exclusive("trainer_save"):
                    (folder / f"step_{step}.json").write_text(json.dumps(rewards))
                    anchor = Anchor(step, f"{len(rewards)} rewards")
                    await ledger.trained()
            print(f"step {step}", flush=True)
    print(f"done: {rewards}", flush=True)
    await engine.close()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    asyncio.run(main(Path(sys.argv[1])))

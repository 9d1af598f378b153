"""The shortest honest embedding: a trainer whose rollouts survive its death.

    python examples/embed.py FOLDER

Run it, kill it at any instant (Ctrl-C, kill -9), run it again: it goes on from the newest snapshot.
"""

import asyncio
import random
import sys
from collections.abc import Mapping

from quiesce import Anchor, Attempt, Config, Engine, FolderStore, Participant, Restore

TURNS = 20


class Rollouts(Participant):
    """Some rollouts in this process. Each turn needs a random number: the generator's state is
    part of the rollout, or a restored one would go another way."""

    name, format_version = "rollouts", 1

    def __init__(self, count: int) -> None:
        self.histories: dict[str, list[int]] = {f"p{n}_g0": [] for n in range(count)}
        self.staged: dict[str, list[int]] = {}
        self.may_run = asyncio.Event()
        self.may_run.set()

    async def play(self, rollout: str) -> None:
        while len(self.histories[rollout]) < TURNS:
            await self.may_run.wait()  # the turn boundary: a rollout parks here, nowhere else
            past = self.histories[rollout]
            past.append(random.Random(f"{rollout} {past}").randrange(100))
            await asyncio.sleep(0.05)

    async def prepare(self, attempt: Attempt) -> None:
        self.may_run.clear()

    async def commit(self, attempt: Attempt) -> Mapping[str, int]:
        async with attempt.part() as part:
            write = part.records("histories")
            for rollout, past in self.histories.items():
                write({"rollout": rollout, "past": past})
        return {"turns": sum(map(len, self.histories.values()))}

    async def restore(self, restore: Restore) -> None:
        records = restore.saved().records("histories")
        self.staged = {record["rollout"]: record["past"] for record in records}

    async def resume(self, attempt: Attempt | Restore) -> None:
        if isinstance(attempt, Restore):
            self.histories |= self.staged
            self.staged = {}
        self.may_run.set()

    async def rollback(self, restore: Restore) -> None:
        self.staged = {}


async def main(folder: str) -> None:
    rollouts = Rollouts(count=4)
    config = Config(snapshot_attempt_interval_s=0.2)
    weights = Anchor(0, "a digest of the weights that this program would have")
    engine = Engine(config, FolderStore(folder), [rollouts], anchor=lambda: weights)
    restored = await engine.restore(if_none="start")
    turns = {name: len(past) for name, past in rollouts.histories.items()}
    print(f"from {restored.snapshot or 'nothing'}: {turns}", flush=True)
    async with engine.running(), asyncio.TaskGroup() as group:
        for rollout in rollouts.histories:
            group.create_task(rollouts.play(rollout))
    print(f"done: {rollouts.histories}", flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

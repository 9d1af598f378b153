"""A trainer on an event loop: rollouts, optimizer steps, checkpoints, and a snapshot for each.

    python examples/embed_async.py FOLDER

Kill it at any instant and run it again: it loads the weights that the snapshot belongs to, and no
turn of a rollout is lost or done twice. SIGTERM is a preemption: it leaves a last snapshot behind.
"""

import asyncio
import hashlib
import json
import signal
import sys
from pathlib import Path

from quiesce import Anchor, Attempt, Config, Engine, FolderStore, Participant, Restore

ROLLOUTS, TURNS, SAVE_PERIOD = 6, 4, 2


class Rollouts(Participant):
    """Multi-turn rollouts in this process; a turn adds one number."""

    name = "rollouts"

    def __init__(self) -> None:
        self.turns: dict[str, list[int]] = {f"p{n}": [] for n in range(ROLLOUTS)}
        self.staged: dict[str, list[int]] | None = None
        self.open = asyncio.Event()

    async def play(self, name: str) -> None:
        while len(self.turns[name]) < TURNS:
            await self.open.wait()  # the turn boundary
            self.turns[name].append(len(self.turns[name]) * ROLLOUTS)
            await asyncio.sleep(0.02)

    async def prepare(self, attempt: Attempt) -> None:
        self.open.clear()

    async def commit(self, attempt: Attempt) -> None:
        async with attempt.part() as part:
            part.document("turns", self.turns)

    async def restore(self, restore: Restore) -> None:
        self.staged = restore.saved().document("turns")

    async def resume(self, attempt: Attempt | Restore) -> None:
        if self.staged is not None:
            self.turns, self.staged = self.staged, None
        self.open.set()

    async def rollback(self, restore: Restore) -> None:
        self.staged = None


class Trainer:
    """One "weight", the sum of all rollouts; a checkpoint is a file with a number."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weight = folder, 0
        self.anchor = Anchor(0, "the weights as they came")

    def save(self, step: int) -> None:
        text = json.dumps(self.weight)
        (self.folder / f"step_{step}.json").write_text(text)
        self.anchor = Anchor(step, hashlib.sha256(text.encode()).hexdigest())

    def load(self, anchor: Anchor | None) -> None:
        if anchor is not None and anchor.step:
            self.weight = json.loads((self.folder / f"step_{anchor.step}.json").read_text())
            self.anchor = anchor

    def kept(self) -> list[int]:
        return [int(path.stem.removeprefix("step_")) for path in self.folder.glob("step_*.json")]


async def main(folder: Path) -> None:
    rollouts, trainer, stop = Rollouts(), Trainer(folder), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = Engine(
        Config(snapshot_attempt_interval_s=0.05),
        FolderStore(folder / "snapshots"),
        [rollouts],
        anchor=lambda: trainer.anchor,
        kept_anchors=trainer.kept,
    )
    restored = await engine.restore(if_none="start")
    trainer.load(restored.anchor)
    print(f"from {restored.snapshot or 'nothing'}, step {trainer.anchor.step}", flush=True)
    step = trainer.anchor.step
    async with engine.running():  # snapshots by the clock; a bug in one raises here
        while step < ROLLOUTS and not stop.is_set():
            step += 1
            await rollouts.play(f"p{step - 1}")
            with engine.hold_off("optimizer_commit"):  # no snapshot sees half a step
                trainer.weight += sum(rollouts.turns[f"p{step - 1}"])
            if step % SAVE_PERIOD == 0:
                async with engine.exclusive("trainer_save"):  # and the snapshot that belongs to it
                    trainer.save(step)
            print(f"step {step}", flush=True)
    if stop.is_set():
        print(await engine.save(then="stay_paused"), flush=True)
    else:
        print(f"done: weight {trainer.weight}", flush=True)
        await engine.close()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    asyncio.run(main(Path(sys.argv[1])))

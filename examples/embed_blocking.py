"""A trainer without an event loop: the driver loop of a synchronous PPO trainer.

    python examples/embed_blocking.py FOLDER

The rollouts run in threads of an inference pool. Kill the program at any instant and run it again.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from quiesce import Anchor, Attempt, BlockingEngine, Config, FolderStore, Participant, Restore

PROMPTS, TURNS, SAVE_FREQ = 12, 4, 2


class Pool(Participant):
    """Rollouts in threads; they park at a turn boundary and nowhere else."""

    name = "pool"

    def __init__(self) -> None:
        self.turns: dict[str, list[int]] = {}
        self.staged: dict[str, list[int]] | None = None
        self.changed, self.busy, self.closed = threading.Condition(), 0, False

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self.changed:
            self.changed.wait_for(lambda: not self.closed)
            self.busy += 1
        try:
            yield
        finally:
            with self.changed:
                self.busy -= 1
                self.changed.notify_all()

    def play(self, prompt: int) -> None:
        with self.turn():
            past = self.turns.setdefault(f"p{prompt}", [])
        while len(past) < TURNS:
            with self.turn():
                threading.Event().wait(0.01)  # the model call
                past.append(prompt + len(past))

    def generate_sequences(self, prompts: list[int]) -> list[int]:
        workers = [threading.Thread(target=self.play, args=(prompt,)) for prompt in prompts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return [sum(self.turns[f"p{prompt}"]) for prompt in prompts]

    def forget(self) -> None:
        """The weights that learned from them are on the disk."""
        self.turns = {}

    async def prepare(self, attempt: Attempt) -> None:
        with self.changed:
            self.closed = True

    async def drain(self, attempt: Attempt) -> None:
        def parked() -> bool:
            with self.changed:
                return self.changed.wait_for(lambda: self.busy == 0, attempt.remaining_s())

        await attempt.in_thread(parked)

    async def commit(self, attempt: Attempt) -> None:
        async with attempt.part() as part:
            part.document("turns", self.turns)

    async def restore(self, restore: Restore) -> None:
        self.staged = restore.saved().document("turns")

    async def resume(self, attempt: Attempt | Restore) -> None:
        if self.staged is not None:
            self.turns, self.staged = self.staged, None
        with self.changed:
            self.closed = False
            self.changed.notify_all()


def fit(folder: Path) -> None:
    pool, weights = Pool(), [0]
    anchor = Anchor(0, "base")
    engine = BlockingEngine(
        Config(snapshot_attempt_interval_s=0.03),
        FolderStore(folder / "snapshots"),
        [pool],
        anchor=lambda: anchor,
    )
    with closing(engine):
        restored = engine.restore(if_none="start")
        if restored.anchor is not None and restored.anchor.step:
            anchor = restored.anchor
            weights = json.loads((folder / f"step_{anchor.step}.json").read_text())
        print(f"from {restored.snapshot or 'nothing'}, step {anchor.step}", flush=True)
        with engine.running():
            for step in range(anchor.step + 1, PROMPTS // 2 + 1):
                batch = pool.generate_sequences([2 * step - 2, 2 * step - 1])
                with engine.hold_off("optimizer_commit"):
                    weights.extend(batch)
                if step % SAVE_FREQ == 0 or step == PROMPTS // 2:
                    with engine.exclusive("save_checkpoint"):
                        (folder / f"step_{step}.json").write_text(json.dumps(weights))
                        anchor = Anchor(step, f"sum {sum(weights)}")
                        pool.forget()
                engine.check()  # what went wrong in the background raises here
                print(f"step {step}", flush=True)
        print(f"done: {weights}", flush=True)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    fit(Path(sys.argv[1]))

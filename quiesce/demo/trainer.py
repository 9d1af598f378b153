"""The demo's trainer process: data plane, NemoGym actor, controller, engine and pumps.

    python -m quiesce.demo.trainer SPEC

It is the smallest honest trainer: an embedding as in examples/embed.py, with real pumps. When all
rollouts are done it leaves `evidence.json` for the audit and ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from participants.barrier import AsyncBarrier
from participants.controller.controller import RlController
from participants.controller.loader import ListLoader
from participants.controller.participant import Controller
from participants.controller.pumps import RolloutPump
from participants.data_plane import CAPTURE, TRAIN, DataPlane
from participants.gym.actor import NemoGymActor, start_actor
from participants.gym.client import GymServer
from participants.gym.participant import Gym
from participants.gym.remote import in_reach
from quiesce import Config, Engine, FolderStore, Participant, Restored
from quiesce.demo import evidence, sabotage
from quiesce.demo.anchors import BOOTSTRAP, Anchors
from quiesce.demo.effects import read_effects
from quiesce.demo.events import EventLog
from quiesce.demo.options import GENERATIONS, Options
from quiesce.demo.pumps import TrainPump
from quiesce.demo.spec import KINDS, Spec, write_whole

UP_WITHIN_S = 120.0


@frozen
class Plane:
    """A data plane with its participant; `sink` is where policy servers put capture rows."""

    plane: DataPlane
    participant: Participant
    sink: str
    actor: Any


class Trainer:
    """One life of the trainer. others: participants besides its own three."""

    def __init__(
        self, spec: Spec, plane: Plane, events: EventLog, others: Iterable[Participant] = ()
    ) -> None:
        self.spec, self.plane, self.events = spec, plane.plane, events
        self.barrier = AsyncBarrier()
        self.anchors = Anchors(spec.places.anchors)
        prompts = list(spec.prompts)
        if self._sabotaged("loader") is not None:
            sabotage.skip_rollout(prompts)
        self.rl = RlController(
            plane.plane,
            self.barrier,
            in_reach(plane.actor),
            ListLoader(prompts),
            servers=["agent"],
            group_size=GENERATIONS,
        )
        self.train = TrainPump(self.rl, self.anchors, groups_per_step=1)
        # One group may run ahead of training for each that fits into the rollouts in flight.
        ahead = spec.options.concurrency // GENERATIONS + 2
        self.pump = RolloutPump(
            self.rl, concurrency=spec.options.concurrency, max_open_groups=ahead
        )
        self.engine = Engine(
            Config.from_mapping(_config(spec.options) | spec.engine),
            FolderStore(spec.places.snapshots),
            [Gym([plane.actor]), plane.participant, Controller(self.rl), *others],
            barrier=self.barrier,
            anchor=lambda: None if self.rl.committing else self.train.anchor,
        )

    async def live(self) -> None:
        """Restore, run to the end, leave the evidence."""
        restored = await self._restore()
        self._tell(restored)
        write_whole(self.spec.places.started(self.spec.life), "")
        async with self.engine.running(), asyncio.TaskGroup() as group:
            telling = group.create_task(self._tell_states())
            training = group.create_task(self.train.run(steps=self.spec.options.groups - 1))
            await self.pump.run()
            await training
            async with self.engine.exclusive("the end of the run"):
                telling.cancel()
                # The last step may have become durable during an attempt, when nothing is cleared.
                await self.rl.tend()
            # Here the snapshot that the run leaves behind is taken.
        await self._leave_evidence()
        await self.engine.close()

    async def _restore(self) -> Restored:
        begun = time.monotonic()
        restored = await self.engine.restore(if_none="start")
        self.train.load(restored.anchor or BOOTSTRAP)
        facts = restored.facts.get("controller", {})
        if restored.snapshot is not None:
            self.events.write(
                "restored",
                snapshot=restored.snapshot,
                took_s=time.monotonic() - begun,
                continued=len(facts["continued"]),
                started_over=len(facts["started_over"]),
                answered=len(facts["answered"]) + len(facts["kept"]),
            )
        return restored

    # -- telling -------------------------------------------------------------------------------

    def _tell(self, restored: Restored) -> None:
        """What becomes of every rollout that the dead process had begun."""
        decisions = list(restored.facts.get("controller", {}).get("decisions", ()))
        for step, rows in self._steps().items():
            decisions += [f"{name}: trained in step {step}, kept" for name in rows]
        known = {decision.partition(":")[0] for decision in decisions}
        begun = sorted({effect.rollout for effect in read_effects(self.spec.places.effects)})
        decisions += [
            f"{name}: starts over, began after the snapshot" for name in begun if name not in known
        ]
        for decision in decisions:
            self.events.write("note", text=decision)

    async def _tell_states(self) -> None:
        told: dict[str, tuple[str, int]] = {}
        step = self.rl.step
        while True:
            heard = self.rl.bell.heard()
            for one in self.rl.ledger.entries():
                state = SHOWN.get(one.state)
                if state is not None and told.get(one.rollout_id) != (state, one.attempt_index):
                    told[one.rollout_id] = (state, one.attempt_index)
                    self._tell_state(one.rollout_id, one.attempt_index, state)
            while step < self.rl.step:  # the ledger forgets what is trained
                step += 1
                rows = self.anchors.read(step)["rows"]
                for name in rows:
                    self._tell_state(name, told.get(name, ("", 0))[1], "trained")
                self.events.write("step", step=step, rows=len(rows))
            await heard.wait()

    def _tell_state(self, rollout: str, run: int, state: str) -> None:
        self.events.write("rollout", rollout=rollout, run=run, state=state)

    # -- the end -------------------------------------------------------------------------------

    async def _leave_evidence(self) -> None:
        """Plain data about what is there, for an audit in another process."""
        await self._sabotage()
        rows = await self.plane.get_rows(TRAIN, await self.plane.keys(TRAIN))
        capture = await self.plane.keys(CAPTURE)
        drawn = self.spec.rollouts
        found = evidence.gather(drawn, self.rl.ledger, rows, self._steps(), capture)
        if self._sabotaged("ledger") is not None:
            sabotage.double_rollout(found["finished"])
        found["rows_of"] = evidence.rows_of(drawn, found)
        write_whole(self.spec.places.evidence, json.dumps(found))

    def _steps(self) -> dict[int, dict[str, Any]]:
        return {step: self.anchors.read(step)["rows"] for step in self.anchors.steps()}

    def _sabotaged(self, where: str) -> sabotage.Kind | None:
        kind = sabotage.KINDS.get(self.spec.options.sabotage or "")
        return kind if kind is not None and kind.where == where else None

    async def _sabotage(self) -> None:
        kind = self._sabotaged("plane")
        if kind is not None:
            broken = {"drop_row": sabotage.drop_row, "stray_row": sabotage.stray_row}[kind.name]
            self.events.write("note", text=f"sabotage: {kind.sentence}: {await broken(self.plane)}")


SHOWN = {"sealed": "finished", "claimed": "finished", "trained": "trained", "dropped": "dropped"}


def _config(options: Options) -> dict[str, Any]:
    return {
        "snapshot_attempt_interval_s": options.interval_s,
        "prepare_timeout_s": 60.0,
        "drain": options.drains,
        "lease_s": 30.0,
        "renew_every_s": 5.0,
    }


def _servers(spec: Spec) -> list[GymServer]:
    return [
        GymServer(kind, name, f"http://127.0.0.1:{spec.ports[name]}")
        for name, kind in KINDS.items()
    ]


@asynccontextmanager
async def transfer_queue(spec: Spec) -> AsyncIterator[Plane]:
    """A local Ray, the real TransferQueue on it, and the NemoGym actor as a Ray actor."""
    import ray

    from participants.transfer_queue.cluster import start
    from participants.transfer_queue.participant import TransferQueue

    ray.init(
        num_cpus=12,  # TransferQueue's actors take a whole CPU each, and wait silently for it
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200 * 2**20,
        _temp_dir=str(Path(spec.ray_folder) / str(spec.life)),
    )
    plane = start(2)
    address = ray.get_runtime_context().gcs_address
    actor = start_actor(_servers(spec), spec.token)
    yield Plane(plane, TransferQueue(plane), f"tq:{address}", actor)
    plane.close()
    ray.shutdown()


@asynccontextmanager
async def memory(spec: Spec) -> AsyncIterator[Plane]:
    """A data plane in this process; the policy server reaches it over HTTP."""
    from participants.data_plane import DataPlanePart
    from participants.memory_data_plane import MemoryDataPlane
    from quiesce.demo.sink import serving

    plane = MemoryDataPlane()
    port = spec.ports["sink"]
    async with serving(plane, spec.token, port) as url:
        yield Plane(
            plane, DataPlanePart(plane), f"memory:{url}", NemoGymActor(_servers(spec), spec.token)
        )


async def main(path: Path, others: Iterable[Participant] = ()) -> None:
    spec = Spec.load(path)
    places = spec.places
    events = EventLog(places.events)
    opening = transfer_queue if spec.options.data_plane == "transfer_queue" else memory
    begun = time.monotonic()
    async with opening(spec) as plane:
        events.write(
            "process",
            process=f"data plane ({spec.options.data_plane})",
            did="started",
            took_s=time.monotonic() - begun,
        )
        write_whole(places.sink, plane.sink)
        await _servers_up(plane.actor)
        await Trainer(spec, plane, events, others).live()


async def _servers_up(actor: Any) -> None:
    """Until every Gym server answers. Raises the last refusal when time is over."""
    from fsm.outcome import Unavailable

    until = time.monotonic() + UP_WITHIN_S
    while True:
        try:
            await in_reach(actor).discover_checkpoint_capabilities(5.0)
            return
        except Unavailable:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.2)


def log_to_stderr() -> None:
    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")


if __name__ == "__main__":
    log_to_stderr()
    asyncio.run(main(Path(sys.argv[1])))

"""The language of the scenario files: one command a block, answered with what happened.

    # prose that tells the story
    save
    ----
    what rows fired, which hooks ran in which order, how it ended

One `Stage` per file: a `World` on one virtual-time loop.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

from attrs import evolve, fields

from fsm.engine import SnapshotEngine
from fsm.outcome import Aborted, QuiesceError, Restored, Saved, Skipped, Unresolved
from fsm.trace import Event, Trace
from participants.memory import Fault
from participants.virtual_time import VirtualTimeLoop
from storage.memory_faults import PublishFault
from tests.world import CONFIG, NAMES, World


class Stage:
    """What the commands of one file act on. A command `save-meanwhile` is `save_meanwhile`."""

    def __init__(self) -> None:
        self.loop = VirtualTimeLoop()
        self.world = World()
        self.task: asyncio.Task[Any] | None = None
        self.starter = self.world.engine  # whose save or restore `finish` waits for
        self.publishes: list[PublishFault] = []
        self.held_off = ExitStack()
        self.shown: tuple[Trace | None, int] = (None, 0)

    def do(self, line: str) -> str:
        name, *arguments = line.split()
        command: Callable[..., Any] = getattr(self, "do_" + name.replace("-", "_"))
        answer = command(*arguments)
        return "ok" if answer is None else str(answer)

    def close(self) -> None:
        async def drained() -> None:
            while others := asyncio.all_tasks(self.loop) - {asyncio.current_task()}:
                for task in others:
                    task.cancel()
                await asyncio.wait(others, timeout=CONFIG.release_timeout_s)

        self.run(drained())
        self.loop.close()

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(main)

    # -- the world -------------------------------------------------------------------------------

    def do_participants(self, *settings: str) -> str:
        """Begin with other settings of the engine: key=value; latency_s is the wires'."""
        given = dict(setting.split("=") for setting in settings)
        latency_s = float(given.pop("latency_s", "0"))
        known = {field.name: field.type for field in fields(type(CONFIG))}
        changes = {name: value_of(value, known[name]) for name, value in given.items()}
        self.world = World(evolve(CONFIG, **changes), latency_s)
        return " > ".join(NAMES)

    def do_work(self, who: str, item: str) -> str:
        return "done" if self.world.work(who, item) else "refused: it is held"

    def do_move(self, who: str, item: str) -> None:
        self.world.move(who, item)

    def do_crash(self, who: str) -> None:
        self.world.crash(who)

    def do_fault(self, who: str, hook: str, kind: str, *arguments: str) -> None:
        """fault WHO HOOK refuse|fail|bug|hang|lost|late [SECONDS] [xTIMES]"""
        times = [int(one[1:]) for one in arguments if one.startswith("x")] or [1]
        delays = [float(one) for one in arguments if not one.startswith("x")]
        fault = getattr(Fault, kind)(*delays)
        self.world.stations[who].fault(hook, *[fault] * times[0])

    def do_disk(self, operation: Any, how: str) -> None:
        """disk OPERATION full, or disk OPERATION SECONDS"""
        if how == "full":
            error = OSError(28, "No space left on device")
            self.world.controller.memory.faults.fail(operation, error)
        else:
            self.world.controller.store.slow[operation] = float(how)

    def do_flip(self, snapshot: str, path: str) -> None:
        self.world.disk.flip(snapshot, path)

    def do_publish_held(self) -> None:
        self.publishes.append(self.world.controller.memory.faults.next_publish(held=True))

    def do_publish_claimed(self) -> None:
        self.world.controller.memory.faults.next_publish(published=False)

    def do_publish_not_durable(self) -> None:
        self.world.controller.memory.faults.next_publish(durable=False)

    def do_release_publish(self) -> None:
        self.publishes.pop(0).release()
        self.run(asyncio.sleep(0.5))

    # -- the trainer -----------------------------------------------------------------------------

    def do_save(self) -> str:
        return self.finished(self.world.engine.save())

    def do_start_save(self) -> None:
        self.starter = self.world.engine
        self.task = self.loop.create_task(self.world.engine.save())

    def do_save_cancelled_after(self, seconds: str) -> str:
        self.do_start_save()
        self.do_advance(seconds)
        assert self.task is not None
        self.task.cancel()
        return self.do_finish()

    def do_restore(self, *options: str) -> str:
        return self.finished(self.world.engine.restore(**dict(one.split("=") for one in options)))  # type: ignore[call-overload]

    def do_start_restore(self) -> None:
        self.starter = self.world.engine
        self.task = self.loop.create_task(self.world.engine.restore())

    def do_finish(self) -> str:
        assert self.task is not None, "nothing was started"
        return self.finished(self.task, self.starter)

    def do_advance(self, seconds: str) -> str:
        self.run(asyncio.sleep(float(seconds)))
        return f"{self.loop.time():g} s"

    def do_hold_off(self, why: str) -> None:
        self.held_off.enter_context(self.world.engine.hold_off(why))

    def do_hold_on(self) -> None:
        self.held_off.close()

    def do_kill_controller(self) -> None:
        """The process ends; a new one starts. What the old one held stays held."""
        self.world.controller.die()
        self.world.new_controller()

    def do_lose_lock(self) -> None:
        """The old process lives on beside the new one."""
        self.world.controller.lose_lock()
        self.world.new_controller()

    def do_second_controller(self) -> str:
        """It tries to take the root while the first one has it."""
        first = self.world.controller
        answer = self.finished(self.world.new_controller().engine.open())
        self.world.controllers.append(first)
        return answer

    # -- what is there ---------------------------------------------------------------------------

    def do_status(self) -> str:
        activity = self.world.engine.activity()
        doing = "nothing" if activity is None else f"{activity.operation} in {activity.state}"
        if activity is not None and activity.waiting:
            doing += f", waiting for {', '.join(sorted(activity.waiting))}"
        items = [f"{name}: {' '.join(self.world.stations[name].items) or '-'}" for name in NAMES]
        return "\n".join([f"doing: {doing}", f"held: {listed(self.world.held())}", *items])

    def do_store(self) -> str:
        lines = [f"{len(self.world.disk.drafts)} unpublished"]
        for snapshot in self.world.snapshots():
            saved = zip(NAMES, self.world.saved_items(snapshot), strict=True)
            parts = [f"{name}: {' '.join(items) or '-'}" for name, items in saved]
            lines.append(f"{snapshot}  {', '.join(parts)}")
            lines += self.world.problems_of(snapshot)
        lines += [f"{snapshot}  quarantined" for snapshot in sorted(self.world.disk.quarantine)]
        return "\n".join(lines)

    # -- telling ---------------------------------------------------------------------------------

    def finished(self, main: Any, engine: SnapshotEngine | None = None) -> str:
        try:
            outcome = told(self.run(main))
        except (asyncio.CancelledError, QuiesceError, OSError, ValueError) as error:
            outcome = f"raises {type(error).__name__}: {error}".removesuffix(": ")
        self.run(asyncio.sleep(0))
        trace = (engine or self.world.engine).last_trace
        lines = [*self.new_lines(trace), outcome, *self.world.witness.broken]
        return re.sub(r"(tmp_[0-9-]+)_[0-9a-f]{8}", r"\1_nonce", "\n".join(lines))

    def new_lines(self, trace: Trace | None) -> Iterator[str]:
        if trace is None:
            return
        last, seen = self.shown
        events = trace.events[seen if last is trace else 0 :]
        self.shown = (trace, len(trace.events))
        # Calls that are cancelled at one instant end in no order that means anything.
        for _, group in itertools.groupby(events, key=lambda one: (one.at_s, cancelled(one))):
            together = list(group)
            for event in sorted(together, key=_what) if cancelled(together[0]) else together:
                yield from shown(event)


def _what(event: Event) -> str:
    return event.what


def cancelled(event: Event) -> bool:
    return bool(event.kind == "call" and event.data["outcome"] == "cancelled")


def shown(event: Event) -> Iterator[str]:
    took = f" {event.data['took_s']:g} s" if event.data.get("took_s") else ""
    if event.kind == "row":
        why = f"  ({event.data['why']})" if event.data.get("why") else ""
        yield f"{event.what}{why}"
    elif event.kind == "call":
        outcome = event.data["outcome"]
        if event.what.endswith(".renew") and outcome in ("ok", "cancelled"):
            return  # they come every few seconds, and say nothing
        yield f"  {event.what}{took}" + ("" if outcome == "ok" else f"  {outcome}")
    elif event.kind == "dropped":
        yield f"  dropped: {event.what}, late"


def told(outcome: Any) -> str:
    if isinstance(outcome, Saved):
        durable = "" if outcome.durable else ", not durable"
        return f"Saved {outcome.snapshot}{durable}{unreleased(outcome)}"
    if isinstance(outcome, Skipped):
        detail = f": {outcome.detail}" if outcome.detail else ""
        return f"Skipped, {outcome.reason.value}{detail}"
    if isinstance(outcome, Aborted):
        return f"Aborted, {outcome.cause}{unreleased(outcome)}"
    if isinstance(outcome, Unresolved):
        return f"Unresolved {outcome.snapshot}{unreleased(outcome)}"
    if isinstance(outcome, Restored):
        return f"Restored {outcome.snapshot}"
    return "ok"


def unreleased(outcome: Any) -> str:
    return f"; not released: {listed(sorted(outcome.unreleased))}" if outcome.unreleased else ""


def listed(names: list[str]) -> str:
    return ", ".join(names) or "nobody"


def value_of(text: str, kind: Any) -> Any:
    kinds = {"float": float, "int": int}
    return kinds.get(kind if isinstance(kind, str) else getattr(kind, "__name__", ""), str)(text)

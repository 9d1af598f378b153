"""Participants that people copy from the examples."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

from quiesce.testing import IN_PROCESS, Conformance
from tests.fresh import REPOSITORY


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ExampleConformance(Conformance):
    virtual_time = True
    no_lease = no_fence = fresh_only = IN_PROCESS


class TestEmbed(ExampleConformance):
    async def make(self) -> Any:
        return example("embed").Rollouts(10)

    async def work(self, one: Any, number: int) -> None:
        await one.play(f"p{number}_g0")

    async def observe(self, one: Any) -> Any:
        return {name: list(past) for name, past in one.histories.items()}

    async def is_held(self, one: Any) -> bool:
        return not one.may_run.is_set()


class TestEmbedAsync(ExampleConformance):
    async def make(self) -> Any:
        one = example("embed_async").Rollouts()
        one.open.set()
        return one

    async def work(self, one: Any, number: int) -> None:
        await one.play(f"p{number % len(one.turns)}")

    async def observe(self, one: Any) -> Any:
        return {name: list(past) for name, past in one.turns.items()}

    async def is_held(self, one: Any) -> bool:
        return not one.open.is_set()

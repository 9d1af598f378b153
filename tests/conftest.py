"""Profiles of Hypothesis, chosen by HYPOTHESIS_PROFILE; every attempt's trace is validated."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fsm.operation import Operation
from fsm.run import Run
from tests.traces import problems

pytest_plugins = ("tests.skips",)

# ci: the same examples in every run. soak: new ones each time, ten times as many.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=300,
    stateful_step_count=40,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.register_profile("soak", settings.get_profile("ci"), derandomize=False, max_examples=3_000)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


def pytest_configure(config: pytest.Config) -> None:
    """A soak draws its seed here and prints it: pass it back as --hypothesis-seed."""
    if PROFILE == "soak" and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("hypothesis_seed", None)
    return f"hypothesis: profile {PROFILE}" + (f", seed {seed}" if seed else "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what the scenarios do into their files; review the difference",
    )


@pytest.fixture(autouse=True)
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every attempt of every engine is replayed when it ends. The list has what was wrong; it must
    be empty at the end of the test."""
    operations: dict[int, Operation] = {}
    found: list[str] = []
    begin, drive = Operation.__init__, Run.drive

    def remembered(self: Operation, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        operations[id(self.trace)] = self

    async def validated(self: Run, *args: Any) -> None:
        await drive(self, *args)
        if self.machine.over:
            operation = operations.get(id(self.trace))
            found.extend(problems(self.machine.table, self.trace, operation))

    monkeypatch.setattr(Operation, "__init__", remembered)
    monkeypatch.setattr(Run, "drive", validated)
    yield found
    assert found == [], "\n".join(found)

"""Every example runs; killed and run again it comes to the same end as without."""

from __future__ import annotations

import ast
import signal
import sys
from pathlib import Path

import pytest

from tests.examples.program import EXAMPLES, run, stop_at

KILLED = [
    ("embed_async.py", "step 3"),
    ("embed_blocking.py", "step 3"),
    ("own_controller.py", "step 3"),
]


@pytest.mark.parametrize(("name", "line"), KILLED)
def test_killed_and_run_again_it_comes_to_the_same_end(
    name: str, line: str, tmp_path: Path
) -> None:
    whole = run(name, tmp_path / "whole")
    assert whole[0] == "from nothing, step 0"
    first = stop_at(name, tmp_path / "killed", line, signal.SIGKILL)
    assert not first[-1].startswith("done"), "it was killed before its end"
    second = run(name, tmp_path / "killed")
    assert second[0].startswith("from snapshot_")
    assert second[-1] == whole[-1]


def test_the_shortest_one_goes_on_too(tmp_path: Path) -> None:
    whole = run("embed.py", tmp_path / "root")
    assert whole[0].startswith("from nothing")
    assert run("embed.py", tmp_path / "root")[-1] == whole[-1]


def test_a_preemption_leaves_a_snapshot_behind(tmp_path: Path) -> None:
    first = stop_at("embed_async.py", tmp_path / "root", "step 3", signal.SIGTERM)
    assert first[-1].startswith("Saved(snapshot='snapshot_")
    second = run("embed_async.py", tmp_path / "root")
    assert second[0].startswith("from snapshot_")
    assert second[-1] == "done: weight 216"


@pytest.mark.slow
def test_a_restore_that_driver_and_actor_share(tmp_path: Path) -> None:
    first, second = (run("ray_trainer.py", tmp_path / "root") for _ in range(2))
    assert first[0] == "from nothing"
    assert first[-1].endswith("{'p0': [0, 1, 2]}")
    assert second[0].startswith("from snapshot_")
    assert second[-1].endswith("{'p0': [0, 1, 2, 3, 4, 5]}")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_import_nothing_of_ours_but_quiesce(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    roots = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    ours = {name for name in roots if name.partition(".")[0] not in sys.stdlib_module_names}
    allowed = {"quiesce", "quiesce.controller"} | (
        {"ray"} if path.name == "ray_trainer.py" else set()
    )
    assert ours <= allowed

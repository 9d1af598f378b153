"""What semantic versioning covers (docs/embed.md): a name that goes is a major version."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "quiesce": (
        "AbortReason Aborted Anchor AsyncBarrier Attempt BlockingEngine Cause Config Elsewhere "
        "Engine Fault FolderStore InvariantError MemoryParticipant MemoryStore NotReleased "
        "Participant QuiesceError Refused Restore RestoreFailed RestoreToken Restored SaveOutcome "
        "Saved SavedPart Skip SkipReason Skipped SnapshotRejected TooManyFailures "
        "Unavailable Unresolved"
    ),
    "quiesce.controller": (
        "Barrier CAPTURE CaptureSink Controller DataPlane DataPlanePart Found ListLoader Loaded "
        "Loader MemoryDataPlane Records RlController RlCut RlState RolloutPump Row TRAIN Watched "
        "check_row"
    ),
    "quiesce.gym": (
        "AgentServer Gym GymServer NemoGymActor PolicyServer ResourceServer RunReply RunRequest "
        "SessionCodec serve start_actor"
    ),
    "quiesce.testing": (
        "BarrierConformance CaptureSinkConformance Conformance DataPlaneConformance IN_PROCESS "
        "RlStateConformance"
    ),
    "quiesce.transfer_queue": "TransferQueue TransferQueuePlane TransferQueueSink connect start",
}
UNDOCUMENTED = {"SaveOutcome", "Records", "Row", "CAPTURE", "TRAIN"}  # aliases and constants


def declared(module: str) -> list[str]:
    """`__all__`, read and not imported: `transfer_queue` needs its extra."""
    path = ROOT / module.replace(".", "/")
    source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_these(module: str) -> None:
    assert sorted(declared(module)) == sorted(PUBLIC[module].split())


@pytest.mark.parametrize("module", ["quiesce", "quiesce.controller", "quiesce.gym"])
def test_every_public_name_is_there_and_says_what_it_is(module: str) -> None:
    imported = importlib.import_module(module)
    for name in declared(module):
        one = getattr(imported, name)
        assert name in UNDOCUMENTED or (one.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("name", ["Engine", "BlockingEngine"])
def test_every_word_of_an_engine_has_a_docstring(name: str) -> None:
    engine = getattr(importlib.import_module("quiesce"), name)
    words = [word for word in dir(engine) if not word.startswith("_")]
    assert [word for word in words if not (getattr(engine, word).__doc__ or "").strip()] == []


def test_both_engines_have_the_same_words() -> None:
    from quiesce import BlockingEngine, Engine

    words = {
        kind: {word for word in dir(kind) if not word.startswith("_")}
        for kind in (Engine, BlockingEngine)
    }
    # A thread is asked for its errors, and opens by itself; the loop's owner sees more of it.
    assert words[BlockingEngine] - words[Engine] == {"check"}
    assert words[Engine] - words[BlockingEngine] == {"open", "activity", "cut_over", "handed_over"}


@pytest.mark.parametrize("package", ["fsm", "participants", "storage", "quiesce"])
def test_annotations_are_announced(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()

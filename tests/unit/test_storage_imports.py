"""What `storage` may import of ours: the engine's port, and nothing that does something."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import storage

PORT = {"fsm.storing", "fsm.outcome", "fsm.strict"}
OURS = {"fsm", "participants", "quiesce"}
FILES = sorted(Path(storage.__file__).parent.glob("*.py"))


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_storage_imports_the_port_only(file: Path) -> None:
    ours = {name for name in imported(file) if name.split(".")[0] in OURS}
    assert ours <= PORT


def test_only_the_leaves_touch_the_disk() -> None:
    """So that a shim over one module sees every file operation."""
    for file in FILES:
        if file.name != "durable.py":
            assert imported(file).isdisjoint({"shutil", "fcntl", "tempfile", "ctypes"}), file
            calls = {"os.rename", "os.fsync", ".unlink(", ".write_text(", ".write_bytes("}
            assert not [call for call in calls if f" {call}" in file.read_text()], file

"""A fresh virtual environment with quiesce in it, as somebody else would have."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("fsm", "participants", "quiesce", "storage")


class Fresh:
    """`python` is the environment's. Built from copies: a build leaves things behind."""

    def __init__(self, folder: Path) -> None:
        uv = Path(sys.executable).with_name("uv")
        if not uv.exists():
            pytest.skip(f"needs {uv}: pip install uv")
        self._uv, self.folder = uv, folder
        self.python = folder / "venv" / "bin" / "python"
        self.source = folder / "quiesce"
        self.source.mkdir(parents=True)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / name, self.source)
        for name in PACKAGES:
            self.copy(REPOSITORY / name, self.source / name)
        self._run(str(uv), "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))

    @staticmethod
    def copy(source: Path, target: Path) -> None:
        leftovers = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        shutil.copytree(source, target, ignore=leftovers)

    def install(self, *packages: str) -> None:
        """From local paths, or from the package index."""
        self._run(
            str(self._uv), "pip", "install", "--quiet", "--python", str(self.python), *packages
        )

    def _run(self, *program: str) -> None:
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

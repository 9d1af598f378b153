"""The plugin from outside, where nothing is installed but quiesce[testing] and itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.fresh import REPOSITORY, Fresh


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_plugin_passes_its_suite_in_a_fresh_environment(tmp_path: Path) -> None:
    fresh = Fresh(tmp_path / "fresh")
    plugin = tmp_path / "plugin"
    fresh.copy(REPOSITORY / "examples" / "plugin", plugin)
    fresh.install(f"quiesce[testing] @ {fresh.source.as_uri()}", str(plugin))
    tests = [str(fresh.python), "-m", "pytest", "-q", "-ra", "-W", "error", "--rootdir", "."]
    done = subprocess.run(tests, cwd=plugin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "show and verify find an installed plugin" not in done.stdout, "the plugin is installed"
    for extra in ("ray", "torch", "starlette"):
        found = [str(fresh.python), "-c", f"import {extra}"]
        assert subprocess.run(found, capture_output=True, check=False).returncode != 0, extra

"""docs/embed.md and docs/concepts.md, as a new user would try them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import play
from tests.fresh import Fresh

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["embed.md", "concepts.md"])
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    """In an empty folder; this environment stands in for the fresh one of its first lines."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    play(
        DOCS / page,
        tmp_path,
        environment={"PATH": f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin"},
        skip=lambda line: "pip" in line or "-m venv" in line,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_embedding_from_an_empty_folder(tmp_path: Path) -> None:
    """Every command as it stands, the base install alone. The package index is asked for
    everything but quiesce."""
    fresh = Fresh(tmp_path / "fresh")
    fresh.install("pip")
    wheels = tmp_path / "wheels"
    build = [str(fresh.python), "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels)]
    subprocess.run([*build, str(fresh.source)], check=True)
    folder = tmp_path / "user"
    folder.mkdir()
    play(DOCS / "embed.md", folder, environment={"PIP_FIND_LINKS": str(wheels)})

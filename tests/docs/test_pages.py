"""docs/embed.md and docs/concepts.md, as a new user would try them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.snippets import play

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

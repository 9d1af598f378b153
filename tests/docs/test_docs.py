"""The documents do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import Snippet, commands, play, prints_as_said, snippets
from tests.fresh import REPOSITORY, Fresh

DOCS = REPOSITORY / "docs"
PARTICIPANT = DOCS / "write-a-participant.md"


def test_write_a_participant(tmp_path: Path) -> None:
    """Without what needs the network: with this environment in place of a fresh one, where the
    plugin is not installed."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    play(
        PARTICIPANT,
        tmp_path,
        skip=lambda line: "pip" in line or "-m venv" in line or "show" in line,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_write_a_participant_from_an_empty_folder(tmp_path: Path) -> None:
    """Every command as it stands. The package index is asked for everything but quiesce."""
    fresh = Fresh(tmp_path / "fresh")
    fresh.install("pip")
    wheels = tmp_path / "wheels"
    build = [str(fresh.python), "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels)]
    subprocess.run([*build, str(fresh.source)], check=True)
    folder = tmp_path / "author"
    folder.mkdir()
    play(PARTICIPANT, folder, environment={"PIP_FIND_LINKS": str(wheels)})


# -- the reader of documents -------------------------------------------------------------------


def document(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


def test_a_file_is_named_by_the_line_before_it(tmp_path: Path) -> None:
    page = document(
        tmp_path, "Put this into `a/b.py`:\n\n```python\nx = 1\n```\n\n```sh\nls\n```\n"
    )
    assert snippets(page) == [
        Snippet("python", "x = 1\n", "a/b.py", 4),
        Snippet("sh", "ls\n", None, 8),
    ]


def test_commands_and_what_they_print() -> None:
    block = Snippet("console", "$ echo a\na\n$ true\n", None, 1)
    assert [(one.line, one.prints) for one in commands(block)] == [("echo a", "a\n"), ("true", "")]


def test_three_dots_stand_for_anything() -> None:
    assert prints_as_said("1 passed in 0.3s\n", "1 passed in ...\n")
    assert prints_as_said("a\nb\nc\n", "...\nc")
    assert not prints_as_said("a\nb\n", "a\n")
    assert not prints_as_said("axb", "a.b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```console\n$ echo a\nb\n```\n", "page.md:2: echo a"),
        ("```console\n$ false\n```\n", "page.md:2: false"),
        ("```python\nx = 1\n```\n", "neither a file nor commands"),
    ],
)
def test_a_document_that_lies_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        play(document(tmp_path, text), tmp_path)


def test_files_are_there_for_the_commands(tmp_path: Path) -> None:
    text = "Into `a.txt`:\n\n```text\nhello\n```\n\n```console\n$ cat a.txt\nhello\n$ exit 3\n```\n"
    page = document(tmp_path, text)
    with pytest.raises(AssertionError, match="exit 3"):
        play(page, tmp_path)
    play(page, tmp_path, skip=lambda line: line.startswith("exit"))

"""Each file tells a story: commands, and what they are expected to show.

`pytest tests/scenarios --rewrite` writes what happens now. Commit a difference only when you
understand what caused it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.interpreter import Stage

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_story(path: Path, pytestconfig: pytest.Config) -> None:
    written = path.read_text()
    played = play(written)
    if pytestconfig.getoption("rewrite"):
        path.write_text(played)
    else:
        assert played == written, f"{path.name} tells another story; see --rewrite"


def test_a_wrong_expectation_is_noticed() -> None:
    assert play("work gym a\n----\nrefused: it is held\n") == "work gym a\n----\ndone\n"


def test_there_are_stories() -> None:
    assert len(FILES) >= 25


def play(text: str) -> str:
    """The same file, with what really happens."""
    stage = Stage()
    try:
        return "\n\n".join(block(stage, part) for part in text.strip().split("\n\n")) + "\n"
    finally:
        stage.close()


def block(stage: Stage, text: str) -> str:
    head = text.partition("\n----")[0].splitlines()
    prose = [line for line in head if line.startswith("#")]
    commands = [line for line in head if not line.startswith("#")]
    if not commands:
        return "\n".join(prose)
    assert len(commands) == 1, f"one command a block, not {commands}"
    return "\n".join([*prose, commands[0], "----", stage.do(commands[0])])

"""Documents that are run: files and commands taken from Markdown, in their order.

A block after a line that ends with `name`: is the content of that file. In a block of language
`console` a line that begins with "$ " is a command; the lines after it are what it prints, with
... for anything. A command that shows no output must succeed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from attrs import frozen

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`([\w./-]+)`:\n*\Z")
COMMAND_TIMEOUT_S = 300.0


@frozen
class Snippet:
    """One fenced block. file: the name that the text before it gives. line: of its first line."""

    language: str
    text: str
    file: str | None
    line: int


@frozen
class Command:
    """One command of a console block, and what the document says that it prints."""

    line: str
    prints: str


def snippets(document: Path) -> list[Snippet]:
    text = document.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        named = _NAMED.search(text[: block.start()])
        line = text.count("\n", 0, block.start()) + 2
        found.append(Snippet(block[1], block[2], named[1] if named else None, line))
    return found


def commands(snippet: Snippet) -> Iterator[Command]:
    for part in re.split(r"^\$ ", snippet.text, flags=re.MULTILINE)[1:]:
        line, _, prints = part.partition("\n")
        yield Command(line, prints)


def play(
    document: Path,
    folder: Path,
    *,
    environment: dict[str, str] | None = None,
    skip: Callable[[str], bool] = lambda _: False,
) -> None:
    """Do all that the document says, in `folder`. skip: commands that are left out.

    environment: added to this process's. Raises AssertionError naming document, line and output.
    """
    for snippet in snippets(document):
        where = f"{document.name}:{snippet.line}"
        if snippet.file is not None:
            (folder / snippet.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / snippet.file).write_text(snippet.text, encoding="utf-8")
        elif snippet.language == "console":
            for command in commands(snippet):
                if not skip(command.line):
                    _run(command, folder, {**os.environ, **(environment or {})}, where)
        else:
            raise AssertionError(f"{where}: neither a file nor commands: nothing checks this block")


def _run(command: Command, folder: Path, environment: dict[str, str], where: str) -> None:
    done = subprocess.run(
        ["bash", "-c", command.line],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    seen = f"{where}: {command.line}\n{done.stdout}"
    if command.prints.strip():
        assert prints_as_said(done.stdout, command.prints), f"{seen}\nand not\n{command.prints}"
    else:
        assert done.returncode == 0, seen


def prints_as_said(output: str, said: str) -> bool:
    pattern = re.escape(said.strip()).replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None

"""Fills the generated parts of the specs from the code: `python specs/generate.py [--check]`.

A generated part stands between `<!-- KIND:NAME -->` and `<!-- end -->`; KIND is `table` or
`diagram`, NAME a table of the engine. With --check nothing is written; drift is an error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fsm.diagram import markdown, mermaid
from fsm.hold import HOLD
from fsm.restore import RESTORE, RESTORE_HANDING_OVER, RESTORE_TAKING_OVER
from fsm.save import SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED

SAVES = (SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED)
RESTORES = (RESTORE, RESTORE_HANDING_OVER, RESTORE_TAKING_OVER)
TABLES = {table.name: table for table in (*SAVES, *RESTORES, HOLD)}
PART = re.compile(r"(<!-- (table|diagram):(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
HERE = Path(__file__).parent
FILES = [*sorted(HERE.glob("*.md")), HERE.parent / "README.md"]


def filled(text: str) -> str:
    """`text` with every generated part made anew. Raises KeyError for an unknown table."""

    def one(match: re.Match[str]) -> str:
        head, kind, name, end = match.groups()
        table = TABLES[name]
        body = markdown(table) if kind == "table" else f"```mermaid\n{mermaid(table)}```\n"
        return head + body + end

    return PART.sub(one, text)


def main() -> int:
    drifted = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            drifted.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(filled(text), encoding="utf-8")
    if drifted and "--check" in sys.argv:
        print(f"drifted from the code: {', '.join(drifted)}; run python specs/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

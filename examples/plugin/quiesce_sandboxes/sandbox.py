"""One sandbox: a process that runs SQL on its own database until its stdin ends.

A line in: [statement, argument, ...]. A line out: {"rows": [...]} or {"error": "..."}.
"""

import json
import sqlite3
import sys


def main(path: str) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    for line in sys.stdin:
        statement, *arguments = json.loads(line)
        try:
            answer: dict[str, object] = {"rows": database.execute(statement, arguments).fetchall()}
        except sqlite3.Error as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

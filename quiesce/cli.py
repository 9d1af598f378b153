"""The command `quiesce`: look at snapshots, watch an engine, draw the tables, run the demo."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import asdict

from fsm.diagram import markdown, mermaid
from fsm.explore import SIZES, Check
from fsm.hold import HOLD
from fsm.outcome import SnapshotRejected
from fsm.restore import RESTORE, RESTORE_HANDING_OVER, RESTORE_TAKING_OVER
from fsm.save import SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED
from fsm.table import Table
from quiesce import inspection
from quiesce.watch import STATUS, writer
from storage.reader import list_snapshots

SAVES = (SAVE, SAVE_RELEASE_AT_CUT, SAVE_STAY_PAUSED)
RESTORES = (RESTORE, RESTORE_HANDING_OVER, RESTORE_TAKING_OVER)
TABLES: dict[str, Table] = {table.name: table for table in (*SAVES, *RESTORES, HOLD)}
OK, REFUSED, USAGE = 0, 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: fine; 1: refused or broken, with one message; 2: wrong usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = given.run
    try:
        return command(given)
    except SnapshotRejected as error:
        print(f"quiesce {given.command}: {error}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:  # the reader has seen enough, as in `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"quiesce {given.command}: {where}{error.strerror or error}", file=sys.stderr)
        return REFUSED


def _ls(given: argparse.Namespace) -> int:
    found = list_snapshots(given.root)
    if given.json:
        _print_json([asdict(one) for one in found])
        return OK
    for one in found:
        if one.problem is not None:
            print(f"{one.id}  refused: {one.problem}")
            continue
        anchor = "no anchor" if one.anchor is None else f"step {one.anchor.step}"
        size = f"{one.size_bytes / 1e6:.1f} MB in {one.files} files"
        print(f"{one.id}  {one.created_at}  {anchor}  {size}  after {one.parent or 'nothing'}")
    if not found:
        print(f"no published snapshot below {given.root}")
    return OK


def _show(given: argparse.Namespace) -> int:
    shown = inspection.show(given.snapshot)
    if given.json:
        _print_json(shown)
    else:
        print("\n".join(inspection.lines(shown)))
    return OK


def _verify(given: argparse.Namespace) -> int:
    verdict = inspection.verify(given.snapshot)
    if given.json:
        _print_json(verdict)
        return OK
    print(f"{verdict['id']}: whole; {verdict['files']} files, {verdict['size_bytes']} bytes")
    for name, count in verdict["references"].items():
        print(f"  every {name} that is named is there: {count}")
    return OK


def _status(given: argparse.Namespace) -> int:
    path = given.root / STATUS
    status = json.loads(path.read_text(encoding="utf-8"))
    if given.json:
        _print_json(status)
    else:
        print("\n".join([*inspection.status_lines(status), writer(status)]))
    return OK


def _diagram(given: argparse.Namespace) -> int:
    draw = markdown if given.markdown else mermaid
    print(draw(TABLES[given.table]), end="")
    return OK


def _check(given: argparse.Namespace) -> int:
    """Model-check the tables: 0 when every rule holds in every world."""
    size = (given.servers, given.faults)
    check, broken = Check((size,) if None not in size else SIZES), False
    for result in check.results():
        print(json.dumps(asdict(result)) if given.json else result, flush=True)
        if result.problem:
            broken = True
            print(result.counterexample(), file=sys.stderr)
    for row in check.never_fired():
        broken = True
        print(f"no world fires the row {row}", file=sys.stderr)
    return REFUSED if broken else OK


def _demo(given: argparse.Namespace) -> int:
    from quiesce.demo.__main__ import run

    return run(given)


def _no_demo(_: argparse.Namespace) -> int:
    print("quiesce demo: install its extra first: pip install 'quiesce[demo]'", file=sys.stderr)
    return USAGE


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quiesce", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Callable[..., int], what: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=what, description=what)
        command.set_defaults(run=run)
        return command

    def add_json(command: argparse.ArgumentParser) -> None:
        command.add_argument("--json", action="store_true", help="machine-readable")

    one = add("ls", _ls, "list the published snapshots below a root")
    one.add_argument("root", type=Path)
    add_json(one)
    for name, run, what in (
        ("show", _show, "what is in a snapshot, who wrote it, where each rollout stands"),
        ("verify", _verify, "check every digest, and every reference between the parts"),
    ):
        one = add(name, run, what)
        one.add_argument("snapshot", type=Path, help="the snapshot's folder")
        add_json(one)
    one = add("status", _status, "what the engine of a root is doing, and what it waits for")
    one.add_argument("root", type=Path)
    add_json(one)
    one = add("diagram", _diagram, "a transition table, drawn from the code")
    one.add_argument("table", choices=list(TABLES))
    one.add_argument("--markdown", action="store_true", help="the full table instead of Mermaid")
    one = add("check", _check, "walk every world of the tables, with faults; 1 if a rule breaks")
    one.add_argument("--servers", type=int, help="with --faults; default: two sizes")
    one.add_argument("--faults", type=int)
    add_json(one)
    _add_demo(add)
    return parser


def _add_demo(add: Callable[..., argparse.ArgumentParser]) -> None:
    what = "real rollouts, killed, restored, finished, audited"
    if importlib.util.find_spec("rich") is None or importlib.util.find_spec("gymnasium") is None:
        add("demo", _no_demo, what)
        return
    from quiesce.demo.__main__ import add_arguments

    add_arguments(add("demo", _demo, what))


if __name__ == "__main__":
    sys.exit(main())

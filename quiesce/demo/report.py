"""The demo on the screen: a live picture while it runs, tables at the end.

On a terminal the picture is redrawn in place; without one, each event that matters is a line.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quiesce.demo.audit import Figures
from quiesce.demo.progress import Progress, Rollout

GRID_ROWS, CELL_WIDTH, RECENT_LINES = 12, 16, 8
STYLES = {
    "running": "cyan",
    "parked": "yellow",
    "finished": "green",
    "trained": "dim green",
    "dropped": "red",
}


class Display:
    """Context manager. `show` takes each event as it comes; the console may be a plain file."""

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self.progress = progress
        self.console = console or Console()
        self._lines: list[str] = []
        self._live = Live(console=self.console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in a batch of events and draw once."""
        lines = [line for event in events if (line := self.progress.apply(event)) is not None]
        if self._live.is_started:
            self._lines = [*self._lines, *lines][-RECENT_LINES:]
            self._live.update(picture(self.progress, self._lines, self.console.width), refresh=True)
            return
        for line in lines:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def picture(progress: Progress, lines: Iterable[str], width: int) -> RenderableType:
    """One frame: what the engine does, the grid of rollouts, the last lines."""
    saved = sum(snapshot.outcome == "saved" for snapshot in progress.snapshots)
    head = Text(
        f"engine: {progress.phase}   snapshots: {saved}   kills: {len(progress.crashes)}   "
        f"restores: {len(progress.restores_s)}   train step: {progress.step}"
    )
    legend = Text("  ").join(
        Text(f"{count} {state}", style=STYLES.get(state, ""))
        for state, count in sorted(progress.counts().items())
    )
    return Group(head, legend, grid(progress.rollouts.values(), width), Text("\n".join(lines)))


def grid(rollouts: Iterable[Rollout], width: int) -> RenderableType:
    """Name, run and turn of each rollout; those that still run come first."""
    columns = max(1, width // CELL_WIDTH)
    order = {state: number for number, state in enumerate(STYLES)}
    ranked = sorted(rollouts, key=lambda one: (order.get(one.state, 0), _by_number(one.name)))
    shown, hidden = ranked[: columns * GRID_ROWS], ranked[columns * GRID_ROWS :]
    table = Table.grid(padding=(0, 1, 0, 0))
    for start in range(0, len(shown), columns):
        table.add_row(*(_cell(rollout) for rollout in shown[start : start + columns]))
    return Group(table, Text(f"and {len(hidden)} more")) if hidden else table


def tables(
    progress: Progress, figures: Figures, rows: Mapping[str, Mapping[str, int]]
) -> list[Table]:
    """The tables at the end. rows: how many rows of each kind every rollout has."""
    return [
        per_rollout(progress, rows),
        totals(figures, rows),
        pauses(progress),
        start_up(progress),
    ]


def per_rollout(progress: Progress, rows: Mapping[str, Mapping[str, int]]) -> Table:
    kinds = _kinds(rows)
    table = Table("rollout", title="Rows of each rollout")
    for name in ("run", "turns", *(f"{kind} rows" for kind in kinds)):
        table.add_column(name, justify="right")
    for name in sorted({*progress.rollouts, *rows}, key=_by_number):
        known, counted = progress.rollouts.get(name), rows.get(name, {})
        run, turn = (str(known.run), str(known.turn)) if known else ("?", "?")
        table.add_row(name, run, turn, *(str(counted.get(kind, 0)) for kind in kinds))
    return table


def totals(figures: Figures, rows: Mapping[str, Mapping[str, int]]) -> Table:
    sums = {k: sum(row.get(k, 0) for row in rows.values()) for k in _kinds(rows)}
    lines = {
        "rollouts finished": figures.rollouts,
        "turns finished": figures.turns_finished,
        "turns redone because of the crashes": figures.turns_redone,
        "turns that a restart from the prompt would have redone": figures.turns_redone_from_prompt,
        "tool effects applied in all": figures.effects_applied,
        "tool effects on surviving histories": figures.effects_surviving,
        **{f"{kind} rows": count for kind, count in sums.items()},
    }
    return _two_columns("Totals", {name: str(value) for name, value in lines.items()})


def pauses(progress: Progress) -> Table:
    """Milliseconds of each save by phase; `waited` is what rollouts waited. Then the middle and
    the most of each column."""
    saved = [snapshot for snapshot in progress.snapshots if snapshot.outcome == "saved"]
    steps = list(dict.fromkeys(step for snapshot in saved for step in snapshot.phases))
    table = Table("snapshot", title=f"Pause of {len(saved)} snapshots, ms")
    for name in (*steps, "waited"):
        table.add_column(name, justify="right")
    lines = [[*(one.phases.get(s, 0.0) for s in steps), one.pause_s] for one in saved]
    for one, seconds in zip(saved, lines, strict=True):
        table.add_row(_short(one.snapshot), *map(_milliseconds, seconds))
    if lines:
        columns = list(zip(*lines, strict=True))
        table.add_section()
        table.add_row("p50", *(_milliseconds(statistics.median(column)) for column in columns))
        table.add_row("max", *(_milliseconds(max(column)) for column in columns))
    return table


def _short(snapshot: str) -> str:
    """`snapshot_000003-000012` as `3-12`: incarnation and attempt."""
    numbers = snapshot.removeprefix("snapshot_").split("-")
    return "-".join(number.lstrip("0") for number in numbers)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


def start_up(progress: Progress) -> Table:
    """What starting took, which is no part of any pause."""
    spent = {**progress.starts_s, "restore": progress.restores_s}
    return _spread("Starting, apart from the pauses", "process", spent)


def _spread(title: str, what: str, spent: Mapping[str, list[float]]) -> Table:
    table = Table(what, title=title)
    for name in ("times", "p50 s", "max s"):
        table.add_column(name, justify="right")
    for name, seconds in spent.items():
        if seconds:
            middle, most = statistics.median(seconds), max(seconds)
            table.add_row(name, str(len(seconds)), f"{middle:.3f}", f"{most:.3f}")
    return table


def _two_columns(title: str, lines: Mapping[str, str]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in lines.items():
        table.add_row(name, value)
    return table


def _kinds(rows: Mapping[str, Mapping[str, int]]) -> list[str]:
    return sorted({kind for counted in rows.values() for kind in counted})


def _cell(rollout: Rollout) -> Text:
    run = f"-a{rollout.run}" if rollout.run else ""
    text = f"{rollout.name}{run} {rollout.turn:>2}".ljust(CELL_WIDTH - 1)
    return Text(text, style=STYLES.get(rollout.state, ""))


def _by_number(name: str) -> list[tuple[int, str]]:
    """p2 comes before p10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]

"""The event stream, what it adds up to, and how it looks with and without a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the display draws with rich (extra demo)")

from rich.console import Console, RenderableType

from quiesce.demo.audit import Figures
from quiesce.demo.events import EventLog, Follow
from quiesce.demo.progress import Progress
from quiesce.demo.report import GRID_ROWS, Display, grid, tables

EVENTS: list[dict[str, Any]] = [
    {"event": "process", "process": "tools", "did": "started", "took_s": 1.5},
    {"event": "rollout", "rollout": "p0_g0", "run": 0, "turn": 3, "state": "running"},
    {"event": "rollout", "rollout": "p0_g1", "run": 0, "turn": 12, "state": "finished"},
    {"event": "phase", "phase": "draining"},
    {
        "event": "snapshot",
        "outcome": "saved",
        "snapshot": "snapshot_1",
        "pause_s": 0.5,
        "phases": {"prepare": 0.1, "commit": 0.4},
    },
    {
        "event": "snapshot",
        "outcome": "saved",
        "snapshot": "snapshot_2",
        "pause_s": 1.5,
        "phases": {"prepare": 0.3, "commit": 1.2},
    },
    {"event": "snapshot", "outcome": "skipped", "reason": "nothing changed"},
    {"event": "process", "process": "tools", "did": "killed"},
    {
        "event": "restored",
        "snapshot": "snapshot_2",
        "took_s": 0.25,
        "continued": 1,
        "answered": 1,
        "started_over": 0,
    },
    {"event": "rollout", "rollout": "p0_g0", "run": 1, "turn": 4, "state": "running"},
    {"event": "step", "step": 1, "rows": 1},
    {"event": "note", "text": "[red] brackets are text"},
]


def fed() -> Progress:
    progress = Progress()
    for event in EVENTS:
        progress.apply(event)
    return progress


def drawn(*parts: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(*parts)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_events_add_up() -> None:
    progress = fed()
    assert progress.rollouts["p0_g0"].run == 1
    assert progress.rollouts["p0_g0"].turn == 4
    assert progress.counts() == {"running": 1, "finished": 1}
    assert (progress.phase, progress.step) == ("draining", 1)
    assert progress.crashes == ["tools"]
    assert progress.starts_s == {"tools": [1.5]}
    assert progress.restores_s == [0.25]
    assert [snapshot.outcome for snapshot in progress.snapshots] == ["saved", "saved", "skipped"]


def test_an_unknown_event_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such event: 'surprise'"):
        Progress().apply({"event": "surprise"})


def test_without_a_terminal_each_event_that_matters_is_a_line() -> None:
    console = Console(file=io.StringIO(), width=40)
    with Display(Progress(), console) as display:
        display.show(EVENTS)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "tools started in 1.5 s",
        "snapshot_1 saved, rollouts paused for 0.50 s",
        "snapshot_2 saved, rollouts paused for 1.50 s",
        "snapshot skipped: nothing changed",
        "tools killed",
        "restored snapshot_2 in 0.25 s: 1 rollouts continue, 1 had finished, 0 start over",
        "train step 1 on 1 rows; rollouts: 1 finished, 1 running",
        "[red] brackets are text",
    ]


def test_on_a_terminal_the_picture_shows_rollouts_phase_and_lines() -> None:
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=True)
    with Display(Progress(), console) as display:
        display.show(EVENTS)
        assert isinstance(console.file, io.StringIO)
        picture = console.file.getvalue()
    for words in ("engine: draining", "snapshots: 2", "kills: 1", "p0_g0-a1  4", "p0_g1 12"):
        assert words in picture
    assert "[red] brackets are text" in picture


def test_the_grid_is_bounded_and_shows_what_runs_first() -> None:
    progress = Progress()
    for number in range(1000):
        state = "running" if number == 999 else "trained"
        progress.apply(
            {"event": "rollout", "rollout": f"p{number}_g0", "run": 0, "turn": 9, "state": state}
        )
    lines = drawn(grid(progress.rollouts.values(), 80), width=80).splitlines()
    assert len(lines) <= GRID_ROWS + 1
    assert lines[0].startswith("p999_g0")
    assert lines[-1] == f"and {1000 - GRID_ROWS * 5} more"


def test_the_tables_hold_rows_totals_pauses_and_start_up() -> None:
    figures = Figures(2, 26, 3, 9, 29, 26)
    rows = {"p0_g0": {"training": 1, "capture": 12}, "p0_g1": {"training": 1, "capture": 14}}
    text = [drawn(table) for table in tables(fed(), figures, rows)]
    cells = [
        [line.replace("│", " ").replace("┃", " ").split() for line in one.splitlines()]
        for one in text
    ]
    assert ["p0_g0", "1", "4", "12", "1"] in cells[0]
    assert ["p0_g1", "0", "12", "14", "1"] in cells[0]
    assert ["turns", "redone", "because", "of", "the", "crashes", "3"] in cells[1]
    assert ["capture", "rows", "26"] in cells[1]
    assert ["snapshot", "prepare", "commit", "waited"] in cells[2]
    assert ["1", "100", "400", "500"] in cells[2]
    assert ["2", "300", "1200", "1500"] in cells[2]
    assert ["p50", "200", "800", "1000"] in cells[2]
    assert ["max", "300", "1200", "1500"] in cells[2]
    assert ["tools", "1", "1.500", "1.500"] in cells[3]
    assert ["restore", "1", "0.250", "0.250"] in cells[3]
    assert not any(line[:1] == ["tools"] for line in cells[2])


def test_rollouts_are_in_the_order_of_their_numbers() -> None:
    rows = {f"p{number}_g0": {"training": 1} for number in (10, 9, 100, 1)}
    shown = drawn(tables(Progress(), Figures(), rows)[0])
    assert re.findall(r"p\d+", shown) == ["p1", "p9", "p10", "p100"]


def test_tables_of_nothing() -> None:
    for table in tables(Progress(), Figures(), {}):
        assert drawn(table)


def test_the_follower_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follow = Follow(path)
    assert follow.new() == []
    log = EventLog(path)
    log.write("note", text="one")
    log.write("note", text="two")
    assert [event["text"] for event in follow.new()] == ["one", "two"]
    assert follow.new() == []
    with path.open("ab") as file:
        file.write(b'{"event": "note", "te')
    assert follow.new() == []
    with path.open("ab") as file:
        file.write(b'xt": "three"}\n')
    assert follow.new() == [{"event": "note", "text": "three"}]
    log.close()

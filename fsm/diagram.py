"""A table as a picture (Mermaid) and as Markdown: drawn from the rows, so they cannot drift."""

from __future__ import annotations

from fsm.table import STAY, Table


def mermaid(table: Table) -> str:
    """A `stateDiagram-v2`. Arrows that stay in their state are left out; events that lead from
    one state to another share an arrow."""
    lines = ["stateDiagram-v2", f"    [*] --> {table.initial}"]
    for state in table.lines:
        if state.step is not None:
            lines.append(f"    {state.name}: {state.name}<br>({state.step})")
        arrows: dict[str, list[str]] = {}
        for event in table.events:
            target = state.moves.get(event, STAY)
            if target not in (STAY, state.name):
                arrows.setdefault(target, []).append(event)
        for target, events in arrows.items():
            lines.append(f"    {state.name} --> {target}: {', '.join(events)}")
        if state.terminal:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines) + "\n"


def markdown(table: Table) -> str:
    """The full product: a line per state, a column per event. `=` stays, an empty cell is an
    error that changes nothing."""
    steps = any(state.step for state in table.lines)
    head = ["state", "rollouts", *(["step"] if steps else []), *table.events]
    lines = [_line(head), _line(["---"] * len(head))]
    for state in table.lines:
        cells = [f"**{state.name}**", state.rollouts]
        if steps:
            cells.append(f"`{state.step}`" if state.step else "(end)")
        cells += [state.moves.get(event, "") for event in table.events]
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"

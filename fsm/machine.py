"""The one module that imports `transitions`.

Only its synchronous `Machine` is used: a transition that cannot be suspended is atomic. Its
asynchronous one swallows outside cancellation and drops queued events (specs/adr/0002).
"""

from __future__ import annotations

import logging

from transitions import Machine as _Machine

from fsm.table import Row, Table

# The library logs each transition at INFO; ours are in the trace.
logging.getLogger("transitions").setLevel(logging.WARNING)


class IllegalEvent(RuntimeError):
    """The table has no row for this event in this state. Nothing changed."""

    def __init__(self, table: str, state: str, event: str) -> None:
        super().__init__(f"table {table!r} has no row for event {event!r} in state {state!r}")
        self.table, self.state, self.event = table, state, event


class _Model:
    """What `transitions` hangs its state on. It defines nothing: a name that is already there
    would keep the library from binding its own."""

    state: str


class Machine:
    """One running instance of a table: a state, and the rows that fired."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.fired: list[Row] = []
        self._model = _Model()
        self._machine = _Machine(
            self._model,
            states=list(table.states),
            initial=table.initial,
            transitions=[_arrow(row) for row in table.rows()],
            auto_transitions=False,
            send_event=True,
            queued=False,
            ignore_invalid_triggers=False,
            model_override=False,
        )

    @property
    def state(self) -> str:
        return self._model.state

    @property
    def step(self) -> str | None:
        return self.table.states[self.state].step

    @property
    def over(self) -> bool:
        return self.state in self.table.terminal

    def fire(self, event: str) -> Row:
        """Take the row for `event`. Without one: `IllegalEvent`, and nothing changed."""
        source = self.state
        if self.table.next(source, event) is None:
            raise IllegalEvent(self.table.name, source, event)
        self._machine.dispatch(event)
        row = Row(source, event, self.state)
        self.fired.append(row)
        return row


def _arrow(row: Row) -> dict[str, str | None]:
    # An arrow to its own state is internal (dest None): nothing is left or entered.
    dest = None if row.source == row.target else row.target
    return {"trigger": row.event, "source": row.source, "dest": dest}

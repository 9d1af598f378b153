"""A restore of our own bookkeeping: read the records, join them with Gym's part, apply. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from attrs import evolve, field, frozen

from participants.controller.join import (
    AnswerAtOnce,
    Continue,
    Decision,
    GymPart,
    Join,
    Keep,
    StartOver,
    join,
    sentence,
)
from participants.controller.ledger import HELD, UNFINISHED, Ledger, Rollout, State, Totals
from participants.controller.replay import ReplayIndex
from participants.controller.state import Found, Loaded, Records

NAMES = ("ledger", "totals", "loader", "replay")
GAVE_UP = "gave_up"  # a group of which a rollout started over too often


@frozen
class Books:
    """A bookkeeping that is not in use yet. loader: its saved place; None: where it is."""

    ledger: Ledger = field(factory=Ledger)
    replay: ReplayIndex = field(factory=ReplayIndex)
    loader: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, records: Records) -> Books:
        """Raises ValueError naming what is missing or wrong."""
        for name in NAMES:
            if name not in records or (name != "ledger" and len(records[name]) != 1):
                raise ValueError(f"the controller's records must hold {name!r}")
        ledger = Ledger.read(records["ledger"], records["totals"][0])
        return cls(ledger, ReplayIndex.read(records["replay"][0]), records["loader"][0])


def resolve(
    books: Books,
    found: Found,
    capture: Collection[str],
    train: Collection[str],
    max_start_overs: int,
) -> tuple[Books, Loaded]:
    """The bookkeeping after the join, every unfinished rollout as run n+1, and what to tell the
    others. Raises ValueError when the ledger and the trainer's checkpoint do not fit (R6)."""
    totals, entries = _at_anchor(books, found.anchor_step)
    joined = join(entries, GymPart.read(found.gym), capture, train)
    after = [_applied(one, joined.decisions[one.rollout_id]) for one in entries]
    given_up = {one.group for one in after if one.start_overs > max_start_overs and not one.over}
    after = [_dropped(one) if one.group in given_up else one for one in after]
    if given_up:
        dropped = Counter(totals.dropped) + Counter({GAVE_UP: len(given_up)})
        totals = evolve(totals, dropped=dict(dropped))
    replay = books.replay
    replay.keep(_complete(after))
    restored = Books(Ledger(after, totals), replay, books.loader)
    return restored, _loaded(entries, after, joined)


def _at_anchor(books: Books, anchor_step: int | None) -> tuple[Totals, list[Rollout]]:
    """Steps that the anchor contains are trained; claims of later ones are undone (R6)."""
    totals = books.ledger.totals
    anchor = totals.trained_step if anchor_step is None else anchor_step
    trained, undone = books.replay.roll_back(anchor)
    if totals.trained_step > anchor:
        raise ValueError(
            f"the ledger has trained step {totals.trained_step}, whose rows are gone, but the "
            f"trainer's checkpoint is of step {anchor}"
        )
    states: dict[str, State] = dict.fromkeys(trained, "trained")
    states |= dict.fromkeys(undone, "sealed")
    entries = [
        evolve(one, state=states.get(one.group, one.state)) for one in books.ledger.entries()
    ]
    totals = evolve(totals, trained=totals.trained + len(trained), trained_step=anchor)
    return totals, entries


def _applied(one: Rollout, decision: Decision) -> Rollout:
    """Rows that are not kept are cleared by the data plane's own reconcile."""
    match decision:
        case Keep():
            return evolve(one, rows=(), row_key=one.row_key if one.state in HELD else "")
        case Continue(call):
            return _next_run(one, expect="continuation", expect_call=call)
        case AnswerAtOnce():
            return _next_run(one, expect="finished")
        case StartOver(reason, counted):
            start_overs = one.start_overs + counted
            lineage = one.attempt_index + 1
            return _next_run(one, lineage=lineage, reason=reason, start_overs=start_overs)


def _next_run(one: Rollout, **changes: Any) -> Rollout:
    """Run n+1, not sent yet. What belonged to a result of run n is forgotten."""
    return Rollout(
        rollout_id=one.rollout_id,
        group=one.group,
        generation=one.generation,
        prompt=one.prompt,
        server=one.server,
        attempt_index=one.attempt_index + 1,
        **{"lineage": one.lineage, "start_overs": one.start_overs, "reason": one.reason, **changes},
    )


def _dropped(one: Rollout) -> Rollout:
    return evolve(one, state="dropped", reason=GAVE_UP, row_key="", rows=())


def _complete(entries: Iterable[Rollout]) -> set[str]:
    entries = list(entries)
    return {one.group for one in entries} - {one.group for one in entries if one.state != "sealed"}


def _loaded(before: Iterable[Rollout], after: Iterable[Rollout], joined: Join) -> Loaded:
    now = {one.rollout_id: one for one in after}
    dropped = {name for name, one in now.items() if one.state == "dropped"}
    by_kind: dict[type, list[str]] = {Keep: [], Continue: [], AnswerAtOnce: [], StartOver: []}
    for name, decision in joined.decisions.items():
        if name not in dropped or isinstance(decision, Keep):
            by_kind[type(decision)].append(name)
    surviving = by_kind[Continue] + by_kind[AnswerAtOnce]
    return Loaded(
        discard=tuple(sorted({*joined.discard, *dropped})),
        keep_capture=tuple(key for name in surviving for key in joined.rows[name]),
        keep_train=tuple(one.row_key for one in now.values() if one.state in HELD),
        continued=tuple(by_kind[Continue]),
        answered=tuple(by_kind[AnswerAtOnce]),
        started_over={name: now[name].reason for name in by_kind[StartOver]},
        kept=tuple(by_kind[Keep]),
        decisions=tuple(_sentence(one, now[one.rollout_id], joined) for one in before),
    )


def _sentence(one: Rollout, now: Rollout, joined: Join) -> str:
    if one.state in UNFINISHED and now.state == "dropped":
        return f"{one.rollout_id}: dropped, its group started over too often"
    return sentence(one, joined.decisions[one.rollout_id])

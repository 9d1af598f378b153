"""What must hold when the demo ends, as pure functions over plain data.

Each check returns its problems as sentences that name the rollout, the row, the call or the
folder. No problem, no sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise

from attrs import field, frozen

from quiesce.demo.effects import Effect


@frozen
class Finish:
    """A rollout that the trainer counts as finished: what its /run answered. row: its row's key."""

    rollout: str
    turns: int
    token: str  # of its last effect

    @property
    def row(self) -> str:
        return self.rollout  # so that a repeat overwrites


@frozen(kw_only=True)
class Evidence:
    """What the audit looks at.

    drawn: every rollout that the loader gave out. finished: one entry per finish that counted.
    dropped: rollouts given up with a reason. rows: keys still in the plane's `train` partition.
    trained: row keys by durable train step. capture: keys in the plane's `capture` partition;
    capture_named: those that a journal or the ledger names. effects: the log, in order.
    folders: names directly below the snapshot root.
    """

    drawn: tuple[str, ...]
    finished: tuple[Finish, ...]
    rows: tuple[str, ...]
    trained: Mapping[int, tuple[str, ...]]
    effects: tuple[Effect, ...]
    folders: tuple[str, ...]
    capture: tuple[str, ...] = ()
    capture_named: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@frozen
class Figures:
    """The last table. Turns and effects are of tools; the seed of a session is not counted.

    turns_redone: played, then lost to a crash, then played again. turns_redone_from_prompt: what
    it would have been if every rollout that a restore continued had started over instead.
    """

    rollouts: int = 0
    turns_finished: int = 0
    turns_redone: int = 0
    turns_redone_from_prompt: int = 0
    effects_applied: int = 0
    effects_surviving: int = 0


@frozen
class Audit:
    problems: tuple[str, ...]
    figures: Figures = field(factory=Figures)


def audit(evidence: Evidence) -> Audit:
    """All checks, in the order of their seriousness."""
    problems = [
        *rollouts(evidence.drawn, evidence.finished, evidence.dropped),
        *training_rows(evidence.finished, evidence.rows, evidence.trained),
        *capture_rows(evidence.capture, evidence.capture_named),
        *tool_calls(evidence.finished, evidence.effects),
        *leftovers(evidence.folders),
    ]
    return Audit(tuple(problems), figures(evidence.finished, evidence.effects))


def rollouts(
    drawn: Iterable[str], finished: Iterable[Finish], dropped: Iterable[str] = ()
) -> list[str]:
    """Every rollout ended, and ended once."""
    draws, ends = Counter(drawn), Counter(finish.rollout for finish in finished)
    ends.update(dropped)
    return [
        *(f"rollout {name} was drawn {n} times" for name, n in draws.items() if n > 1),
        *(f"rollout {name} is lost: drawn, never finished" for name in draws if not ends[name]),
        *(f"rollout {name} is doubled: it ended {n} times" for name, n in ends.items() if n > 1),
        *(f"rollout {name} finished, but nobody drew it" for name in ends if not draws[name]),
    ]


def training_rows(
    finished: Iterable[Finish], rows: Iterable[str], trained: Mapping[int, tuple[str, ...]]
) -> list[str]:
    """One row per finished rollout: still in the plane, or used by one durable train step."""
    places: dict[str, list[str]] = {}
    for key in rows:
        places.setdefault(key, []).append("in the data plane")
    for step, keys in trained.items():
        for key in keys:
            places.setdefault(key, []).append(f"in train step {step}")
    named = {finish.row for finish in finished}
    missing, strays = sorted(named - set(places)), sorted(set(places) - named)
    return [
        *(f"training row {key} is missing: its rollout finished" for key in missing),
        *(f"training row {key} is a stray: no ledger names it" for key in strays),
        *(
            f"training row {key} is doubled: {' and '.join(where)}"
            for key, where in places.items()
            if len(where) > 1
        ),
    ]


def capture_rows(present: Iterable[str], named: Iterable[str]) -> list[str]:
    """No token-capture row stays that neither a journal nor the ledger names."""
    strays = sorted(set(present) - set(named))
    return [f"capture row {key} is a stray: no journal and no ledger names it" for key in strays]


def tool_calls(finished: Iterable[Finish], effects: Iterable[Effect]) -> list[str]:
    """Walk back from each final token: every tool call once, and as many as turns."""
    by_token = {effect.token: effect for effect in effects}
    return [problem for finish in finished for problem in _history(finish, by_token)]


def leftovers(folders: Iterable[str]) -> list[str]:
    """Nothing unpublished and no trash stays behind."""
    return [
        *(f"folder {name} was left unpublished" for name in folders if name.startswith("tmp_")),
        *(f"folder {name} is trash left behind" for name in folders if name.startswith("trash_")),
    ]


def chain(token: str, by_token: Mapping[str, Effect]) -> tuple[list[Effect], str]:
    """The surviving effects that lead to `token`, first one first; and the token that the log does
    not know, if the walk ends at one ("" when it ends at a seed, as it should)."""
    walked: list[Effect] = []
    # A parent is older than its child, so that more steps than effects can only be a damaged log.
    while token and len(walked) <= len(by_token):
        effect = by_token.get(token)
        if effect is None:
            return walked[::-1], token
        walked.append(effect)
        token = effect.parent
    return walked[::-1], token


def figures(finished: Iterable[Finish], effects: Iterable[Effect]) -> Figures:
    """The numbers of the last table."""
    ends, log = tuple(finished), tuple(effects)
    by_token = {effect.token: effect for effect in log}
    alive = {effect.token for end in ends for effect in chain(end.token, by_token)[0]}
    steps = [effect for effect in log if effect.kind == "step"]
    surviving = sum(effect.token in alive for effect in steps)
    redone = len(steps) - surviving
    return Figures(
        rollouts=len(ends),
        turns_finished=sum(end.turns for end in ends),
        turns_redone=redone,
        turns_redone_from_prompt=redone + _turns_kept(log),
        effects_applied=len(steps),
        effects_surviving=surviving,
    )


def _turns_kept(log: Iterable[Effect]) -> int:
    """Turns that continued runs did not have to play again: a run whose first effect is turn t
    kept t - 1. A run that began with a seed kept none."""
    seen: set[tuple[str, str]] = set()
    kept = 0
    for effect in log:
        if (run := (effect.rollout, effect.run)) not in seen:
            seen.add(run)
            kept += max(0, effect.turn - 1)
    return kept


def _history(finish: Finish, by_token: Mapping[str, Effect]) -> list[str]:
    walked, unknown = chain(finish.token, by_token)
    if unknown or not walked:
        where = f"token {unknown!r}" if unknown else "its final token"
        return [f"rollout {finish.rollout}: {where} is not in the effect log"]
    steps = [effect for effect in walked if effect.kind == "step"]
    calls = Counter(effect.request for effect in walked)
    foreign = {effect.rollout for effect in walked} - {finish.rollout}
    problems = [f"call {call} was applied {n} times" for call, n in calls.items() if n > 1]
    if len(steps) != finish.turns:
        problems.append(f"{len(steps)} tool effects survive for {finish.turns} turns")
    if any(after.turn != before.turn + 1 for before, after in pairwise(walked)):
        problems.append(f"its turns are not in order: {[effect.turn for effect in walked]}")
    if walked[0].kind != "seed":
        problems.append(f"its history begins with turn {walked[0].turn}, not with a seed")
    problems += [f"its history contains an effect of {name}" for name in sorted(foreign)]
    return [f"rollout {finish.rollout}: {problem}" for problem in problems]

"""What the trainer's process knows at the end, as plain data for the audit in another process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from participants.controller.ledger import Ledger
from participants.controller.rows import owned

Rows = Mapping[str, Mapping[str, Any]]  # training rows by rollout
Steps = Mapping[int, Rows]  # rows that each durable train step used, by rollout

UNTRAINED = frozenset({"sealed", "claimed"})


def gather(
    drawn: Iterable[str], ledger: Ledger, rows: Rows, steps: Steps, capture: Iterable[str]
) -> dict[str, Any]:
    """rows: still in the data plane. capture: keys of token-capture rows that are still there.

    A finish counts where it is kept: in the ledger until it is trained, then in a durable step.
    """
    entries, captured = list(ledger.entries()), sorted(capture)
    used = [(name, row["result"]) for step in steps.values() for name, row in step.items()]
    waiting = [one.rollout_id for one in entries if one.state in UNTRAINED]
    return {
        "finished": [
            *(_finish(name, result) for name, result in used),
            *(_finish(name, _result(rows.get(name))) for name in waiting),
        ],
        "dropped": _dropped(set(drawn) - {name for name, _ in used}, ledger),
        "rows": sorted(rows),
        "trained": {str(step): sorted(step_rows) for step, step_rows in steps.items()},
        "capture": captured,
        "capture_named": sorted({key for one in entries for key in one.rows}),
    }


def rows_of(rollouts: Iterable[str], evidence: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """How many rows of each rollout there are: in the data plane, in durable steps, uncleared."""
    trained = [name for names in evidence["trained"].values() for name in names]
    return {
        name: {
            "training": evidence["rows"].count(name),
            "trained": trained.count(name),
            "capture": len(owned(evidence["capture"], [name])[name]),
        }
        for name in rollouts
    }


def _dropped(untrained: set[str], ledger: Ledger) -> list[str]:
    """The ledger forgets the names of what it dropped, not how many groups it were: what is missing
    counts as dropped if it is exactly that much."""
    here = {one.rollout_id for one in ledger.entries() if one.state != "dropped"}
    missing = sorted(untrained - here)
    groups = {name.partition("_")[0] for name in missing}
    return missing if len(groups) == sum(ledger.totals.dropped.values()) else []


def _result(row: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A missing row is the audit's business; here it has no turns."""
    if row is None:
        return {"turns": 0, "token": ""}
    result: dict[str, Any] = json.loads(row["result"])
    return result


def _finish(rollout: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {"rollout": rollout, "turns": result["turns"], "token": result["token"]}

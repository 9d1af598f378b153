"""What the answers of several Gym servers say together. Pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve

from fsm.storing import Fence
from participants.gym import wire
from participants.gym.client import GymServer

MAX_NAMES = 100  # in one message
TWO_OWNERS = "two_owners"  # a rollout that two agent servers hold: neither is right (S4)

Reports = Mapping[str, wire.Report]


def part_of(kind: str, name: str) -> str:
    """Where a server's files are, below the snapshot's folder."""
    return f"gym/{kind}/{name}/"


def some(names: Iterable[str]) -> str:
    """At most MAX_NAMES of them, and how many more there are."""
    listed = sorted(set(names))
    more = f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else ""
    return ", ".join(listed[:MAX_NAMES]) + more


def capability_problems(
    servers: Mapping[str, GymServer], found: Mapping[str, wire.Capabilities]
) -> list[str]:
    """Why these servers cannot be saved together, each with the way out. Empty: they can."""
    problems = [
        f"{servers[name]} {problem}"
        for name, one in found.items()
        for problem in _odd(servers[name], one)
    ]
    if not any(server.kind == "policy" for server in servers.values()):
        problems.append("there is no policy server: list the one in front of the model")
    return problems


def _odd(server: GymServer, one: wire.Capabilities) -> Iterable[str]:
    if one.schema_version != wire.SCHEMA_VERSION:
        yield (
            f"speaks version {one.schema_version} of the protocol, not {wire.SCHEMA_VERSION}: "
            "install the same version of quiesce on both sides"
        )
    if (one.kind, one.name) != (server.kind, server.name):
        yield f"says that it is {one.kind} server {one.name!r}: correct the list of servers"
    if one.num_workers != 1:
        yield f"has {one.num_workers} workers, and state in each of them: start it with one"


def continuations(reports: Reports) -> tuple[wire.Continuation, ...]:
    """The agents' indexes as one, without rollouts that two of them claim."""
    doubled = _doubled(reports)
    return tuple(
        line
        for report in reports.values()
        for line in report.continuations
        if line.rollout_id not in doubled
    )


def restarts(reports: Reports) -> dict[str, str]:
    """Rollouts that start over, and why: by anyone's word."""
    reasons = dict.fromkeys(_doubled(reports), TWO_OWNERS)
    for report in reports.values():
        reasons |= {restart.rollout_id: restart.reason for restart in report.restarts}
    return reasons


def lost_by_all(policies: Reports) -> dict[str, wire.Report]:
    """The policy servers' reports: a history that one of them has is not lost because the others,
    which were told of every continuation, never saw it."""
    known = {rollout for report in policies.values() for rollout in report.rows}

    def stands(restart: wire.Restart) -> bool:
        return restart.reason != wire.LINEAGE_LOST or restart.rollout_id not in known

    return {
        name: evolve(report, restarts=tuple(filter(stands, report.restarts)))
        for name, report in policies.items()
    }


def _doubled(reports: Reports) -> set[str]:
    seen: set[str] = set()
    doubled: set[str] = set()
    for report in reports.values():
        names = {line.rollout_id for line in report.continuations}
        names |= {result.rollout_id for result in report.finished}
        doubled |= seen & names
        seen |= names
    return doubled


def revision_mismatches(reports: Reports) -> list[str]:
    """Continuations whose sessions are not at the revision that they depend on."""
    out = restarts(reports)
    return [
        f"{line.rollout_id} needs revision {revision} of {server!r}, which saved {saved}"
        for line in continuations(reports)
        if line.rollout_id not in out
        for server, revision in line.resource_state_revisions.items()
        if (saved := _revision(reports, server, line.rollout_id)) != revision
    ]


def _revision(reports: Reports, server: str, rollout: str) -> int | None:
    report = reports.get(server)
    return None if report is None else report.revisions.get(rollout)


def blockers(reports: Reports) -> str:
    """What is waited for, by server; empty if everyone is quiet."""
    waiting = {name: report for name, report in reports.items() if not report.quiet}
    return "; ".join(
        f"{name} waits for {report.blocker_count}: {', '.join(report.blockers[:MAX_NAMES])}"
        for name, report in waiting.items()
    )


def waited_for(reports: Reports) -> list[str]:
    """Who is not parked yet, by server, for `status`; at most MAX_NAMES."""
    names = [f"{name}: {who}" for name, report in reports.items() for who in report.blockers]
    return names[:MAX_NAMES]


def commit_facts(reports: Reports) -> dict[str, Any]:
    """For the manifest; keys with "_" are for later steps of the same attempt only."""
    out = restarts(reports)
    return {
        "continuations": sum(line.rollout_id not in out for line in continuations(reports)),
        "finished": len(finished(reports, out)),
        "sessions": sum(len(report.revisions) for report in reports.values()),
        "restarts": out,
        "servers": sorted(reports),
        "_rows": rows(reports, out),
    }


def restore_facts(reports: Reports, left_out: Mapping[str, str]) -> dict[str, Any]:
    """For the controller's join. left_out: restarts that the manifest names."""
    out = {**left_out, **restarts(reports)}
    standing = standing_continuations(reports, out)
    kept = finished(reports, out)
    return {
        "continuations": len(standing),
        "finished": len(kept),
        "restarts": len(out),
        "_continuations": standing,
        "_finished": kept,
        "_rows": rows(reports, out),
        "_restarts": out,
    }


def standing_continuations(reports: Reports, out: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {
        line.rollout_id: {
            "attempt_index": line.attempt_index,
            "server": name,
            "capture_key": line.capture_key,
            "last_call": line.last_committed_model_call_id,
        }
        for name, report in reports.items()
        for line in report.continuations
        if line.rollout_id not in out
    }


def finished(reports: Reports, out: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {
        result.rollout_id: {
            "attempt_index": result.attempt_index,
            "server": name,
            "result_digest": result.result_digest,
        }
        for name, report in reports.items()
        for result in report.finished
        if result.rollout_id not in out
    }


def rows(reports: Reports, out: Mapping[str, str]) -> dict[str, list[str]]:
    """Token-capture rows that each rollout's history names; each key once, in order."""
    named: dict[str, dict[str, None]] = {}
    for report in reports.values():
        for rollout, keys in report.rows.items():
            if rollout not in out:
                named.setdefault(rollout, {}).update(dict.fromkeys(keys))
    return {rollout: list(keys) for rollout, keys in named.items()}


def hold_problems(reports: Reports, fence: Fence, phases: frozenset[str]) -> list[str]:
    """Servers whose hold does not stand as it should (S4)."""
    problems = []
    for name, report in reports.items():
        if report.fence != fence:
            problems.append(f"{name} is held for another attempt ({report.fence})")
        elif report.phase not in phases:
            problems.append(f"{name} is {report.phase}, not {' or '.join(sorted(phases))}")
        elif report.moved:
            problems.append(f"something moved on {name} since its commit")
    return problems

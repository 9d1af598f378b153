"""What must never be, world by world. Clauses: specs/save.md, restore.md, hold.md."""

from __future__ import annotations

from collections.abc import Iterable

from fsm import hold
from fsm.model.programs import BEFORE_ACTIVATION, BEFORE_PUBLISH, RELEASES, RELEASING, UNDOING
from fsm.model.server import NEWER, OURS, TAKE, Server
from fsm.model.world import OVER, PUBLISHED, SEALED, TRASH, World
from fsm.save import CANCELLED, CLAIMED, FAILED, HOLD_LOST, LATE, OK
from fsm.table import Row

# Facts that are no actions.
ONE_INSTANT, WENT_WRONG, UNKNOWN = "one instant", "went wrong", "outcome unknown"
STOPPED = "stopped while everyone stayed paused"  # S11
OUT_OF_HAND = "handed_over"  # how the first process of a restore ends (R8)
RECORD = "record"
RAN_ON = "rollouts ran on before it went wrong"  # release_at="cut" (S10)
RELEASE_SENT = frozenset({"resume callers", "activate callers", "rollback callers"})
_PARKING = (hold.CLOSING, hold.FENCING)
# How an attempt ends in which nothing went wrong. An unknown outcome is no fault (S2).
_SUCCESS = frozenset({"resumed", "published", "publish_unresolved"})


def problem(world: World, step: str | None) -> str:
    """The first rule that this world breaks, or nothing."""
    return _undoing(world, step) or _fences(world) or _sending(world) or _order(world)


# -- at any time -----------------------------------------------------------------------------------


def _fences(world: World) -> str:
    for one in world.servers:
        if one.closed and one.ended:
            return "H1: a server is closed by a hold that has ended"
        if one.fence == NEWER and one.ended in (hold.RESUME, hold.ROLLBACK):
            return "H1: an older attempt ended the hold of a newer one"
    return ""


def _sending(world: World) -> str:
    asked = any(one.reply for one in world.servers)
    if world.barrier and asked:
        return "S3: Gym is asked while the data-plane barrier is held"
    for one in world.servers:
        if not one.told and ((one.closed and one.fence == OURS) or set(one.box) - {TAKE}):
            return "S6: a message went to a server that does not count as told"
        own = "again" not in world.token  # what a dead process sent is for H1 to refuse
        if own and world.renewal == "on" and RELEASES.intersection(one.box):
            return "H3: a renewal under way may re-arm a lease that is let go"
    return ""


def _order(world: World) -> str:
    """Only where no fault has touched a server: a crash opens a server in no order at all."""
    if world.hurt:
        return ""
    callers, callees = _ranks(world.servers)
    if world.dispatch and any(one.closed for one in callers):
        return "S5: work is sent to callers that are closed"
    if any(one.closed for one in callees) and not all(one.closed for one in callers):
        return "S5: a callee is held while a caller runs"
    if any(one.phase in _PARKING for one in callers) and any(
        one.closed and one.phase not in _PARKING for one in callees
    ):
        return "S5: a callee is frozen while turns of a caller are under way"
    if WENT_WRONG in world.facts:
        return ""
    if any(one.part for one in callees) and not all(one.part for one in callers):
        return "S5: a callee wrote its part before the callers' indexes were there"
    return ""


def _ranks(servers: Iterable[Server]) -> tuple[list[Server], list[Server]]:
    callers = [one for one in servers if not one.callee]
    return callers, [one for one in servers if one.callee]


def _undoing(world: World, step: str | None) -> str:
    if WENT_WRONG in world.facts and step not in UNDOING and world.state != OVER:
        return "S1: after a failure the attempt goes on"
    if step in UNDOING and (world.folder == PUBLISHED or world.renaming):
        return "S2: an attempt is undone whose folder is, or may become, published"
    if step == "rollback" and any(one.active for one in world.servers):
        return "R1: a restore is rolled back that has activated a server"
    return ""


# -- at some moments: each gives the world back, broken where a rule is ----------------------------


def remember(world: World, step: str | None, event: str) -> World:
    """S1, S4: which events mean that the attempt may not succeed any more."""
    if step == "stay" and event == OK and "wait" not in world.facts:
        return world._replace(broken="S11: everyone is let go, and nobody asked for it")
    if event == OK or step is None:
        return world
    if step in RELEASING:
        return world._replace(incomplete=world.incomplete or event in (FAILED, LATE))
    if step == "publish" and event == LATE:
        return world._replace(facts=world.facts | {UNKNOWN})
    if step == "stay" and event == CANCELLED:
        return world._replace(facts=world.facts | {STOPPED})
    after_cut = step == "seal" and event == HOLD_LOST
    if after_cut or step == "stay" or (step == "publish" and event != CLAIMED):
        return world
    # What had been done before is of no use any more.
    ran_on = world.incomplete or bool(world.facts & RELEASE_SENT)
    return world._replace(facts=frozenset({WENT_WRONG, RAN_ON} if ran_on else {WENT_WRONG}))


def one_instant(world: World, *, staged: bool) -> World:
    """S4, R1: does everything stand still at the moment of the cut, of the controller's load?"""
    if staged:
        still = all(one.phase == hold.STAGED and one.still for one in world.servers)
    else:
        still = world.barrier and all(one.part and one.still for one in world.servers)
    return world._replace(facts=world.facts | {ONE_INSTANT}) if still else world


def publishing(world: World) -> World:
    return world._replace(broken=_wrong(world, BEFORE_PUBLISH, "published") or _unready(world))


def _unready(world: World) -> str:
    if world.folder != SEALED:
        return f"S2: the folder that is renamed is {world.folder}, not sealed"
    if not all(one.part for one in world.servers):
        return "S1: published without the part of every server"
    return ""


def activating(world: World) -> World:
    needed = (*BEFORE_ACTIVATION, "take over") if world.first else BEFORE_ACTIVATION
    return world._replace(broken=_wrong(world, needed, "activated"))


def _wrong(world: World, needed: tuple[str, ...], done: str) -> str:
    missing = [action for action in needed if action not in world.facts]
    if missing:
        return f"{done} without {missing[0]!r}"
    if WENT_WRONG in world.facts:
        return f"S1: {done} after a failure"
    if ONE_INSTANT not in world.facts:
        return f"S4: what is {done} does not describe one instant"
    return ""


def claiming(world: World) -> World:
    """S6, but for a release that was cut short by its own deadline."""
    if world.dispatch or world.incomplete:
        return world
    return world._replace(broken="S6: a release waits for the disk")


def given_away(row: Row | None) -> str:
    """R8: whoever has the token decides. Who gave it away only ends, whatever happens to it."""
    if row is None:
        return "R8: the first process has no row for what happens to it"
    if row.target != OUT_OF_HAND:
        return f"R8: the token is given away, and the first process goes on to {row.target!r}"
    return ""


# -- at the end ------------------------------------------------------------------------------------


def end(world: World, *, restoring: bool, faultless: bool) -> str:
    """S6 and what each outcome claims, asked when the attempt ends."""
    meaning = _end_of_restore(world) if restoring else _end_of_save(world)
    if meaning:
        return f"{meaning} in {world.state!r}"
    if faultless and world.state not in _SUCCESS:
        return f"nothing went wrong, and yet the end is {world.state!r}"
    return _released(world)


def _end_of_save(world: World) -> str:
    published = world.folder == PUBLISHED
    match world.state:
        case "resumed" | "release_pending" | "published":
            if not published:
                return "S2: nothing is published"
            if world.state != "published" and (world.state == "resumed") == world.incomplete:
                return "S6: the outcome does not say who was released"
        case "left_paused":
            if not published or STOPPED not in world.facts:
                return "S11: nobody stopped a save that stays paused"
        case "publish_unresolved":
            if UNKNOWN not in world.facts:
                return "S2: only time makes the outcome unknown, and nobody waited"
        case _:
            return _end_of_abort(world)
    return ""


def _end_of_abort(world: World) -> str:
    if world.folder == PUBLISHED or world.renaming:
        return "S1: the folder is, or may become, published"
    if WENT_WRONG not in world.facts:
        return "S10: nothing had gone wrong before the rename"
    if (world.state == "discarded") != (RAN_ON in world.facts):
        return "S10: the outcome does not say whether rollouts ran on"
    if "claim" not in world.facts and not world.incomplete:
        return "S1: nobody claimed the unpublished folder"
    if world.folder != TRASH and not world.bad_disk and not world.incomplete:
        return "S1: the unpublished folder is still there"
    return ""


def _end_of_restore(world: World) -> str:
    if world.state == OUT_OF_HAND:
        return "R8: over, and nobody has the token"
    if world.state == "failed":
        return "" if world.incomplete else "R1: everyone had confirmed"
    if world.incomplete:
        return "R1: not everyone had confirmed"
    if world.state == "resumed" and not all(one.active for one in world.servers):
        return "R1: not everyone was activated"
    if world.state == "aborted" and any(one.active for one in world.servers):
        return "R1: somebody was activated"
    if world.state == "aborted" and WENT_WRONG not in world.facts:
        return "R1: nothing had gone wrong"
    return ""


def _released(world: World) -> str:
    """S6: everyone who was told is let go, and work is sent again."""
    if world.state == "left_paused":
        return ""  # S11: what would run then has no controller, so the leases end the holds
    told = any(one.told for one in world.servers)
    if told and not world.facts & (RELEASE_SENT | {RAN_ON}) and not world.incomplete:
        return "S6: the attempt is over, and nobody was released"
    if not world.hurt and any(one.closed and one.fence == OURS for one in world.servers):
        return "S6: the attempt is over, and a server is held"
    rolled_back = "rollback callers" in world.facts
    if not world.dispatch and not rolled_back and not world.incomplete:
        return "S6: the attempt is over, and no work is sent"
    return ""

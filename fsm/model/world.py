"""One moment of a save or a restore, as a value."""

from __future__ import annotations

from typing import NamedTuple

from fsm.model.server import Server

OVER = "over"  # the attempt has ended, or its controller has crashed; not a state of a table
OFF, ON, NOTICED = "off", "on", "noticed"  # the renewal; noticed: `hold_lost` is in the inbox
UNPUBLISHED, SEALED, PUBLISHED, TRASH = "tmp", "sealed", "published", "trash"  # the folder


class World(NamedTuple):
    """faults: how many may still happen. done: how many actions of the running step are done; once
    all are, its answer is in the inbox. facts: actions done in the attempt, and what the rules ask
    about. renaming: a rename was left behind (S2). incomplete: a release or a clean-up did not
    reach everything. newer: another controller has taken over. hurt: a fault has touched a server
    or a message. stale: the answer of an earlier step. broken: the rule that the last move broke.
    first: the process that gave its token away (R8), on or over. token: where that token is.
    """

    state: str
    servers: tuple[Server, ...]
    folder: str
    faults: int
    done: int = 0
    facts: frozenset[str] = frozenset()
    renewal: str = OFF
    dispatch: bool = True
    barrier: bool = False
    renaming: bool = False
    incomplete: bool = False
    newer: bool = False
    hurt: bool = False
    bad_disk: bool = False
    cancelled: bool = False
    stale: str = ""
    broken: str = ""
    first: str = ""
    token: str = ""


def with_server(world: World, number: int, one: Server) -> World:
    servers = world.servers
    return world._replace(servers=(*servers[:number], one, *servers[number + 1 :]))


def hit(world: World, *, hurt: bool = True) -> World:
    """A fault happens; `hurt` if it touches a server or a message."""
    return world._replace(faults=world.faults - 1, hurt=world.hurt or hurt)


def over(world: World) -> World:
    """Nobody drives any more. Only servers go on, and what is under way to them."""
    servers = tuple(
        Server(one.callee, one.phase, one.fence, one.ended, one.box, told=True)
        for one in world.servers
    )
    return World(
        OVER, servers, "", 0, dispatch=False, newer=world.newer, hurt=True, first=world.first
    )

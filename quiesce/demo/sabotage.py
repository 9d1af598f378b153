"""Breaking something on purpose, to show that the audit at the end is not decoration.

Each kind is a function that does the damage, and a row of `KINDS` that says in words what it does,
where it acts, and which words the demo's exit message must then contain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from attrs import frozen
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fsm.storing import Fence
from participants.data_plane import TRAIN, DataPlane
from storage import names

T = TypeVar("T")


@frozen
class Kind:
    """One way to break the demo.

    where: `loader` (the rollouts to be sent), `ledger` (the finishes that count), `plane`, `tools`
    (the tool server's ASGI app), `root` (the snapshot root). when: `start`, before the first
    rollout; `end`, before the audit; `restore`, before the next one. words: in the exit message.
    """

    name: str
    sentence: str
    where: Literal["loader", "ledger", "plane", "tools", "root"]
    when: Literal["start", "end", "restore"]
    words: tuple[str, ...]


_ALL = (
    Kind("drop_row", "a training row disappears", "plane", "end", ("training row", "is missing")),
    Kind("stray_row", "a row appears that no ledger names", "plane", "end", ("is a stray",)),
    Kind("double_effect", "a tool call is applied twice", "tools", "start", ("applied 2 times",)),
    Kind("leave_tmp", "an unpublished folder stays", "root", "end", ("left unpublished",)),
    Kind("skip_rollout", "a rollout is never sent", "loader", "start", ("rollout", "is lost")),
    Kind("double_rollout", "a rollout counts twice", "ledger", "end", ("rollout", "is doubled")),
    Kind("flip_bit", "a bit flips in the newest snapshot", "root", "restore", ("is refused",)),
)
KINDS = {kind.name: kind for kind in _ALL}
STRAY = "stray_g0"


async def drop_row(plane: DataPlane) -> str:
    """Clear one training row; returns its key. Raises LookupError when there is none."""
    key = _first(sorted(await plane.keys(TRAIN)), "training row")
    await plane.clear(TRAIN, [key])
    return key


async def stray_row(plane: DataPlane) -> str:
    """Put a copy of a training row under a key that no ledger names; returns the key."""
    tags = await plane.keys(TRAIN)
    key = _first(sorted(tags), "training row")
    row = (await plane.get_rows(TRAIN, [key]))[key]
    await plane.put_rows(TRAIN, {STRAY: row}, tags[key])
    return STRAY


def skip_rollout(rollouts: list[T]) -> T:
    """Take the last rollout out of those to be sent, and return it."""
    _first(rollouts, "rollout")
    return rollouts.pop()


def double_rollout(finished: list[T]) -> T:
    """Count one finished rollout a second time, and return it."""
    finished.append(_first(finished, "finished rollout"))
    return finished[-1]


def leave_tmp(root: Path) -> Path:
    """Make a folder that looks like an unpublished snapshot."""
    folder = root / names.draft_name(Fence("", 999_999, 999_999))
    folder.mkdir()
    return folder


def flip_bit(root: Path) -> Path:
    """Flip one bit in the middle of the largest file of the newest snapshot; returns the file."""
    newest = _first(sorted(root.glob("snapshot_*"), reverse=True), "published snapshot")
    files = [path for path in newest.rglob("*") if path.is_file() and path.name != names.MANIFEST]
    target: Path = _first(sorted(files, key=lambda path: -path.stat().st_size), "file with content")
    with target.open("r+b") as file:
        file.seek(target.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    return target


def double_effect(app: ASGIApp) -> ASGIApp:
    """The tool server, with the first step that it is asked for applied twice. Only that one: a
    rollout that is broken at every step would never finish, and be missed instead of audited."""
    doubled = False

    async def twice(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal doubled
        if doubled or scope["type"] != "http" or scope["path"] != "/step":
            return await app(scope, receive, send)
        doubled = True
        body = await Request(scope, receive).body()
        await app(dict(scope), _again(body), _nowhere)
        return await app(scope, _again(body), send)

    return twice


def _again(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _nowhere(_: Message) -> None:
    """The reply to the first of the two calls is lost."""


def _first(found: list[T], what: str) -> T:
    if not found:
        raise LookupError(f"nothing to break: there is no {what} yet")
    return found[0]

"""Names of folders below a root, and the ids in them. Nothing but these is ever opened (F5).

Every check is a full match: a name with a line break at its end is another name.
"""

from __future__ import annotations

import re
import secrets

from fsm.storing import Fence

MANIFEST = "manifest.json"

_NUMBERS = r"([0-9]{6,12})-([0-9]{6,12})"
_SNAPSHOT = re.compile(f"snapshot_{_NUMBERS}")
_DRAFT = re.compile(f"tmp_{_NUMBERS}_[0-9a-f]{{8}}")
_TRASH = re.compile(f"trash_(?:snapshot_{_NUMBERS}|tmp_{_NUMBERS}_[0-9a-f]{{8}})_[0-9a-f]{{8}}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_MAX_DEPTH = 16

Order = tuple[int, int]  # (incarnation, sequence): greater is newer


def snapshot_name(fence: Fence) -> str:
    """`snapshot_000003-000012`: sorts by incarnation, then sequence; it is also the id."""
    return f"snapshot_{fence.incarnation:06}-{fence.sequence:06}"


def draft_name(fence: Fence) -> str:
    """`tmp_000003-000012_<nonce>`: never used twice, even for the same fence."""
    return f"tmp_{fence.incarnation:06}-{fence.sequence:06}_{secrets.token_hex(4)}"


def trash_name(name: str) -> str:
    return f"trash_{name}_{secrets.token_hex(4)}"


def is_snapshot(name: str) -> bool:
    return _SNAPSHOT.fullmatch(name) is not None


def is_draft(name: str) -> bool:
    return _DRAFT.fullmatch(name) is not None


def is_trash(name: str) -> bool:
    return _TRASH.fullmatch(name) is not None


def order_of(snapshot: str) -> Order:
    """(incarnation, sequence) of a snapshot's id. Raises ValueError for anything else."""
    match = _SNAPSHOT.fullmatch(snapshot)
    if match is None:
        raise ValueError(f"{snapshot!r} is not a snapshot id such as 'snapshot_000003-000012'")
    return int(match[1]), int(match[2])


def check_folder(name: str) -> str:
    """`name` if it is a snapshot's or an unpublished folder's. Raises ValueError."""
    if not (is_snapshot(name) or is_draft(name)):
        raise ValueError(
            f"{name!r} is not the name of a snapshot folder; ask for an id, not a path"
        )
    return name


def check_parts(path: str) -> tuple[str, ...]:
    """The components of a path inside a snapshot ("gym/agent/agent0"). Raises ValueError.

    Letters, digits, "_", "." and "-" only, no component begins with "." or "-", at most 16 deep.
    """
    parts = tuple(path.split("/"))
    if len(parts) > _MAX_DEPTH or not all(_PART.fullmatch(part) for part in parts):
        raise ValueError(
            f"{path!r} cannot be a folder or file of a snapshot: use letters, digits and '_.-', "
            f"at most {_MAX_DEPTH} components, none of them empty or beginning with '.' or '-'"
        )
    return parts

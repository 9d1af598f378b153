"""The manifest: what a snapshot holds, written last and read strictly before anything else (F3)."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from fsm.outcome import Anchor
from fsm.storing import Fence, FileEntry
from fsm.strict import BadInput, read, write
from storage.jsontext import canonical, strict_loads
from storage.names import MANIFEST

SCHEMA_VERSION = 1
LIMIT_BYTES = 64 << 20


@frozen
class Body:
    """What the engine puts into a manifest.

    topology: what must be equal at restore. config: the resolved configuration, for people.
    anchor: the trainer checkpoint that the snapshot belongs to. formats: each participant's
    format version. facts: what each participant returned.
    """

    topology: dict[str, Any]
    config: dict[str, Any]
    anchor: Anchor | None
    formats: dict[str, int]
    facts: dict[str, dict[str, Any]]


@frozen
class Manifest:
    """All of a snapshot but its bytes. parent: the snapshot that this one went on from."""

    schema_version: int
    id: str
    fence: Fence
    parent: str | None
    created_at: str  # for people; nothing decides by it
    fingerprint: str
    topology: dict[str, Any]
    config: dict[str, Any]
    anchor: Anchor | None
    formats: dict[str, int]
    facts: dict[str, dict[str, Any]]
    files: tuple[FileEntry, ...]
    counts: dict[str, int]


@frozen
class Verified:
    """What every `SavedSnapshot` (fsm/storing.py) says of itself, wherever its bytes are."""

    manifest: Manifest

    @property
    def id(self) -> str:
        return self.manifest.id

    @property
    def fence(self) -> Fence:
        return self.manifest.fence

    @property
    def anchor(self) -> Anchor | None:
        return self.manifest.anchor

    @property
    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        return self.manifest.facts

    @property
    def formats(self) -> Mapping[str, int]:
        return self.manifest.formats


def body_of(data: Any) -> Body:
    """The body given to `seal`, checked. Raises `BadInput` naming every bad key."""
    return read(Body, write(data), "the manifest's body")


def encode(manifest: Manifest, key: bytes | None = None) -> bytes:
    """The bytes of `manifest.json`, with a digest of itself.

    Raises ValueError or TypeError for values that JSON cannot hold.
    """
    body = write(manifest)
    whole = {**body, "digest": _digest(body, key)}
    return json.dumps(whole, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def decode(data: bytes, key: bytes | None = None) -> Manifest:
    """The reverse of `encode`. Raises ValueError for anything that `encode` did not write."""
    body = strict_loads(data)
    if not isinstance(body, dict):
        raise BadInput(MANIFEST, [f"expected a mapping, got {type(body).__name__}"])
    if body.get("schema_version") != SCHEMA_VERSION:
        found = body.get("schema_version")
        raise ValueError(f"schema version {found!r}; this program reads version {SCHEMA_VERSION}")
    digest = str(body.pop("digest", None))
    if not hmac.compare_digest(digest.encode(), _digest(body, key).encode()):
        raise ValueError("its digest does not match: " + _why(digest, key))
    manifest = read(Manifest, body, MANIFEST)
    if encode(manifest, key) != data:
        raise ValueError("not byte for byte what this program writes")
    return manifest


def _digest(body: dict[str, Any], key: bytes | None) -> str:
    if key is None:
        return "sha256:" + hashlib.sha256(canonical(body)).hexdigest()
    return "hmac-sha256:" + hmac.new(key, canonical(body), hashlib.sha256).hexdigest()


def _why(digest: str, key: bytes | None) -> str:
    if digest.startswith("hmac-") and key is None:
        return "it is signed, and no key is configured"
    if not digest.startswith("hmac-") and key is not None:
        return "it is not signed, and a key is configured"
    return "changed after it was written" + (", or signed with another key" if key else "")

"""The manifest is read strictly, and refuses everything that was not written by `encode`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from fsm.outcome import Anchor
from fsm.storing import Fence, FileEntry
from fsm.strict import BadInput
from storage.fingerprint import difference, fingerprint
from storage.manifest import SCHEMA_VERSION, Manifest, body_of, decode, encode
from tests.folders import body

MANIFEST = Manifest(
    schema_version=SCHEMA_VERSION,
    id="snapshot_000001-000002",
    fence=Fence("root", 1, 2),
    parent=None,
    created_at="2030-01-01T00:00:00+00:00",
    fingerprint=fingerprint({"n": 1}),
    topology={"n": 1},
    config={"lease_s": 60.0},
    anchor=Anchor(7, "weights"),
    formats={"tq": 1},
    facts={"tq": {"rows": 3, "none": None}},
    files=(FileEntry("tq/rows.jsonl", 3, "00"),),
    counts={"files": 1, "bytes": 3},
)


@pytest.mark.parametrize("key", [None, b"secret"], ids=["plain", "signed"])
@pytest.mark.parametrize("manifest", [MANIFEST, evolve(MANIFEST, anchor=None, parent="snapshot_1")])
def test_what_is_written_is_read(manifest: Manifest, key: bytes | None) -> None:
    assert decode(encode(manifest, key), key) == manifest


def test_every_single_bit_counts() -> None:
    data = encode(MANIFEST)
    for place in range(len(data)):
        for bit in range(8):
            flipped = data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
            with pytest.raises(ValueError):  # noqa: PT011 - any refusal will do here
                decode(flipped)


def changed(**changes: Any) -> bytes:
    return json.dumps(json.loads(encode(MANIFEST)) | changes).encode()


BAD = {
    "not JSON": (b"{", "Expecting"),
    "empty": (b"", "Expecting"),
    "not UTF-8": (b"\xff\xfe\xff", "decode"),
    "a list": (b"[]", "expected a mapping, got list"),
    "NaN": (encode(MANIFEST).replace(b"60.0", b"NaN"), "NaN is not JSON"),
    "Infinity": (encode(MANIFEST).replace(b"60.0", b"-Infinity"), "-Infinity is not JSON"),
    "a key twice": (b'{"id": "a",' + encode(MANIFEST)[1:], "the same key twice: id"),
    "deep nesting": (b"[" * 100_000, "nested too deeply"),
    "a number too long": (b'{"n": ' + b"1" * 5_000 + b"}", "digits"),
    "an older schema": (
        changed(schema_version=0),
        "schema version 0; this program reads version 1",
    ),
    "a newer schema": (changed(schema_version=2), "schema version 2; this program reads version 1"),
    "no schema": (b"{}", "schema version None"),
    "an unknown key": (changed(more=1), "digest does not match"),
    "another value": (changed(parent="snapshot_000001-000001"), "changed after it was written"),
    "other spaces": (encode(MANIFEST) + b"\n", "not byte for byte"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_manifests_are_refused(name: str) -> None:
    data, why = BAD[name]
    with pytest.raises(ValueError, match=why):
        decode(data)


def test_a_signature_needs_the_right_key() -> None:
    with pytest.raises(ValueError, match="signed with another key"):
        decode(encode(MANIFEST, b"a"), b"b")
    with pytest.raises(ValueError, match="signed, and no key is configured"):
        decode(encode(MANIFEST, b"a"))
    with pytest.raises(ValueError, match="not signed, and a key is configured"):
        decode(encode(MANIFEST), b"a")


def test_nan_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode(evolve(MANIFEST, config={"lease_s": float("nan")}))


def test_the_body_is_strict_and_names_every_bad_key() -> None:
    assert body_of(body(7)).anchor == Anchor(7, "weights")
    assert body_of(body(None)).anchor is None
    with pytest.raises(BadInput) as caught:
        body_of(body(formats={"tq": "1"}, extra=1))
    assert "extra" in str(caught.value)
    assert "expected int, got '1'" in str(caught.value)


def test_fingerprint_does_not_depend_on_order() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": (1, 2), "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})


def test_difference_is_a_sentence() -> None:
    saved = {"gym": {"agents": 2, "tools": "a"}, "old": 1, "same": [1]}
    now = {"gym": {"agents": 3, "tools": "a"}, "new": 1, "same": (1,)}
    assert difference(saved, now) == (
        "gym.agents was 2, is now 3; new was absent, is now 1; old was 1, is now absent"
    )
    assert difference(saved, saved) == ""


def test_many_differences_are_counted() -> None:
    told = difference({str(i): 0 for i in range(9)}, {str(i): 1 for i in range(9)})
    assert told.endswith("; and 4 more")

"""The document of a TransferQueue part: what can be known of it without unpickling anything.

Imports neither TransferQueue nor Ray: `quiesce show` and `verify` run where neither is installed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen

from fsm.outcome import SnapshotRejected
from fsm.storing import SavedPart
from participants.data_plane import CAPTURE, INSPECTED, TRAIN, Listing, has_rows, read_saved

DOCUMENT, CHECKPOINT = "transfer_queue", "checkpoint"


@frozen
class Topology:
    """What a checkpoint needs of the TransferQueue that loads it: all must be equal."""

    version: str
    backend: str
    units: int
    sampler: str
    ssd_offload: bool = False


@frozen
class Contents:
    """The part's own document, `transfer_queue.json`.

    keys, half_born: by partition, of all partitions. inventory_sha256: over keys and tags.
    """

    schema_version: int
    topology: Topology
    keys: dict[str, list[str]]
    half_born: dict[str, list[str]]
    inventory_sha256: str


def contents_of(topology: Topology, held: Listing) -> Contents:
    keys = {partition: sorted(tags) for partition, tags in held.tags.items()}
    half_born = {partition: list(names) for partition, names in held.half_born.items()}
    return Contents(1, topology, keys, half_born, inventory_digest(held))


def inventory_digest(held: Listing) -> str:
    """Of keys and tags; a tag's value that JSON does not know counts by its repr."""
    text = json.dumps([held.tags, held.half_born], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def read_contents(saved: SavedPart, snapshot: str) -> Contents:
    what = f"{DOCUMENT}.json"
    contents = read_saved(Contents, saved.document(DOCUMENT), what, snapshot)
    if contents.schema_version != 1:
        why = f"schema version {contents.schema_version}, this reads 1"
        raise SnapshotRejected(snapshot, what, why)
    return contents


def inspect(saved: SavedPart) -> Mapping[str, Any]:
    """Row counts and topology, from the document alone."""
    contents = read_contents(saved, INSPECTED)
    train, capture = contents.keys.get(TRAIN, []), contents.keys.get(CAPTURE, [])
    return {
        "train_rows": len(train),
        "capture_rows": len(capture),
        "half_born": sum(map(len, contents.half_born.values())),
        "topology": asdict(contents.topology),
        "_has": has_rows(train, capture),
    }

"""Save and restore one participant through a real store, as the engine's steps do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fsm.operation import Operation
from fsm.participant import Attempt, Participant, Restore
from fsm.storing import Draft, Store
from fsm.trace import Trace


async def attempt(
    store: Store, one: Participant, facts: Mapping[str, Mapping[str, Any]]
) -> tuple[Attempt, Draft, Operation]:
    """A save that has come as far as the cut. facts: what other participants said."""
    operation = Operation("save", [one], Trace("save", time.monotonic))
    operation.fence = await store.fence()
    operation.facts.update({name: dict(said) for name, said in facts.items()})
    draft = await store.begin(operation.fence)
    return Attempt(one.name, operation, draft), draft, operation


async def publish(store: Store, draft: Draft, one: Participant, facts: Mapping[str, Any]) -> None:
    public = {key: value for key, value in facts.items() if not key.startswith("_")}
    body = {
        "topology": {one.name: dict(await one.describe())},
        "config": {},
        "anchor": None,
        "formats": {one.name: one.format_version},
        "facts": {one.name: public},
    }
    await store.seal(draft, body)
    assert (await store.publish(draft)).published


async def save(
    store: Store, one: Participant, facts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """One whole snapshot of one participant that has a `cut`; returns its facts."""
    seen, draft, _ = await attempt(store, one, facts)
    said = dict(await one.cut(seen) or {})
    await publish(store, draft, one, said)
    return said


async def newest(store: Store, one: Participant) -> tuple[Restore, Operation]:
    """A restore of the newest snapshot, verified by the store, before its first hook."""
    topology = {one.name: dict(await one.describe())}
    found = await store.newest(topology, {one.name: one.format_version}, if_bad="raise")
    assert found is not None
    await store.restored(found)
    operation = Operation("restore", [one], Trace("restore", time.monotonic))
    operation.fence = await store.fence()
    return Restore(one.name, operation, found), operation

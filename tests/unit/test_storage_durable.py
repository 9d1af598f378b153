"""The leaves: short writes, renames over something, opening below a root."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import durable


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole_write(fd, bytes(data)[:3]))
    durable.write_file(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError, match="create file"):
        durable.write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_errors_name_step_and_path_and_keep_their_class(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"list directory.*nowhere") as caught:
        durable.names_in(tmp_path / "nowhere")
    assert caught.value.errno == errno.ENOENT


THINGS: dict[str, Callable[[Path], object]] = {
    "empty directory": lambda path: path.mkdir(),
    "full directory": lambda path: (path / "inside").mkdir(parents=True),
    "file": lambda path: path.write_text("mine"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("supported", [True, False], ids=["renameat2", "fallback"])
@pytest.mark.parametrize("thing", THINGS)
def test_rename_never_replaces(
    tmp_path: Path, thing: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    THINGS[thing](target)
    before = os.lstat(target)
    if not supported:
        monkeypatch.setattr(durable, "_renameat2", lambda source, target: errno.EINVAL)
    with pytest.raises(OSError, match="rename") as caught:
        durable.rename_noreplace(source, target)
    assert caught.value.errno in (errno.EEXIST, errno.ENOTEMPTY)
    assert source.is_dir()
    assert os.lstat(target) == before


def test_rename_without_kernel_support_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(durable, "_renameat2", lambda source, target: errno.EINVAL)
    (tmp_path / "source").mkdir()
    with caplog.at_level(logging.WARNING, "quiesce.storage"):
        durable.rename_noreplace(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").is_dir()
    assert "no RENAME_NOREPLACE" in caplog.text


def test_open_below_follows_no_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    (outside / "inner").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    for parts in (("link",), ("link", "inner")):
        with pytest.raises(OSError, match="open directory"):
            durable.open_below(root, parts)
    with pytest.raises(OSError, match="open directory"):
        durable.open_below(root, ("link", "new"), make_from=0)
    assert not (outside / "new").exists()


def test_open_below_makes_only_what_it_may(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        durable.open_below(tmp_path, ("gone", "new"), make_from=1)
    (tmp_path / "there").mkdir()
    durable.close(durable.open_below(tmp_path, ("there", "new", "newer"), make_from=1))
    assert (tmp_path / "there/new/newer").is_dir()


def test_what_is_neither_file_nor_directory_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="neither a file nor a directory"):
        durable.files_below(tmp_path)
    with pytest.raises(OSError, match="not a file"):
        durable.read_file(tmp_path / "pipe", 10)


def test_small_files_have_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="longer than 10 bytes"):
        durable.read_file(tmp_path / "file", 10)


def test_descriptors_do_not_leak(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    durable.fsync_tree(tmp_path)
    durable.read_file(tmp_path / "file", 10)
    for parts in (("nowhere",), ("file",)):
        with pytest.raises(OSError, match="open directory"):
            durable.open_below(tmp_path, parts)
    assert len(os.listdir("/proc/self/fd")) == before

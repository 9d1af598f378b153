"""What a root has to be able to do."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from storage import durable
from storage.store import FolderStore
from tests.folders import folders


def test_a_root_where_folders_cannot_be_renamed_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1: and not by the first publish, with everyone paused."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(source))

    async def main() -> None:
        store = FolderStore(tmp_path / "root")
        with monkeypatch.context() as patched:
            await store.open()  # the identity of a root is a rename of a file
            await store.close()
            patched.setattr(durable, "rename_noreplace", refuse)
            with pytest.raises(OSError, match="publishing is one rename: put the snapshot root on"):
                await store.open()
        assert folders(store.root, "tmp") == []
        await store.open()
        await store.close()

    asyncio.run(main())

"""A pool of sandboxes, one process for each session. It knows nothing of snapshots, but it can
close its door, say when nobody is inside, copy a database and start from copies."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SESSION = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Sandbox:
    """One process. Its calls run one after another, each to its end."""

    def __init__(self, process: Process) -> None:
        self._process, self._turn = process, asyncio.Lock()

    @classmethod
    async def start(cls, database: Path) -> Sandbox:
        program = [sys.executable, "-m", "quiesce_sandboxes.sandbox", str(database)]
        return cls(await asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE))

    async def call(self, statement: str, *arguments: Any) -> list[Any]:
        """Raises ValueError for SQL that fails, OSError if the process is gone.

        It ends even if its caller goes away: the next call must not read this one's answer.
        """
        return await asyncio.shield(asyncio.create_task(self._call(statement, *arguments)))

    async def _call(self, statement: str, *arguments: Any) -> list[Any]:
        async with self._turn:
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(json.dumps([statement, *arguments]).encode() + b"\n")
            await stdin.drain()
            line = await stdout.readline()
        if not line:
            raise ConnectionResetError(f"sandbox process {self._process.pid} has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(f"{statement}: {answer['error']}")
        rows: list[Any] = answer["rows"]
        return rows

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()


class SandboxPool:
    """Sandboxes by session; databases are in `folder`, which the pool makes and owns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._sandboxes: dict[str, Sandbox] = {}
        self._calls: set[asyncio.Task[list[Any]]] = set()
        self._starting = asyncio.Lock()
        self._door = asyncio.Event()
        self._door.set()

    @property
    def sessions(self) -> list[str]:
        return sorted(self._sandboxes)

    @property
    def is_closed(self) -> bool:
        return not self._door.is_set()

    async def run(self, session: str, statement: str, *arguments: Any) -> list[Any]:
        """One statement in the session's database. Waits while the door is closed."""
        if not SESSION.fullmatch(session):
            raise ValueError(f"{session!r} is no session: letters, digits, '_' and '-' only")
        await self._door.wait()
        # It counts from here on, and to its end even if the caller goes away.
        call = asyncio.create_task(self._call(session, statement, *arguments))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    def close_door(self) -> None:
        self._door.clear()

    def open_door(self) -> None:
        self._door.set()

    async def empty(self) -> None:
        """Wait until no statement runs."""
        while self._calls:
            await asyncio.wait(self._calls)

    async def copy(self, session: str, target: Path) -> None:
        """The session's database as one new file."""
        await self._sandboxes[session].call("VACUUM INTO ?", str(target))

    async def start_from(self, databases: Mapping[str, Path]) -> None:
        """End all sandboxes and start one for each of these files. May be repeated."""
        await self.kill()
        for session, database in databases.items():
            shutil.copyfile(database, self._database(session))
            self._sandboxes[session] = await Sandbox.start(self._database(session))

    async def kill(self) -> None:
        await asyncio.gather(*(sandbox.kill() for sandbox in self._sandboxes.values()))
        self._sandboxes.clear()
        for database in self.folder.glob("*.sqlite*"):
            database.unlink()

    async def _call(self, session: str, statement: str, *arguments: Any) -> list[Any]:
        async with self._starting:
            if session not in self._sandboxes:
                self._sandboxes[session] = await Sandbox.start(self._database(session))
        return await self._sandboxes[session].call(statement, *arguments)

    def _database(self, session: str) -> Path:
        return self.folder / f"{session}.sqlite"

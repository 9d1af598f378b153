"""Starting and killing the demo's processes: only those that it started, found by a mark in
their environment (a SIGKILL of Ray's driver leaves children behind in groups of their own)."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

MARK = "QUIESCE_DEMO_MARK"


class Group:
    """Processes that live and die together. Their children inherit the mark."""

    def __init__(self, logs: Path) -> None:
        self.mark = secrets.token_hex(8)
        self._logs = logs
        self._logs.mkdir(parents=True, exist_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, *arguments: str, env: Mapping[str, str]) -> None:
        """`python -m module arguments`, its output appended to `<name>.log`."""
        with (self._logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(env) | {MARK: self.mark},
                start_new_session=True,
            )

    def exited(self) -> dict[str, int]:
        """Processes that ended by themselves, with their exit codes."""
        codes = {name: process.poll() for name, process in self.processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill_one(self, name: str) -> None:
        """SIGKILL one process. It is forgotten, so that another may be started under its name."""
        process = self.processes.pop(name)
        process.kill()
        process.wait(timeout=10)

    def kill(self) -> int:
        """SIGKILL everything that carries the mark, until nothing does. Returns how many."""
        killed: set[int] = set()
        deadline = time.monotonic() + 20.0
        while (pids := marked(self.mark)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= pids
            for process in self.processes.values():
                process.poll()
            time.sleep(0.05)
        for process in self.processes.values():
            process.wait(timeout=10)
        self.processes.clear()
        return len(killed)

    def tail(self, name: str, lines: int = 15) -> str:
        """The last lines that a process wrote."""
        path = self._logs / f"{name}.log"
        if not path.is_file():
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def marked(mark: str) -> set[int]:
    """Pids of living processes with our mark in their environment (zombies have none)."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()

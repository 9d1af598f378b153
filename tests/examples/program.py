"""Running an example as its reader would: as a program, in a folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 90


def run(name: str, folder: Path) -> list[str]:
    """To its end; the lines that it printed."""
    done = subprocess.run(
        _command(name, folder), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def stop_at(name: str, folder: Path, line: str, how: signal.Signals) -> list[str]:
    """Send it a signal when it prints `line`; all lines that it printed."""
    with subprocess.Popen(_command(name, folder), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for printed in process.stdout:
            lines.append(printed.rstrip())
            if lines[-1] == line:
                process.send_signal(how)
        process.wait(LIMIT_S)
    return lines


def _command(name: str, folder: Path) -> list[str]:
    os.environ.pop("PYTHONPATH", None)
    return [sys.executable, str(EXAMPLES / name), str(folder)]

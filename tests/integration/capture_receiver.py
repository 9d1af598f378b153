"""The trainer's receiver of capture rows as a process, for tests."""

from __future__ import annotations

import argparse

from participants.gym.servers.serve import serve
from participants.memory_data_plane import MemoryDataPlane
from quiesce.demo.sink import receiver

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    serve(receiver(MemoryDataPlane(), "secret"), "127.0.0.1", parser.parse_args().port)

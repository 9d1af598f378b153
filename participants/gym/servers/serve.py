"""One Gym server as a process."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

from participants.gym.servers.clock import ParkingLoop

PORT_IN_USE = 2  # exit code
KEEP_ALIVE_S = 75  # longer than clients keep idle connections: a reused one should not be closed
SHUTDOWN_S = 2  # runs last for hours: the end of the process does not wait for them


def serve(app: Any, host: str, port: int) -> None:
    """Serve an ASGI app until the process is told to stop. One worker: state is per process.

    host: an interface of the cluster's private network; never all of them. A port that is taken
    ends the process with one line on stderr and exit code 2.
    """
    import uvicorn

    try:
        listener = listening(host, port)
    except OSError as error:
        sys.stderr.write(f"cannot listen on {host}:{port}: {error.strerror}; choose another port\n")
        raise SystemExit(PORT_IN_USE) from None
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    with listener, asyncio.Runner(loop_factory=ParkingLoop) as runner:
        runner.run(uvicorn.Server(config).serve(sockets=[listener]))


def listening(host: str, port: int) -> socket.socket:
    """Accepted connections inherit TCP_NODELAY. asyncio sets it only on sockets that name their
    protocol, which these do not, and an answer would wait 40 ms for the client's ACK."""
    listener = socket.create_server((host, port), backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener

"""ASGI apps on free loopback ports, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn


@contextlib.contextmanager
def serving(apps: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Serve each app on a port of its own; gives {name: url}. All have ended on leaving."""
    sockets = {name: _listening() for name in apps}
    servers = {
        name: uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
        )
        for name, app in apps.items()
    }

    async def serve() -> None:
        await asyncio.gather(*(server.serve([sockets[name]]) for name, server in servers.items()))

    # The sockets listen already: a request that comes before the server runs waits in the backlog.
    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield {name: f"http://127.0.0.1:{one.getsockname()[1]}" for name, one in sockets.items()}
    finally:
        for server in servers.values():
            server.should_exit = True
        thread.join(10)
        for one in sockets.values():
            one.close()
        assert not thread.is_alive(), "a server did not end"


def _listening() -> socket.socket:
    one = socket.socket()
    one.bind(("127.0.0.1", 0))
    one.listen(128)
    return one

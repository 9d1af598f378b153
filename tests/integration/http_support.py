"""ASGI apps on free loopback ports, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import uvicorn


class Ports:
    """One listening socket for each name. A request that comes before its server runs waits."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.sockets = {name: _listening() for name in names}
        self.urls = {
            name: f"http://127.0.0.1:{one.getsockname()[1]}" for name, one in self.sockets.items()
        }


class Servers:
    """uvicorn servers for apps, on ports that listen already."""

    def __init__(self, apps: Mapping[str, Any], ports: Ports) -> None:
        self._sockets = [ports.sockets[name] for name in apps]
        self._servers = [
            uvicorn.Server(
                uvicorn.Config(app, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
            )
            for app in apps.values()
        ]

    async def serve(self) -> None:
        pairs = zip(self._servers, self._sockets, strict=True)
        await asyncio.gather(*(server.serve([one]) for server, one in pairs))

    def stop(self) -> None:
        for server in self._servers:
            server.should_exit = True


@contextlib.asynccontextmanager
async def served(apps: Mapping[str, Any], ports: Ports) -> AsyncIterator[None]:
    """Serve in this event loop, so that a test shares events with what it serves."""
    servers = Servers(apps, ports)
    task = asyncio.create_task(servers.serve())
    try:
        yield
    finally:
        servers.stop()
        await task


@contextlib.contextmanager
def serving(apps: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Serve in a thread; gives {name: url}. All have ended on leaving."""
    ports = Ports(apps)
    servers = Servers(apps, ports)
    thread = threading.Thread(target=asyncio.run, args=(servers.serve(),), daemon=True)
    thread.start()
    try:
        yield ports.urls
    finally:
        servers.stop()
        thread.join(10)
        assert not thread.is_alive(), "a server did not end"


def _listening() -> socket.socket:
    # proto: asyncio sets TCP_NODELAY only where it is named; without it each call takes 40 ms more
    one = socket.socket(proto=socket.IPPROTO_TCP)
    one.bind(("127.0.0.1", 0))
    one.listen(128)
    return one

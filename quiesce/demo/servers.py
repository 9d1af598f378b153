"""The demo's three Gym servers, each a process of its own.

    python -m quiesce.demo.servers agent    --port P --root R --policy URL --tools URL
    python -m quiesce.demo.servers policy   --port P --root R --upstream URL --sink SINK
    python -m quiesce.demo.servers resource --port P --root R --effects FILE

SINK is `memory:URL` (the trainer's receiver) or `tq:HOST:PORT` (the Ray of a TransferQueue). The
bearer token comes from the environment, where a list of processes does not show it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp

from participants.data_plane import CaptureSink
from participants.gym.servers.serve import serve

TOKEN = "QUIESCE_TOKEN"


def agent(given: argparse.Namespace, token: str) -> ASGIApp:
    from participants.gym.servers.agent import AgentServer
    from quiesce.demo.loop import play

    servers = {"policy": given.policy, "tools": given.tools}
    return AgentServer(given.name, play, servers=servers, root=given.root, token=token).app


def policy(given: argparse.Namespace, token: str) -> ASGIApp:
    from participants.gym.servers.policy import PolicyServer

    sink = sink_at(given.sink, token)
    return PolicyServer(
        given.name, upstream=given.upstream, sink=sink, root=given.root, token=token
    ).app


def resource(given: argparse.Namespace, token: str) -> ASGIApp:
    from participants.gym.servers.resource import ResourceServer
    from quiesce.demo.frozenlake import Lake
    from quiesce.demo.sabotage import double_effect

    lake = Lake(given.effects)
    # Inside the wrapper, where its record of answered requests can't undo the damage.
    app = double_effect(lake.app) if given.sabotage else lake.app
    return ResourceServer(
        given.name, app, codec=lake, root=given.root, token=token, reads=["/verify"]
    ).app


def sink_at(where: str, token: str) -> CaptureSink:
    """Where capture rows go: `memory:URL` or `tq:HOST:PORT`. Raises ValueError for others."""
    scheme, _, address = where.partition(":")
    if scheme == "memory" and address:
        from quiesce.demo.sink import HttpSink

        return HttpSink(address, token)
    if scheme == "tq" and address:
        from participants.transfer_queue.sink import TransferQueueSink

        return TransferQueueSink(address)
    raise ValueError(f"--sink must be memory:URL or tq:HOST:PORT, not {where!r}")


KINDS: dict[str, Callable[[argparse.Namespace, str], ASGIApp]] = {
    "agent": agent,
    "policy": policy,
    "resource": resource,
}


def main(arguments: list[str] | None = None) -> None:
    """Serve until SIGTERM. Ends with one message on stderr when it can't start."""
    parser = _parser()
    given = parser.parse_args(arguments)
    token = os.environ.get(TOKEN, "")
    if not token:
        parser.exit(2, f"{given.name}: set {TOKEN} to the bearer token that all servers share\n")
    try:
        app = KINDS[given.kind](given, token)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"{given.name}: the {given.kind} server can't start: {error}\n")
    serve(app, "127.0.0.1", given.port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quiesce.demo.servers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, name in (("agent", "agent"), ("policy", "policy"), ("resource", "tools")):
        one = kinds.add_parser(kind)
        one.add_argument("--name", default=name)
        one.add_argument("--port", type=int, required=True, help="on 127.0.0.1")
        one.add_argument("--root", type=Path, required=True, help="the snapshot root")
    kinds.choices["agent"].add_argument("--policy", required=True, help="URL of the policy server")
    kinds.choices["agent"].add_argument("--tools", required=True, help="URL of the tool server")
    kinds.choices["policy"].add_argument("--upstream", required=True, help="URL of the model")
    kinds.choices["policy"].add_argument("--sink", required=True, help="memory:URL or tq:HOST:PORT")
    kinds.choices["resource"].add_argument("--effects", type=Path, required=True)
    kinds.choices["resource"].add_argument("--sabotage", choices=["double_effect"])
    return parser


if __name__ == "__main__":
    main()

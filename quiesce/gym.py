"""Gym: the participant, its NemoGym actor, and (extra `server`) what runs inside Gym servers."""

from typing import TYPE_CHECKING, Any

from participants.gym.actor import NemoGymActor, start_actor
from participants.gym.client import GymServer
from participants.gym.participant import Gym
from participants.gym.wire import RunReply, RunRequest

if TYPE_CHECKING:
    from participants.gym.servers.agent import AgentServer
    from participants.gym.servers.policy import PolicyServer
    from participants.gym.servers.resource import ResourceServer
    from participants.gym.servers.serve import serve
    from participants.gym.servers.sessions import SessionCodec

__all__ = [
    "AgentServer",
    "Gym",
    "GymServer",
    "NemoGymActor",
    "PolicyServer",
    "ResourceServer",
    "RunReply",
    "RunRequest",
    "SessionCodec",
    "serve",
    "start_actor",
]

_SERVERS = {
    "AgentServer": "agent",
    "PolicyServer": "policy",
    "ResourceServer": "resource",
    "SessionCodec": "sessions",
    "serve": "serve",
}


def __getattr__(name: str) -> Any:
    """Server parts need starlette and uvicorn; the trainer's side does not."""
    if name not in _SERVERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f"participants.gym.servers.{_SERVERS[name]}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} needs {error.name}: pip install 'quiesce[server]'", name=error.name
        ) from error
    return getattr(module, name)

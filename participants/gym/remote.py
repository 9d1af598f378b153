"""A Ray actor handle behind the methods of the class that it runs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from fsm.outcome import Unavailable
from participants.gym.actor import NemoGymActor


def in_reach(actor: Any) -> NemoGymActor:
    """`actor` itself if it lives in this process; a Ray handle as if it did."""
    if not hasattr(actor.prepare_checkpoint, "remote"):
        return cast("NemoGymActor", actor)
    return cast("NemoGymActor", _RemoteActor(actor))


class _RemoteActor:
    """`await remote.method(...)` for `await handle.method.remote(...)`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            return await _answer(getattr(self._handle, method).remote(*args, **options))

        return call


async def _answer(reference: Any) -> Any:
    """What the actor returned, or the exception that it raised, without Ray's wrapping."""
    import ray
    from ray import exceptions

    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)  # or the actor would go on polling for an attempt that is over
        raise
    except exceptions.RayTaskError as failure:
        raise failure.cause from failure
    except exceptions.RayError as failure:
        raise Unavailable(f"the NemoGym actor is away ({failure}): start it again") from failure

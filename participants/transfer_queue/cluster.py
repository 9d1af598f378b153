"""Start TransferQueue, or join one that runs, with the settings that it needs.

`tq.init` hangs without a word when Ray has fewer free CPUs than TransferQueue has actors, so
CPUs are counted first.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import OmegaConf

from fsm.outcome import Unavailable
from participants.transfer_queue.contents import Topology
from participants.transfer_queue.plane import TransferQueuePlane

_ACTOR, _NAMESPACE = "TransferQueueController", "transfer_queue"
_ANSWER_TIMEOUT_S = 60.0


def start(
    num_storage_units: int = 2,
    *,
    num_cpus: int | None = None,
    sampler: Any = "SequentialSampler",
    timeout_s: float = 60.0,
) -> TransferQueuePlane:
    """Start a new, empty TransferQueue. Blocks for about 10 s; call it before the event loop runs.

    Uses this process's Ray, or starts one with num_cpus (default: as many as are needed, and two
    to spare). sampler: a name, or an instance. timeout_s: of the plane's calls.
    Raises ValueError when CPUs are too few, naming the number needed, and when one runs already.
    """
    needed = num_storage_units + 1  # the controller is an actor too, each takes a whole CPU
    if not ray.is_initialized():
        _init_ray(num_cpus=num_cpus or needed + 2)
    if _controller() is not None:
        raise ValueError("a TransferQueue runs in this Ray already: connect() to it, or close it")
    free = float(ray.available_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]
    if free < needed:
        raise ValueError(
            f"TransferQueue with {num_storage_units} storage units needs {needed} free CPUs, Ray "
            f"has {free:g}: start Ray with num_cpus={needed + 2} or more, or use fewer units"
        )
    tq.init(_configuration(num_storage_units, sampler))
    return TransferQueuePlane(_topology(), timeout_s)


def connect(address: str | None = None, *, timeout_s: float = 60.0) -> TransferQueuePlane:
    """Join a TransferQueue that another process started. Blocks for some seconds.

    address: of its Ray (host:port); None: this process's Ray. With Ray's token authentication
    both processes need the same RAY_AUTH_MODE and RAY_AUTH_TOKEN.
    Raises `Unavailable` when there is none at that address.
    """
    if not ray.is_initialized():
        if address is None:
            raise ValueError("this process has no Ray: give the address of TransferQueue's Ray")
        _init_ray(address=address)
    if _controller() is None:
        raise Unavailable(
            f"no TransferQueue runs in the Ray at {address or 'hand'}: start it first"
        )
    tq.init()
    return TransferQueuePlane(_topology(), timeout_s)


def stop(plane: TransferQueuePlane) -> None:
    """End the plane and TransferQueue with all its rows. Ray goes on.

    Only in the process that called `start`: one that joined calls `plane.close()`.
    """
    plane.close()
    tq.close()


def _init_ray(**where: Any) -> None:
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **where)
    except ConnectionError as error:
        raise Unavailable(f"no Ray at {where.get('address', 'hand')}: {error}") from error


def _configuration(num_storage_units: int, sampler: Any) -> Any:
    return OmegaConf.create(
        {
            # Not polling, a reader that finds too few rows stops the controller for 5 s.
            "controller": {"sampler": sampler, "polling_mode": True},
            "backend": {
                "storage_backend": "SimpleStorage",
                "SimpleStorage": {
                    "total_storage_size": None,
                    "num_data_storage_units": num_storage_units,
                },
            },
        },
        flags={"allow_objects": True},
    )


def _controller() -> Any | None:
    try:
        return ray.get_actor(_ACTOR, namespace=_NAMESPACE)
    except ValueError:
        return None


def _topology() -> Topology:
    controller = _controller()
    assert controller is not None, "init returned"
    conf = ray.get(controller.get_config.remote(), timeout=_ANSWER_TIMEOUT_S)
    backend, sampler = conf.backend.storage_backend, conf.controller.sampler
    store = conf.backend[backend]
    return Topology(
        version=version("transferqueue"),
        backend=backend,
        units=int(store.get("num_data_storage_units", 0)),
        sampler=sampler if isinstance(sampler, str) else _class_name(sampler),
        ssd_offload=bool((store.get("ssd_offload") or {}).get("enabled", False)),
    )


def _class_name(sampler: Any) -> str:
    return sampler.__name__ if isinstance(sampler, type) else type(sampler).__name__

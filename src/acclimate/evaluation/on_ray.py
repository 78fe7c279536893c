"""A sweep on a Ray cluster: every run a task, retried where its worker died, from its last state."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from ..errors import AcclimateError, ConfigError
from .jobs import GLANCE, Cargo, Worker
from .progress import View
from .run import Result

RETRIES = 5  # of a task whose worker or machine died


def on_ray(cargo: Cargo, todo: list[int], view: View, gpus: float | None) -> Iterator[tuple[int, Result]]:
    """Do these runs of the cargo. The store has to be on a disk that every machine of the cluster sees."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed: pip install 'acclimate[ray]'.") from error
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)  # takes RAY_ADDRESS, or starts a cluster here
    try:
        needed = 1.0 if gpus is None and cargo.device == "cuda" else gpus or 0
        task = ray.remote(max_retries=RETRIES, num_cpus=min(cargo.threads, _most_cpus(ray)), num_gpus=needed)(_one)
        shipped = ray.put(cargo)
        pending = {task.remote(shipped, i): i for i in todo}
        while pending:
            ready, _ = ray.wait(list(pending), timeout=GLANCE)
            view.glance(pending.values())
            for reference in ready:
                i = pending.pop(reference)
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, AcclimateError) else error from None
                yield i, result
    finally:
        if started:
            ray.shutdown()


def _one(cargo: Cargo, position: int) -> Result:
    return Worker(cargo)(position)


def _most_cpus(ray: Any) -> float:
    """Of the largest machine: a task that asks for more would wait for ever."""
    return max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=1)

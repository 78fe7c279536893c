"""A grid on a Ray cluster. Every run is a task, which is retried from its last state if its worker dies."""

from __future__ import annotations

import logging
from typing import Any

from ..core.processes import GRACE_SECONDS
from ..errors import AcclimateError, ConfigError
from .jobs import POLL_SECONDS, Finished, Payload, Worker
from .progress import ProgressView
from .run import Result

RETRIES = 5  # of a task whose worker or machine died


def run_on_ray(payload: Payload, todo: list[int], view: ProgressView, gpus: float | None) -> Finished:
    """Make runs of a grid on a Ray cluster. The store must be on a disk that all machines share."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed: pip install 'acclimate[ray]'.") from error
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)  # uses RAY_ADDRESS, or starts a cluster here
    pending: dict[Any, int] = {}
    try:
        needed = 1.0 if gpus is None and payload.device == "cuda" else gpus or 0
        task = ray.remote(max_retries=RETRIES, num_cpus=min(payload.threads, _most_cpus(ray)), num_gpus=needed)(_one)
        shipped = ray.put(payload)
        pending = {task.remote(shipped, i): i for i in todo}
        while pending:
            ready, _ = ray.wait(list(pending), timeout=POLL_SECONDS)
            view.poll(pending.values())
            for reference in ready:
                i = pending.pop(reference)
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, AcclimateError) else error from None
                yield i, result
    finally:
        for reference in pending:  # if this function is left before the end, the runs save their states
            ray.cancel(reference)
        if pending:
            ray.wait(list(pending), num_returns=len(pending), timeout=GRACE_SECONDS)
        if started:
            ray.shutdown()


def _one(payload: Payload, position: int) -> Result:
    return Worker(payload).run(position)


def _most_cpus(ray: Any) -> float:
    """Return the number of CPUs of the largest machine. A task that needs more would wait for ever."""
    return max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=1)

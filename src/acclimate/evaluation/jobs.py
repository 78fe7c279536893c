"""One run of a sweep, in this process or as a worker in another."""

from __future__ import annotations

import multiprocessing
import pickle
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.adapt import adapt
from ..core.adapter import Record
from ..core.method import Method
from ..core.statistics import SourceStatistics
from ..data.datasets import Domain
from ..data.streams import Stream
from ..errors import ConfigError
from .run import Result, run
from .scores import Scores
from .spec import Protocol, Spec
from .store import Store

GLANCE = 0.5  # seconds between two looks at runs in other processes


@typing.runtime_checkable
class Presents(typing.Protocol):
    """A method that is shown something else than the domain itself: each image with a generated one beside it, say."""

    def present(self, domain: Domain) -> Domain:
        """Return the domain as it is shown to the method."""
        ...


@dataclass(frozen=True)
class Job:
    """One run of the grid, with what is needed to do it."""

    spec: Spec
    stream: Stream
    method: type[Method]
    options: dict[str, Any] = field(default_factory=dict)
    source: SourceStatistics | None = None  # for a method that needs them


def carry_on(
    model: nn.Module,
    job: Job,
    store: Store,
    protocol: Protocol,
    on_step: Callable[[Scores, Record], None] = lambda scores, record: None,
) -> Result:
    """Do a run, or the rest of it, and keep its result; if another process has done it meanwhile, that is the result."""
    with store.claim(job.spec) as journal:
        result = store.find(job.spec)
        if result is None:
            adapter = adapt(
                model,
                job.method,
                classes=protocol.classes,
                predict=protocol.predict,
                guard="default" if protocol.guard else None,
                precision=protocol.precision,
                seed=job.spec.seed,
                source_statistics=job.source,
                **_normalisation(job.stream),
                **job.options,
            )
            try:
                result = run(adapter, job.stream, on_step, journal, unknown=protocol.unknown)
            finally:
                adapter.unwrap()
            store.write(job.spec, result)
    return result


def _normalisation(stream: Stream) -> dict[str, Any]:
    """The mean and deviation with which the pictures were normalised, for methods that augment them, if that is known."""
    preprocess = stream.domains[0].identity.get("preprocess") or {}
    return {name: preprocess[name] for name in ("mean", "std") if name in preprocess}


@dataclass(frozen=True)
class Cargo:
    """All that workers need, as bytes: what goes through multiprocessing as tensors would be shared, and adapted by all."""

    content: bytes
    device: str
    threads: int


def pack(model: nn.Module, grid: list[Job], store: Store, protocol: Protocol) -> Cargo:
    device = next(model.parameters()).device
    try:
        content = pickle.dumps((model.cpu(), grid, store, protocol))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"The model, the data or a method cannot be sent to other processes: {error}. Define classes in a module, not "
            "in a function or a notebook, or run with jobs=1."
        ) from error
    finally:
        model.to(device)
    return Cargo(content, device.type, torch.get_num_threads())


class Worker:
    """A process that does runs of one sweep."""

    def __init__(self, cargo: Cargo, number: int = 0) -> None:
        torch.set_num_threads(cargo.threads)
        self._model: nn.Module
        self._model, self._grid, self._store, self._protocol = pickle.loads(cargo.content)
        if cargo.device == "cuda":
            self._model.to(f"cuda:{number % torch.cuda.device_count()}")

    def __call__(self, position: int) -> Result:
        return carry_on(self._model, self._grid[position], self._store, self._protocol)


_worker: Worker | None = None


def begin(cargo: Cargo) -> None:
    """Make this process a worker."""
    global _worker
    identity = multiprocessing.current_process()._identity
    _worker = Worker(cargo, identity[0] - 1 if identity else 0)


def one(position: int) -> Result:
    """One run, in a process that has begun."""
    assert _worker is not None, "begin() makes a process a worker"
    return _worker(position)

"""One run of a grid, in this process or in a worker process."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import typing
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.adapt import adapt
from ..core.adapter import Record
from ..core.method import Method
from ..core.processes import ENDING, end_soon, when_parent_ends
from ..core.registry import method_file, read_file
from ..core.statistics import SourceStatistics
from ..data.domains import Domain
from ..data.streams import Stream
from ..errors import ConfigError
from .run import Result, run
from .scores import Scores
from .spec import Protocol, Spec
from .store import Store

POLL_SECONDS = 0.5  # between two checks of runs in other processes
Finished = Generator[tuple[int, Result], None, None]  # positions in the grid, with the results of the runs


@typing.runtime_checkable
class Presents(typing.Protocol):
    """A method that gets other images than those of the domain itself.

    For example, it may get each image together with a generated one.
    """

    def present(self, domain: Domain) -> Domain:
        """Return the domain that the method gets."""
        ...


@dataclass(frozen=True)
class Job:
    """One run of a grid, with everything that it needs."""

    spec: Spec
    stream: Stream
    method: type[Method]
    options: dict[str, Any] = field(default_factory=dict)
    statistics: SourceStatistics | None = None  # for a method that needs them


def run_job(
    model: nn.Module,
    job: Job,
    store: Store,
    protocol: Protocol,
    on_step: Callable[[Scores, Record], None] = lambda scores, record: None,
) -> Result:
    """Make a run, or the rest of it, store its result, and return it.

    If another process has finished the run meanwhile, return that result.
    """
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
                source_statistics=job.statistics,
                **_normalisation(job.stream),
                **job.options,
            )
            try:
                result = run(adapter, job.stream, on_step, journal, unknown=protocol.unknown)
            finally:
                adapter.unwrap()
            store.write(job.spec, result, journal)
    return result


def _normalisation(stream: Stream) -> dict[str, Any]:
    """Return the mean and std of the normalisation of the images, if they are known."""
    preprocess = stream.domains[0].preprocess
    return {} if preprocess is None else {"mean": preprocess.mean, "std": preprocess.std}


@dataclass(frozen=True)
class Payload:
    """Everything that workers need, as bytes.

    Tensors that are sent by multiprocessing would be shared, so that all workers would adapt the same model.
    """

    content: bytes
    device: str
    threads: int
    method_files: tuple[str, ...]  # Python files that register methods, which are read first


def pack(model: nn.Module, grid: list[Job], store: Store, protocol: Protocol) -> Payload:
    """Return everything that worker processes need for the runs of a grid."""
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
    return Payload(
        content,
        device.type,
        torch.get_num_threads(),
        tuple({str(file) for job in grid if (file := method_file(job.method)) is not None}),
    )


class Worker:
    """A process that makes runs of one grid."""

    def __init__(self, payload: Payload, number: int = 0) -> None:
        torch.set_num_threads(payload.threads)
        for file in payload.method_files:
            read_file(file)
        self._model: nn.Module
        self._model, self._grid, self._store, self._protocol = pickle.loads(payload.content)
        if payload.device == "cuda":
            self._model.to(f"cuda:{number % torch.cuda.device_count()}")

    def run(self, position: int) -> Result:
        """Make one run of the grid."""
        return run_job(self._model, self._grid[position], self._store, self._protocol)


_file: Path | None = None  # with the payload


def start_worker(file: Path, stop: Connection) -> None:
    """Prepare this process as a worker, which ends when its parent ends, or closes its end of the pipe `stop`.

    The worker itself is made for its first run: an error here would end the process without a message.
    """
    global _file
    _file = file

    def end() -> None:
        shutil.rmtree(file.parent, ignore_errors=True)  # the parent, if it was killed, could not do that
        end_soon()

    when_parent_ends(end, stop)


@cache
def _worker() -> Worker:
    assert _file is not None, "start_worker() makes a process a worker"
    identity = multiprocessing.current_process()._identity
    return Worker(pickle.loads(_file.read_bytes()), identity[0] - 1 if identity else 0)


def run_in_worker(position: int) -> Result:
    """Make one run in a process that was prepared as a worker."""
    if ENDING.is_set():
        raise KeyboardInterrupt
    return _worker().run(position)

"""Micro-batches: the parts of a batch, which worker threads pass in parallel on a CPU."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import require_whole

S = TypeVar("S")
T = TypeVar("T")
Rows = tuple[Tensor, ...]  # images, and other tensors with one row per sample

MAX_WORKERS = 4  # each needs memory for one micro-batch and one gradient
TOKENS_AT_ONCE = 2 * 197 * 768  # tokens times width of two images in ViT-B: efficient, and small in memory
GRAPHS_AT_ONCE = 32 * 197 * 768  # the same of 32 images, whose graphs need about 2.5 GB
GPU_SIZE = 32


class MicroBatches:
    """The rule by which a batch is cut into parts, and the workers that pass the parts.

    Args:
        size: Samples in a part. Default: a size that suits the model and the device.
        work: Tokens of one image times the width of the model, which determine the default size on a CPU.
        whole: Whether a batch is never cut, because its samples interact.
        threads: Whether worker threads pass the parts if the images are on a CPU.
    """

    def __init__(self, size: int | None, *, work: int, whole: bool, threads: bool) -> None:
        require_whole(1, optional=True, micro_batch=size)
        self.whole = whole
        self.kept_share = torch.tensor(0.0)  # of the last batch's samples; the adapter sets it after each step
        self._size = size
        self._work = work
        self._threads = threads

    def map(
        self, run: Callable[[Iterable[Rows]], T], batch: Rows, *, selective: bool = False, size: int | None = None
    ) -> list[T]:
        """Apply a function to consecutive parts in each worker, and return the results of the workers.

        `run` may be called in another thread. `groups` explains the other arguments.
        """
        return self.map_groups(run, self.groups(batch, selective=selective, size=size))

    def groups(self, batch: Rows, *, selective: bool = False, size: int | None = None) -> list[list[Rows]]:
        """Return the parts of a batch for each worker.

        Each worker gets a contiguous sequence of parts, so that sums are always computed in the same order.

        Args:
            batch: Tensors with one row per sample, the images first.
            selective: Whether many samples may be rejected. If so, parts are smaller while many are.
            size: Samples in a part, unless the user chose a size.
        """
        threads = torch.get_num_threads()
        workers = min(threads, MAX_WORKERS) if batch[0].device.type == "cpu" and self._threads else 1
        part = self._part_size(batch[0], workers, selective, size)
        parts = list(zip(*(rows.split(part) for rows in batch)))
        workers = min(workers, len(parts))
        bounds = [round(i * len(parts) / workers) for i in range(workers + 1)]
        return [parts[a:b] for a, b in zip(bounds, bounds[1:])]

    def map_groups(self, run: Callable[[Iterable[S]], T], groups: Sequence[Sequence[S]]) -> list[T]:
        """Apply a function to each group of consecutive parts, which may be in another thread, and return the results."""
        if len(groups) == 1:
            return [run(groups[0])]
        stop = threading.Event()
        pool = _pool(torch.get_num_threads())
        tasks = [pool.submit(run, _until(stop, group)) for group in groups]
        try:
            return [task.result() for task in tasks]
        except BaseException:  # an error of a part, or an interrupt here: no worker may still use the model afterwards
            stop.set()
            wait(tasks)
            raise

    def _part_size(self, images: Tensor, workers: int, selective: bool, size: int | None) -> int:
        if self.whole:
            return len(images)
        if self._size is not None:
            return self._size
        if size is None:
            views = images.shape[1] if images.ndim == 5 else 1
            if images.device.type != "cpu":
                return max(1, GPU_SIZE // views)
            size = max(2, round(TOKENS_AT_ONCE / self._work) // views)
            if selective and float(self.kept_share) < 0.75:
                size //= 2
        return min(size, math.ceil(len(images) / workers))

    @property
    def graphs_at_once(self) -> int:
        """The number of samples whose graphs may be kept while the rest of a batch is passed."""
        return GRAPHS_AT_ONCE // self._work

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Let every batch be one part inside the block."""
        size, self._size = self._size, sys.maxsize
        try:
            yield
        finally:
            self._size = size


def _until(stop: threading.Event, parts: Sequence[S]) -> Iterator[S]:
    """Yield the parts, and end early if the event is set. The result of that worker is then not used."""
    for part in parts:
        if stop.is_set():
            return
        yield part


def compute_on(cores: int) -> None:
    """Let the calling thread compute on this number of cores."""
    torch.set_num_threads(cores)
    torch.get_num_threads()  # a thread reads the default of the process when it first uses torch: let it do so now


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the worker threads, which share the cores evenly and serve all adapters of the process."""
    workers = min(threads, MAX_WORKERS)
    pool = ThreadPoolExecutor(workers, "acclimate", initializer=compute_on, initargs=(threads // workers,))
    everybody = threading.Barrier(workers)
    for started in [pool.submit(everybody.wait) for _ in range(workers)]:
        started.result()
    torch.set_num_threads(threads)  # otherwise the setting of a worker would be the default of later threads
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork

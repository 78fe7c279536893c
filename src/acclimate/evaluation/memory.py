"""Measurement of peak memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Peak:
    """The peak memory of a block of code."""

    mib: float | None = None
    """Memory in MiB, in addition to what was in use before; None if it cannot be measured."""


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of the block: that of torch on a GPU, or of the process on a CPU (Linux only).

    On a CPU the measurement is coarse. Free memory that the process still holds is released first. If not all of it can be
    released, the block seems to need less.
    """
    peak = Peak()
    before = _start(device)
    yield peak
    after = _now(device, "VmHWM")
    if before is not None and after is not None:
        peak.mib = max(0.0, after - before)


def _start(device: torch.device) -> float | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present size
    except (OSError, AttributeError):  # not on Linux, or without glibc
        return None
    return _now(device, "VmRSS")


def _now(device: torch.device, field: str) -> float | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), None)

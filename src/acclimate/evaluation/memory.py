"""Peak memory of a piece of work."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Peak:
    mib: float | None = None
    """What the work needed beyond what was there before; None where the system does not tell."""


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the work inside: on a GPU what torch allocates, on a CPU the process's resident memory (Linux alone).

    On a CPU this is coarse: what freed memory the process still holds before the work is given back first, but not always
    all of it can be, and then the work seems to need less.
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
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present size
    except (OSError, AttributeError):  # not Linux, or not with glibc
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

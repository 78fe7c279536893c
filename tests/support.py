"""What tests of several rooms share, beside the fixtures.

Two ways to the same result add up in different orders, and so round differently. How much that is in float32 depends on the
processor's instruction set and on the number of threads. That two ways are equal is therefore shown in float64, by
`assert_exact`. Where it has to be shown in float32, `rounding` measures how far apart two results may be.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import acclimate
from acclimate.core.registry import find_method
from acclimate.testing.check import tiny_batches, tiny_model

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
SHARED = TESTS.parents[1] / "shared"  # beside the project; not part of it


EXACT = 1e-9  # the rounding errors of a short run in float64 are around 1e-13
SINGLE = torch.finfo(torch.float32).eps
FACTOR = 10  # as that of the recordings' tolerances


def double_model(family: str = "timm") -> nn.Module:
    """Return the tiny ViT in float64."""
    return tiny_model(family).double()


def double_batches(*args: int, **options: int) -> list[Tensor]:
    """Return the tiny batches in float64."""
    return [images.double() for images in tiny_batches(*args, **options)]


def assert_exact(ours: object, expected: object, what: str = "result") -> None:
    """Require two results of float64 runs, tensors or numbers, to be equal but for their rounding errors; NaN equals NaN.

    What a method keeps in float32 has been rounded once more: it may be the neighbour of the expected number.
    """
    ours, expected = (torch.as_tensor(x, dtype=None if hasattr(x, "dtype") else torch.float64) for x in (ours, expected))
    rtol = SINGLE if torch.float32 in (ours.dtype, expected.dtype) else EXACT
    pair = ours.detach().double(), expected.detach().double()
    torch.testing.assert_close(*pair, atol=EXACT, rtol=rtol, equal_nan=True, msg=lambda text: f"{what}: {text}")


def rounding(single: list[Tensor], double: list[Tensor]) -> float:
    """Return how far apart two float32 runs may be, which differ in the order of their sums.

    Args:
        single: What one of them gave.
        double: What the same run gave in float64.

    Returns:
        Ten times the largest distance between the two, and at least ten times the distance between neighbours in float32.
    """
    distances = [float((a.double() - b).abs().max()) for a, b in zip(single, double, strict=True)]
    scale = max(float(b.abs().max()) for b in double)
    return FACTOR * max(*distances, SINGLE * scale)


def methods_of(*without: str) -> list[str]:
    """Return the methods that need none of these parts of a model."""
    return [name for name in acclimate.list_methods() if not {*without} & {*find_method(name).info.requires}]


def vit_methods() -> list[str]:
    """Return the methods that suit a ViT, which has no BatchNorm."""
    return methods_of("batch norms")


def child_environment() -> dict[str, str]:
    """Return the environment of a process that imports what this one can import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def shared_golden() -> list[Path]:
    """Return the recordings beside the project, or in the folder that ACCLIMATE_GOLDEN names; they are not part of it."""
    folder = Path(os.environ.get("ACCLIMATE_GOLDEN", SHARED / "golden"))
    return sorted(folder.glob("*.safetensors"))


def trials(count: int) -> int:
    """Return a number of random trials, which the environment variable ACCLIMATE_FUZZ multiplies."""
    return count * int(os.environ.get("ACCLIMATE_FUZZ", "1"))

"""Checks of what a file holds, before any of it is used.

The digest of a file shows that the file is whole, but not who wrote it. Names, shapes, types and values are therefore
checked as if somebody had made them up. Every failure is a `StateError`, and comes before anything has changed.
"""

from __future__ import annotations

import inspect
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import StateError, shorten_list

Range = tuple[float, float]  # the smallest and the largest value
Blanks = tuple[bool, bool, bool]  # whether there is NaN, infinity, negative infinity
ANY: Range = (-math.inf, math.inf)
COUNT: Range = (0, 2**53)  # of samples or steps
REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PLAIN = {"bool": (bool,), "str": (str,), "int": (int, float), "float": (int, float)}  # types in JSON, by annotation
TWISTER = struct.Struct("=8xi4xQ")  # of a generator's state: numbers left before it is renewed, and index of the next one
TWISTER_BYTES, TWISTER_NUMBERS = 5056, 624


def require_parts(path: str | PathLike[str], header: Mapping[str, Any], **kinds: type) -> None:
    """Refuse a header that lacks one of these parts, or in which it has another type."""
    for name, kind in kinds.items():
        if not isinstance(header.get(name), kind):
            raise StateError(
                f"{path} is not a whole file of acclimate's: {name!r} in its header is missing, or no {kind.__name__}."
            )


def require_model_parts(path: str | PathLike[str], model: Mapping[str, Any]) -> None:
    """Refuse the description of a model that is not made of its class and its digests."""
    require_parts(path, model, **{"class": str, "architecture": str, "weights": str})


def require_option_types(
    path: str | PathLike[str], given: Mapping[str, Any], options: Mapping[str, inspect.Parameter]
) -> None:
    """Refuse options whose type is not that of their annotation, if the annotation is one plain type."""
    for name, value in given.items():
        if name in options:
            annotation = options[name].annotation
            kinds = PLAIN.get(getattr(annotation, "__name__", annotation))
            if kinds is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
                raise StateError(f"{path} was written with {name}={value!r}, which is not a value of the type {annotation}.")


# ---- tensors ------------------------------------------------------------------------------------------------------------


def fitted(
    what: str,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    blanks: Mapping[str, Blanks] | None = None,
    ranges: Mapping[str, Range] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors in the types of those that are expected, or refuse them.

    Args:
        what: The beginning of the error message, such as "FILE does not fit this adapter".
        tensors: The tensors by name.
        expected: Tensors with the names, shapes and types that there have to be. Real numbers of one precision may replace
            those of another one.
        blanks: The values that are valid although they are not finite, because they mean "no value yet". Default: those that
            the expected tensors have.
        ranges: The smallest and the largest valid value of some of the tensors.
    """
    blanks, ranges = blanks or {}, ranges or {}
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in expected]
    for name, like in expected.items():
        if name in tensors:
            problem = _misfit(tensors[name], like)
            problem = problem or _invalid(tensors[name].to(like.dtype), like, blanks.get(name), ranges.get(name, ANY))
            problems += [] if problem is None else [f"{name} {problem}"]
    if problems:
        raise StateError(f"{what}: {shorten_list((text[:200] for text in problems), '; ', 4)}.")
    return {name: tensors[name].to(like.dtype) for name, like in expected.items()}


def _misfit(tensor: Tensor, like: Tensor) -> str | None:
    if tensor.shape != like.shape:
        return f"has the shape {tuple(tensor.shape)} instead of {tuple(like.shape)}"
    if tensor.dtype != like.dtype and not (tensor.dtype in REAL and like.dtype in REAL):
        return f"is of the type {tensor.dtype} instead of {like.dtype}"
    return None


def blanks_of(tensor: Tensor) -> Blanks:
    """Return whether a tensor has NaN, infinity, and negative infinity."""
    if tensor.dtype not in REAL or tensor.isfinite().all():
        return False, False, False
    return bool(tensor.isnan().any()), bool(tensor.isposinf().any()), bool(tensor.isneginf().any())


def _invalid(tensor: Tensor, like: Tensor, blanks: Blanks | None, limits: Range) -> str | None:
    if tensor.dtype is torch.bool:
        return "has values that are neither true nor false" if (tensor.view(torch.uint8) > 1).any() else None
    if any(found := blanks_of(tensor)) and any(has and not may for has, may in zip(found, blanks or blanks_of(like))):
        return "is not finite"
    low, high = limits
    if limits != ANY and bool(((tensor < low) | (tensor > high)).any()):
        return f"has values outside of {low:.6g} to {high:.6g}"
    return None


def require_real(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not finite, or not of a real or whole type, whatever their names and shapes are."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (*REAL, torch.int64):
            raise StateError(f"{what}: {name[:100]} is of the type {tensor.dtype}.")
        if not tensor.isfinite().all():
            raise StateError(f"{what}: {name[:100]} is not finite.")


def fitted_optimizer(
    what: str, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None, parameters: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the state of an optimizer, by names such as "optimizer/0/exp_avg", or refuse it.

    A parameter has all entries that the optimizer gives it in a step, or none of them. Steps with other parameters in the
    place of these show which entries there are. They use up the optimizer.
    """
    groups = {} if optimizer is None else {id(p): group for group in optimizer.param_groups for p in group["params"]}
    touched = {name.split("/")[1] for name in tensors if name.count("/")}
    expected: dict[str, Tensor] = {}
    ranges: dict[str, Range] = {}
    known: dict[Any, dict[str, tuple[Tensor, Range]]] = {}
    for i, p in enumerate(parameters):
        if optimizer is None or id(p) not in groups or str(i) not in touched:
            continue
        kind = (id(groups[id(p)]), p.shape, p.dtype, p.device)
        if kind not in known:
            known[kind] = _entries(optimizer, groups[id(p)], p)
        for key, (like, limits) in known[kind].items():
            name = f"optimizer/{i}/{key}"
            expected[name], ranges[name] = like, limits
    return fitted(what, tensors, expected, ranges=ranges)


def _entries(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor) -> dict[str, tuple[Tensor, Range]]:
    """Return the entries that an optimizer keeps for a parameter of this shape, and their ranges.

    An entry that is not negative after a step in either direction is a square or a count, and never negative.
    """
    made = []
    for direction in (1.0, -1.0):
        trial = torch.zeros_like(like).detach()
        trial.grad = torch.full_like(trial, direction)
        optimizer.param_groups, optimizer.state = [{**group, "params": [trial]}], defaultdict(dict)
        optimizer.step()
        state = optimizer.state[trial]
        made.append({key: torch.as_tensor(value) for key, value in state.items() if value is not None})
    one, other = made
    signed = {key for key in one if bool((one[key] < 0).any()) or bool((other[key] < 0).any())}
    return {key: (value, (-math.inf if key in signed else 0.0, math.inf)) for key, value in one.items()}


def require_generator_state(what: str, state: Tensor) -> None:
    """Refuse bytes that are not a state of torch's random generator, some of which torch itself would read beyond."""
    state = state.cpu()
    if len(state) == TWISTER_BYTES:
        left, index = TWISTER.unpack_from(state.numpy().tobytes())
        if left < 1 or left + index > TWISTER_NUMBERS + 1:
            raise StateError(f"{what}: rng is not the state of a random generator.")
    trial = torch.Generator()
    try:
        trial.set_state(state)
        same = torch.equal(trial.get_state(), state)
        drawn = torch.randn(3, generator=trial, dtype=torch.float64)
    except RuntimeError as error:
        raise StateError(f"{what}: rng is not the state of a random generator ({error}).") from error
    if not same or not bool((drawn.abs() < 100).all()):  # it keeps one number for the next draw
        raise StateError(f"{what}: rng is not the state of a random generator.")


# ---- memory -------------------------------------------------------------------------------------------------------------


class AllocationLimit(TorchDispatchMode):
    """Refuse to create a very large tensor inside the block.

    The sizes of what a method creates come from options in a file. An honest file is at least as large as what it asks for.

    Args:
        what: The beginning of the error message.
        known: Tensors of the file and of the model. A new tensor may have four times the elements of all of them together,
            and 2^20 more.
    """

    def __init__(self, what: str, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.what = what
        self.most = 2**20 + 4 * sum(tensor.numel() for tensor in known)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, unless its argument `size` is too large."""
        for argument, value in zip(func._schema.arguments, args):
            if argument.name == "size" and math.prod(value) > self.most:
                raise StateError(f"{self.what}: it asks for a tensor of the shape {tuple(value)}, which is far too large.")
        return func(*args, **(kwargs or {}))

"""The parameters that adapt: their source values, their gradient, their optimizer, and other values for a while."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError


class AdaptedParameters:
    """The parameters that a method adapts.

    Args:
        named: The parameters by name. A name begins with "model/" or "method/".
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self.named = dict(named)
        self.tensors: list[Tensor] = list(named.values())
        self.optimizer: torch.optim.Optimizer | None = None
        self.set_source([p.detach().clone() for p in self.tensors])
        self._gradient_norm = 0.0

    def set_source(self, values: list[Tensor]) -> None:
        """Take these tensors, without a copy, as the source values."""
        self.source = values
        self._source_norm = float(global_norm(values)) if values else 0.0

    # ---- gradient and update ----------------------------------------------------------------------------------

    def set_gradient(self, gradient: Sequence[Tensor] | None) -> None:
        """Set the gradient of all parameters, or remove it.

        Raises:
            NonFiniteError: if the gradient is not finite. The parameters then have no gradient.
        """
        for p in self.tensors:
            p.grad = None
        if gradient is None:
            return
        self._gradient_norm = float(global_norm(gradient))
        if not math.isfinite(self._gradient_norm):
            raise NonFiniteError("the gradient of this batch is not finite; no update was applied.")
        for p, values in zip(self.tensors, gradient):
            p.grad = values

    def amend_gradient(self, *, times: float = 1.0, plus: Sequence[Tensor] | None = None) -> None:
        """Multiply the gradient, and add a term for each parameter. The term has to be the same on all ranks."""
        gradients = [p.grad for p in self.tensors if p.grad is not None]
        torch._foreach_mul_(gradients, times)
        if plus is not None:
            torch._foreach_add_(gradients, list(plus))
        self._gradient_norm = float(global_norm(gradients))
        if not math.isfinite(self._gradient_norm):
            raise NonFiniteError("the amended gradient of this batch is not finite; no update was applied.")

    def zero_gradient(self) -> None:
        """Set a gradient of zeros. An optimizer step then still moves the parameters by their momentum."""
        for p in self.tensors:
            p.grad = torch.zeros_like(p)

    def gradient_norm(self) -> float:
        """Return the length of the gradient over all parameters."""
        return float(global_norm([p.grad for p in self.tensors if p.grad is not None]))

    def update(self) -> None:
        """Take one optimizer step along the gradient, and remove the gradient."""
        assert self.optimizer is not None, "the adapter builds the optimizer before a method's first step"
        self.optimizer.step()
        self.optimizer.zero_grad()

    def restore(self, *, keep_momentum: bool = False) -> None:
        """Return to the source values, and forget the optimizer's state unless it is to be kept."""
        self._assign(self.source)
        if not keep_momentum and self.optimizer is not None:
            self.optimizer.state.clear()

    def drift(self) -> float:
        """Return the distance from the source values, relative to their length, which counts as 1 at least."""
        with torch.no_grad():
            moved = [torch.dist(p, source) for p, source in zip(self.tensors, self.source)]
        return float(torch.stack(moved).norm()) / max(self._source_norm, 1.0) if moved else 0.0

    # ---- other values for a while -----------------------------------------------------------------------------

    @contextmanager
    def perturbed(self, rho: float) -> Iterator[None]:
        """Inside, the parameters are at distance `rho` along the gradient."""
        with self._kept():
            with torch.no_grad():
                gradients = [p.grad for p in self.tensors if p.grad is not None]
                torch._foreach_add_(self.tensors, gradients, alpha=rho / (self._gradient_norm + 1e-12))
            yield

    @contextmanager
    def using(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the parameters have these values, for passes alone. The storages are exchanged, and nothing is copied."""
        self._exchange(values)
        try:
            yield
        finally:
            self._exchange(values)

    @contextmanager
    def at_source(self) -> Iterator[None]:
        """Inside, the parameters have their source values."""
        with self._kept():
            self.restore(keep_momentum=True)
            yield

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Afterwards, the parameters have the values of before, bit for bit."""
        before = [p.detach().clone() for p in self.tensors]
        try:
            yield
        finally:
            self._assign(before)

    def _exchange(self, values: Sequence[Tensor]) -> None:
        for p, value in zip(self.tensors, values):
            p.data, value.data = value.data, p.data

    @torch.no_grad()
    def _assign(self, values: list[Tensor]) -> None:
        if values:  # a method may adapt no parameter
            torch._foreach_copy_(self.tensors, values)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean length of all tensors laid end to end."""
    return torch.stack(torch._foreach_norm(list(tensors))).norm()

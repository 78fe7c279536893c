"""The parameters that adapt, with their source values, their gradients and their optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError, StateError, shorten_list


class AdaptedParameters:
    """The parameters that a method adapts.

    Args:
        named: The parameters by name. A name begins with "model/" or "method/".
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self.named = dict(named)
        self.tensors: list[Tensor] = list(named.values())
        self._own = [p.data for p in self.tensors]  # the memory of the parameters themselves
        self._others: Sequence[Tensor] | None = None  # the tensors whose memory the parameters use at the moment
        self.optimizer: torch.optim.Optimizer | None = None
        self.set_source([p.detach().clone() for p in self.tensors])
        self._gradient_norm = 0.0

    def set_source(self, values: list[Tensor]) -> None:
        """Use these tensors, without copying them, as the source values."""
        self.source = values
        self._source_norm = float(global_norm(values)) if values else 0.0

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert everything but the parameters, which `nn.Module.to` and the like have converted already."""
        self._own = [p.data for p in self.tensors]
        self.source = [fn(tensor) for tensor in self.source]
        for values in self.optimizer.state.values() if self.optimizer is not None else ():
            values.update({k: fn(v) for k, v in values.items() if isinstance(v, Tensor) and v.ndim})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_own", "_others")}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._own, self._others = [p.data for p in self.tensors], None

    # ---- gradient and update ----------------------------------------------------------------------------------

    def set_gradient(self, gradient: Sequence[Tensor] | None) -> None:
        """Set the gradients of all parameters, or remove them if `gradient` is None.

        Raises:
            NonFiniteError: If the gradient is not finite. The parameters then have no gradient.
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
        """Multiply the gradient by `times`, and add a term for each parameter.

        The term must be the same on all ranks.
        """
        gradients = [p.grad for p in self.tensors if p.grad is not None]
        torch._foreach_mul_(gradients, times)
        if plus is not None:
            torch._foreach_add_(gradients, list(plus))
        self._gradient_norm = float(global_norm(gradients))
        if not math.isfinite(self._gradient_norm):
            raise NonFiniteError("the amended gradient of this batch is not finite; no update was applied.")

    def zero_gradient(self) -> None:
        """Set all gradients to zero.

        An optimizer step with a gradient of zeros still moves the parameters by their momentum.
        """
        for p in self.tensors:
            p.grad = torch.zeros_like(p)

    def gradient_norm(self) -> float:
        """Return the Euclidean norm of the gradient over all parameters."""
        return float(global_norm([p.grad for p in self.tensors if p.grad is not None]))

    def update(self) -> None:
        """Make one optimizer step, and remove the gradient."""
        assert self.optimizer is not None, "the adapter builds the optimizer before a method's first step"
        self.optimizer.step()
        self.optimizer.zero_grad()

    def require_gradients(self) -> None:
        """Raise a `StateError` if the gradient of a parameter was disabled after the model was wrapped."""
        frozen = [name for name, p in self.named.items() if not p.requires_grad]
        if frozen:
            raise StateError(
                f"{shorten_list(frozen, most=2)} cannot learn, because requires_grad is False: set it to True again. "
                "To predict without adapting, use `with adapter.frozen():`."
            )

    def require_finite(self) -> None:
        """Raise a `NonFiniteError` if the distance from the source, or the state of the optimizer, is not finite."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        groups: dict[torch.device, list[Tensor]] = {}
        for value in (value for state in states for value in state.values() if isinstance(value, Tensor)):
            if value.is_floating_point() and value.numel():
                groups.setdefault(value.device, []).append(value)
        largest = [torch.stack([n.float() for n in torch._foreach_norm(group, ord=math.inf)]) for group in groups.values()]
        if not math.isfinite(self.drift()) or not all(bool(each.isfinite().all()) for each in largest):
            raise NonFiniteError("the update made a parameter or the state of the optimizer infinite; it was undone.")

    def restore(self, *, keep_momentum: bool = False) -> None:
        """Set the source values again, and clear the optimizer's state unless `keep_momentum` is set."""
        self._assign(self.source)
        if not keep_momentum and self.optimizer is not None:
            self.optimizer.state.clear()

    @torch.no_grad()
    def approach_source(self, share: float) -> None:
        """Move the parameters a share of their way to the source values."""
        torch._foreach_lerp_(self.tensors, self.source, share)

    @torch.no_grad()
    def shorten_step(self, before: Mapping[str, Tensor], share: float) -> None:
        """Keep only a share of the step from the values that the parameters had before."""
        torch._foreach_lerp_(self.tensors, [before[name] for name in self.named], 1 - share)

    def drift(self) -> float:
        """Return the distance from the source values, divided by the norm of the source values.

        A norm below 1 counts as 1.
        """
        with torch.no_grad():
            moved = [torch.dist(p, source) for p, source in zip(self.tensors, self.source)]
        return float(torch.stack(moved).norm()) / max(self._source_norm, 1.0) if moved else 0.0

    # ---- temporary values -------------------------------------------------------------------------------------

    @contextmanager
    def perturbed(self, rho: float) -> Iterator[None]:
        """Keep the parameters moved by a distance of `rho` along the gradient inside the block."""
        with self._kept():
            with torch.no_grad():
                gradients = [p.grad for p in self.tensors if p.grad is not None]
                torch._foreach_add_(self.tensors, gradients, alpha=rho / (self._gradient_norm + 1e-12))
            yield

    @contextmanager
    def using(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Keep these values in the parameters inside the block, for passes only.

        The parameters use the memory of these tensors, so that nothing is copied or moved. The block must not change them.
        """
        before = self._others
        try:
            self._point_to(values)
            yield
        finally:
            self._point_to(before)

    def at_source(self) -> AbstractContextManager[None]:
        """Keep the source values in the parameters inside the block, for passes only."""
        return self.using(self.source)

    def use_own(self) -> None:
        """Let the parameters use their own memory again, if an interrupted block left them with that of others."""
        if self._others is not None:
            self._point_to(None)

    def _point_to(self, values: Sequence[Tensor] | None) -> None:
        """Let the parameters use the memory of these tensors, or their own memory."""
        if values is not None:
            self._others = values  # first, so that `use_own` knows of an exchange that is interrupted
        for p, value in zip(self.tensors, self._own if values is None else values):
            p.data = value.data
        self._others = values

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Let the block change the parameters, and restore their values bit for bit afterwards."""
        before = [p.detach().clone() for p in self.tensors]
        try:
            yield
        finally:
            self._assign(before)

    @torch.no_grad()
    def _assign(self, values: list[Tensor]) -> None:
        if values:  # a method may adapt no parameter
            torch._foreach_copy_(self.tensors, values)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors taken as one vector."""
    return torch.stack(torch._foreach_norm(list(tensors))).norm()

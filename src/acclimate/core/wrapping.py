"""A wrapped model, with what is needed to give it back to the caller as it was."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import ModelError, StateError
from ..models.families import bare, view_of
from ..models.view import require_supported

_WRAPPED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # adapters, and the models that they wrap


def require_unwrapped(model: nn.Module, advice: str) -> None:
    """Refuse an adapter, and a model that an adapter has wrapped already."""
    if isinstance(model, nn.Module) and (model in _WRAPPED or bare(model) in _WRAPPED):
        raise ModelError(f"This model is wrapped already: {advice}")


def _refuse_weights(*_: Any) -> None:
    """Refuse to load weights into a wrapped model, whose modules have other names, and whose weights adapt."""
    raise StateError("This model is wrapped: call unwrap() on its adapter, load the weights, and wrap the model again.")


class WrappedModel:
    """A model that is being adapted, with its original flags and the original names of its weights.

    Args:
        model: The model. It is put into evaluation mode.
    """

    def __init__(self, model: nn.Module) -> None:
        require_unwrapped(model, "call unwrap() on its adapter first.")
        self.given = model  # perhaps compiled, or in a DataParallel
        self.view = view_of(model)
        self.model = model = self.view.model
        real = not any(p.is_meta for p in model.parameters())
        require_supported(
            model, real, "its weights are on the meta device. Load them first (model.to_empty, load_state_dict)"
        )
        self.weights = model.state_dict(keep_vars=True)
        self._training = {module: module.training for module in model.modules()}
        self._required_grad = {p: p.requires_grad for p in model.parameters()}
        self._refusal: RemovableHandle | None = None
        model.eval()

    def names(self, method: nn.Module) -> dict[int, str]:
        """Return the names of the model's and the method's parameters, by the `id` of the parameter."""
        names = {id(p): f"model/{name}" for name, p in self.weights.items()}
        return names | {id(p): f"method/{name}" for name, p in method.named_parameters()}

    def learn_only(self, adapted: Iterable[nn.Parameter | torch.Tensor], method: nn.Module) -> None:
        """Enable gradients for the adapted parameters, and disable them for all others."""
        self.model.requires_grad_(False)
        method.eval().requires_grad_(False)
        for p in adapted:
            p.requires_grad_(True)

    def claim(self, adapter: nn.Module) -> None:
        """Register that the model belongs to an adapter, so that neither can be wrapped again."""
        _WRAPPED.update((self.model, adapter))
        # public since torch 2.5, under the name without the underscore
        self._refusal = self.model._register_load_state_dict_pre_hook(_refuse_weights)

    @contextmanager
    def converting(self, fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let the block convert the model by `fn`, and convert what the model does not contain at the moment."""
        owners = {id(b): (module, key) for module in self.model.modules() for key, b in module._buffers.items()}
        buffers = {name: owners[id(tensor)] for name, tensor in self.weights.items() if id(tensor) in owners}
        yield
        self.weights |= {name: module._buffers[key] for name, (module, key) in buffers.items()}
        self.view.convert_own_head(fn)

    def give_back(self) -> None:
        """Undo the surgery and restore all flags. The values of the parameters are not changed."""
        if self._refusal is not None:
            self._refusal.remove()
        self.view.restore()
        for module, training in self._training.items():
            module.training = training
        for p, required in self._required_grad.items():
            p.requires_grad_(required)
        _WRAPPED.discard(self.model)

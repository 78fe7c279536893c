"""Everything that adaptation may change, as one thing: captured, checked, and applied again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..errors import InputError, StateError
from .engine import Engine
from .guard import Guard
from .method import Method


class Snapshot(Mapping[str, Tensor]):
    """A copy of all that an adapter may change. Made by `Adapter.snapshot`, for `Adapter.rollback`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        size = sum(t.numel() * t.element_size() for t in self.values())
        return f"Snapshot(step {int(self['steps'])}, {len(self)} tensors, {size / 2**20:.1f} MiB)"


class State:
    """The state of an adapter: adapted parameters, the method's and the guard's buffers, optimizer, counters, generator.

    Args:
        engine: Of the adapter.
        method: Of the adapter.
        guard: Of the adapter, if it has one.
    """

    def __init__(self, engine: Engine, method: Method, guard: Guard | None) -> None:
        self._engine, self._method, self._guard = engine, method, guard
        self.steps = torch.tensor(0)
        self.batch_size = engine.batch_size  # one tensor, which methods can read there
        self.initial = self.capture()
        engine.adapted.set_source([self.initial[name] for name in engine.adapted.named])  # one copy serves both

    def live(self) -> dict[str, Tensor]:
        """Return every tensor that a step may change, except the optimizer's, as views of the real ones."""
        live = {name: p.detach() for name, p in self._engine.adapted.named.items()}
        live |= {f"method/{name}": buffer for name, buffer in self._method.named_buffers()}
        if self._guard is not None:
            live |= {f"guard/{name}": tensor for name, tensor in self._guard.state_dict().items()}
        live |= {"loss_scale": self._engine.loss_scale, "kept_share": self._engine.micro_batches.kept_share}
        return live | {"steps": self.steps, "batch_size": self.batch_size}

    def constants(self) -> dict[str, Tensor]:
        """Return what the method made for itself and never changes: needed to go on elsewhere, but not to go back."""
        made = {f"method/{name}": p.detach() for name, p in self._method.named_parameters()}
        return {name: p for name, p in made.items() if name not in self._engine.adapted.named}

    def beginning(self) -> dict[str, Tensor]:
        """Return the initial values of what the method made for itself, where these come from source statistics."""
        if not self._method.info.needs:
            return {}
        return {name: tensor for name, tensor in self.initial.items() if name.startswith("method/")}

    def capture(self) -> Snapshot:
        """Copy the state."""
        tensors = {name: tensor.clone() for name, tensor in self.live().items()}
        adapted = self._engine.adapted
        if adapted.optimizer is not None:
            for i, p in enumerate(adapted.tensors):
                for key, value in adapted.optimizer.state.get(p, {}).items():
                    if value is not None:
                        tensors[f"optimizer/{i}/{key}"] = torch.as_tensor(value).clone()
        tensors["rng"] = self._engine.rng.get_state()
        return Snapshot(tensors)

    def apply(self, snapshot: Mapping[str, Tensor]) -> None:
        """Return to a captured state."""
        with torch.no_grad():
            for name, tensor in self.live().items():
                tensor.copy_(snapshot[name])
        self.start(int(self.batch_size))
        adapted = self._engine.adapted
        for name, value in snapshot.items():
            kind, *where = name.split("/")
            if kind == "optimizer" and adapted.optimizer is not None:
                p = adapted.tensors[int(where[0])]
                # a step count stays where torch keeps it; what has a parameter's shape goes to its device
                adapted.optimizer.state[p][where[1]] = value.to(p.device, copy=True) if value.ndim else value.clone()
        self._engine.rng.set_state(snapshot["rng"].cpu())

    def start(self, batch_size: int) -> None:
        """Build the optimizer for a stream of batches of this size; 0 means that there is no stream yet."""
        self.batch_size.fill_(batch_size)
        self._engine.adapted.optimizer = self._method.optimizer(batch_size) if batch_size else None

    def follow(self, batch_size: int) -> None:
        """Take over the learning rates for another batch size, and keep the optimizer's state.

        The authors' code fixes the learning rates in advance, and so does `reference=True` with those of the first batch. A
        method that refuses batches of this size keeps the learning rates that it has.
        """
        optimizer = self._engine.adapted.optimizer
        if batch_size == int(self.batch_size) or optimizer is None or getattr(self._method, "reference", False):
            return
        try:
            other = self._method.optimizer(batch_size)
        except InputError:
            return
        if other is not None:
            for mine, theirs in zip(optimizer.param_groups, other.param_groups):
                mine["lr"] = theirs["lr"]
        self.batch_size.fill_(batch_size)

    def require_fitting(self, tensors: Mapping[str, Tensor], what: str, expected: Mapping[str, Tensor]) -> None:
        """Refuse tensors that cannot be applied, before anything is changed."""
        shapes = {name: tuple(t.shape) for name, t in expected.items()}
        if "steps" in expected:
            shapes["rng"] = tuple(self._engine.rng.get_state().shape)
        for i, p in enumerate(self._engine.adapted.tensors):
            momenta = [name for name in tensors if name.startswith(f"optimizer/{i}/") and tensors[name].ndim]
            shapes |= dict.fromkeys(momenta, tuple(p.shape))
        known = {*shapes, *(name for name, t in tensors.items() if name.startswith("optimizer/") and not t.ndim)}
        wrong = [name for name, shape in shapes.items() if name not in tensors or tuple(tensors[name].shape) != shape]
        wrong += [name for name in tensors if name not in known]
        if wrong:
            raise StateError(
                f"{what} does not fit this adapter: {', '.join(wrong[:4])} missing, unknown or of another shape."
            )

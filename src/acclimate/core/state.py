"""The state of an adapter, which can be captured, checked and applied as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..errors import InputError, StateError
from .engine import MOST_LOSS_SCALE, Engine
from .guard import Guard
from .method import Method
from .statecheck import COUNT, Range, blanks_of, fitted, fitted_optimizer, require_generator_state


class Snapshot(Mapping[str, Tensor]):
    """A copy of the state of an adapter, which `Adapter.snapshot` returns and `Adapter.rollback` takes."""

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
    """The state of an adapter: adapted parameters, buffers of method, guard and recentring, optimizer, counters, generator.

    Args:
        engine: The engine of the adapter.
        method: The method of the adapter.
        guard: The guard of the adapter, if it has one.
    """

    def __init__(self, engine: Engine, method: Method, guard: Guard | None) -> None:
        self._engine, self._method, self._guard = engine, method, guard
        self.steps = torch.tensor(0)
        self.batch_size = engine.batch_size  # the same tensor, which methods read from the engine
        self.initial = self.capture()
        self._blanks = {name: blanks_of(tensor) for name, tensor in self.initial.items()}  # before a file is loaded
        engine.adapted.set_source([self.initial[name] for name in engine.adapted.named])  # shared, to save one copy

    def live(self) -> dict[str, Tensor]:
        """Return every tensor that a step may change, except those of the optimizer. They are not copied."""
        live = {name: p.detach() for name, p in self._engine.adapted.named.items()}
        live |= {f"method/{name}": buffer for name, buffer in self._method.named_buffers()}
        if self._guard is not None:
            live |= {f"guard/{name}": tensor for name, tensor in self._guard.state_dict().items()}
        if self._engine.recentring is not None:
            live |= {f"recentre/{name}": buffer for name, buffer in self._engine.recentring.named_buffers()}
        live |= {"loss_scale": self._engine.loss_scale, "kept_share": self._engine.micro_batches.kept_share}
        return live | {"steps": self.steps, "batch_size": self.batch_size}

    def constants(self) -> dict[str, Tensor]:
        """Return the method's own parameters that never change.

        They are needed to continue in another process, but not to return to a snapshot.
        """
        made = {f"method/{name}": p.detach() for name, p in self._method.named_parameters()}
        return {name: p for name, p in made.items() if name not in self._engine.adapted.named}

    def beginning(self) -> dict[str, Tensor]:
        """Return the initial values of the method's own tensors, if these come from source statistics."""
        if not self._method.info.needs:
            return {}
        return {name: tensor for name, tensor in self.initial.items() if name.startswith("method/")}

    def capture(self) -> Snapshot:
        """Return a copy of the state."""
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
                # scalars such as step counts stay on the CPU, where torch keeps them; other tensors follow their parameter
                adapted.optimizer.state[p][where[1]] = value.to(p.device, copy=True) if value.ndim else value.clone()
        self._engine.rng.set_state(snapshot["rng"].cpu())

    def own(self) -> None:
        """Move every tensor whose memory is shared with another process to memory of this process."""

        def owned(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.device.type == "cpu" and tensor.is_shared() else tensor

        engine = self._engine
        modules = [module for module in (self._method, self._guard, engine.recentring) if module is not None]
        counters = [self.steps, self.batch_size, engine.loss_scale, engine.micro_batches.kept_share]
        kept = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        for tensor in (*engine.adapted.tensors, *kept, *counters):
            tensor.data = owned(tensor.data)
        self.initial = Snapshot({name: owned(tensor) for name, tensor in self.initial.items()})
        engine.adapted.convert(owned)
        engine.adapted.set_source([self.initial[name] for name in engine.adapted.named])

    def start(self, batch_size: int) -> None:
        """Build the optimizer for batches of this size. A size of 0 means that there was no batch yet."""
        self.batch_size.fill_(batch_size)
        self._engine.adapted.optimizer = self._method.optimizer(batch_size) if batch_size else None

    def follow(self, batch_size: int) -> None:
        """Set the learning rates for another batch size, and keep the state of the optimizer.

        With `reference=True` the learning rates for the first batch are kept, as in the authors' code, which sets them in
        advance. A method that refuses batches of this size also keeps its learning rates.
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

    def checked(self, tensors: Mapping[str, Tensor], what: str, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors in the types that this state has, and refuse those that cannot be applied.

        Args:
            tensors: The tensors by name.
            what: Where they come from, for messages.
            expected: Tensors with the names, shapes and types that there have to be. The state of the optimizer and of the
                generator is added if these are a whole state.
        """
        what, engine = f"{what} does not fit this adapter", self._engine
        if "steps" not in expected:
            return fitted(what, tensors, expected, blanks=self._blanks, ranges=self._ranges())
        momenta = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}
        others = {name: tensor for name, tensor in tensors.items() if name not in momenta}
        expected = {**expected, "rng": engine.rng.get_state()}
        found = fitted(what, others, expected, blanks=self._blanks, ranges=self._ranges())
        require_generator_state(what, found["rng"])
        size = int(found["batch_size"])
        try:
            optimizer = self._method.optimizer(size) if size else None
            return found | fitted_optimizer(what, momenta, optimizer, engine.adapted.tensors)
        except StateError:
            raise
        except Exception as error:  # a method may refuse some sizes, and torch some learning rates
            raise StateError(f"{what}: there is no optimizer for a batch size of {size} ({error}).") from error

    def _ranges(self) -> dict[str, Range]:
        """Return the ranges of those tensors of the state that have one."""
        ranges: dict[str, Range] = {"steps": COUNT, "batch_size": (0, 2**31 - 1)}
        ranges |= {"loss_scale": (1, MOST_LOSS_SCALE), "kept_share": (0, math.inf)}
        modules = {"method": self._method, "guard": self._guard, "recentre": self._engine.recentring}
        for part, module in ((part, module) for part, module in modules.items() if module is not None):
            for path, child in module.named_modules():
                above = f"{part}/{path}." if path else f"{part}/"
                ranges |= {f"{above}{name}": limits for name, limits in getattr(child, "ranges", {}).items()}
        return ranges

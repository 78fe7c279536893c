"""Exact passes over a batch: micro-batches, no backward pass for rejected samples, one sharpness-aware step.

In a LayerNorm model samples do not see each other, so the gradient of a mean over the samples that a method keeps is a sum
over micro-batches, divided once at the end. That gives the numbers of the whole-batch form for the memory of one
micro-batch. A sample that the method rejects is not passed backward, unless it shares a micro-batch with so many kept ones
that leaving it out would cost more. On a CPU the micro-batches are spread over worker threads: several small matrix products
side by side are faster than one product split over the cores.

The same holds across processes: the ranks of a group each pass their share of a batch, and sums and counts are added up over
the ranks before the division (see `parallel.py`).
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConfigError, NonFiniteError
from ..models.normalisation import Normalisation, unknown_normalisation
from ..models.view import ViT, samples_interact

if TYPE_CHECKING:
    from .ranks import Ranks

T = TypeVar("T")
Objective = Callable[..., tuple[Tensor, Tensor]]
"""What a pass put out, first of all logits (batch, classes), and what was given with the samples, to a loss per sample and
a mask of the samples to learn from, each sample on its own.

If a sample is several pictures (batch, views, channels, height, width), its logits are (batch, views, classes).
"""

MOST_WORKERS = 4  # each holds one micro-batch and one gradient
TOKENS_AT_ONCE = 2 * 197 * 768  # times width: two images in ViT-B, large enough to be efficient, small enough to be cheap
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of softmax(logits) in nats, per sample."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def of_all(losses: Tensor) -> tuple[Tensor, Tensor]:
    """What an objective returns that rejects no sample."""
    return losses, torch.ones_like(losses, dtype=torch.bool)


@dataclass
class Sweep:
    """What one pass over a batch saw, in the batch's order; the gradient of the mean kept loss is in `.grad`.

    If several ranks share the batch, the tensors are of this rank's samples, and `used` and `loss` are of all: a method
    that decides by these two decides alike on every rank.
    """

    logits: Tensor
    losses: Tensor
    kept: Tensor
    overall: tuple[int, float] | None = field(default=None, kw_only=True)  # `used` and `loss` over several ranks

    @property
    def used(self) -> int:
        return int(self.kept.sum()) if self.overall is None else self.overall[0]

    @property
    def loss(self) -> float:
        """Mean loss of the kept samples, NaN if there are none."""
        return float(self.losses[self.kept].mean()) if self.overall is None else self.overall[1]


@dataclass
class Passes:
    """What this process spent: samples passed forward, and samples passed backward."""

    forward: int = 0
    backward: int = 0


_counting = threading.Lock()  # workers count too


class Engine:
    """A ViT, the parameters that adapt, their source values, their optimizer, and the passes that connect them.

    Args:
        vit: The model.
        parameters: What adapts, by name.
        classes: Columns of the head that exist in the target domain (indices, or a mask); the others are dropped before any
            softmax.
        micro_batch: Samples per pass. Default: 32; on a CPU 2 for ViT-B, more for smaller models, and half of that while a
            method rejects many samples, so that these cost no backward pass. If the samples of a batch interact, it is
            passed whole whatever is said here.
        precision: "float32", or autocast to "bfloat16" or "float16" (the latter with loss scaling).
        compile: `torch.compile` the forward pass; a string names the backend.
        normalisation: How pixels become what the model takes; None if that is not known.
        rng: Source of all randomness of a method. Where ranks share a batch, draw the same on all of them.
        ranks: The processes that share every batch; None if this one is alone.
    """

    def __init__(
        self,
        vit: ViT,
        parameters: dict[str, nn.Parameter],
        *,
        classes: Sequence[int] | Tensor | None = None,
        micro_batch: int | None = None,
        precision: str = "float32",
        compile: bool | str = False,
        normalisation: Normalisation | None = None,
        rng: torch.Generator,
        ranks: Ranks | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}.")
        if micro_batch is not None and (not isinstance(micro_batch, int) or micro_batch < 1):
            raise ConfigError(f"micro_batch={micro_batch!r}: give a whole number of samples, at least 1.")
        self.vit = vit
        self.named = parameters
        self.parameters: list[Tensor] = list(parameters.values())
        self.begin_at([p.detach().clone() for p in self.parameters])
        self._gradient_norm = 0.0
        self.classes = None if classes is None else _columns(classes, vit.classes)
        self.rng = rng
        self.optimizer: torch.optim.Optimizer | None = None
        self.loss_scale = torch.tensor(2.0**14 if precision == "float16" else 1.0)
        self.kept_share = torch.tensor(0.0)  # of the last batch's samples; the adapter notes it after each step
        self.passes = Passes()  # since the model was wrapped
        self.normalisation = normalisation
        self._micro_batch = micro_batch
        self._dtype = PRECISIONS[precision]
        self.whole = samples_interact(vit.model)  # batches are not cut
        self.ranks = ranks
        if ranks is not None and self.whole:
            raise ConfigError(
                "group: in this model the samples of a batch interact (BatchNorm on batch statistics), so that ranks cannot "
                "share a batch. Adapt it in one process."
            )
        self._compile = compile
        self._logits = self._compiled()

    def begin_at(self, source: list[Tensor]) -> None:
        """Take these for the source values of the parameters; they are kept, not copied."""
        self.source = source
        self._source_norm = float(global_norm(source)) if source else 0.0

    def _compiled(self) -> Callable[[Tensor], Tensor]:
        if not self._compile:
            return self.vit.logits
        return torch.compile(self.vit.logits, backend=self._compile if isinstance(self._compile, str) else "inductor")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_logits"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        """A copy must not run the compiled function of the original."""
        self.__dict__.update(values)
        self._logits = self._compiled()

    @property
    def num_classes(self) -> int:
        return self.vit.classes if self.classes is None else len(self.classes)

    # ---- passes -----------------------------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Tensor:
        """One pass, differentiable if gradients are enabled: logits of the target's classes, at least in float32."""
        if images.ndim == 5:
            return self.forward(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        self._count(forward=len(images))
        with self.autocast():
            logits = self._logits(images)
        return self._target(logits)

    def forward_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and what entered the head, (batch, its width): logits and features."""
        return self._forward_with(self.vit.features, images)

    def _forward_with(self, passed: Callable[[Tensor], tuple[Tensor, Tensor]], images: Tensor) -> tuple[Tensor, Tensor]:
        self._count(forward=len(images))
        with self.autocast():
            more, logits = passed(images)
        return self._target(logits), _full(more)

    def classify(self, features: Tensor) -> Tensor:
        """Logits of the target's classes from what enters the head."""
        with self.autocast():
            return self._target(self.vit.head(features))

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, networks compute in the precision that was asked for."""
        # no cache of casted weights: inside a caller's own autocast it would outlive the update of a weight
        return torch.autocast(self.vit.device.type, self._dtype, enabled=self._dtype is not None, cache_enabled=False)

    def _target(self, logits: Tensor) -> Tensor:
        logits = _full(logits)
        return logits if self.classes is None else logits[:, self.classes]

    def predict(self, images: Tensor) -> Tensor:
        """Logits, and nothing else."""
        if not len(images):
            return self._unseen(images).logits
        return self.each(torch.no_grad()(lambda part: (self.forward(part),)), (images,))[0]

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and what entered the head, without gradients."""
        return self._evaluated(self.forward_features, images)

    def class_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the class tokens behind all blocks (`ViT.class_tokens`), without gradients."""
        return self._evaluated(lambda part: self._forward_with(self.vit.class_tokens, part), images)

    def _evaluated(self, forward: Callable[[Tensor], tuple[Tensor, Tensor]], images: Tensor) -> tuple[Tensor, Tensor]:
        logits, more = self.evaluate(images, forward)
        return logits, more

    def evaluate(self, images: Tensor, forward: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What another pass than the plain one puts out, without gradients; it has to treat each sample on its own."""
        passed = torch.no_grad()(forward)
        if not len(images):  # a pass of nothing fails in some models: let one image tell the shapes
            return tuple(output[:0] for output in passed(images.new_zeros(1, *images.shape[1:])))
        return self.each(passed, (images,))

    def each(
        self, work: Callable[..., tuple[Tensor, ...]], batch: tuple[Tensor, ...], *, at_once: int | None = None
    ) -> tuple[Tensor, ...]:
        """What some work makes of every micro-batch, put together.

        Args:
            work: From rows of the batch's tensors to tensors with as many rows, each sample on its own. It may run in
                another thread, so it has to say itself whether it wants gradients.
            batch: Tensors with one row per sample, at least one.
            at_once: Samples in a micro-batch, unless the user said how many; by default what suits the model.
        """

        def run(parts: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
            return [work(*part) for part in parts]

        results = [made for some in self._spread(run, batch, selective=False, at_once=at_once) for made in some]
        return tuple(torch.cat(rows) for rows in zip(*results))

    def gradient(
        self,
        images: Tensor,
        objective: Objective,
        *,
        given: Sequence[Tensor] = (),
        forward: Callable[..., tuple[Tensor, ...]] | None = None,
        among: Tensor | None = None,
        selective: bool = False,
    ) -> Sweep:
        """Leave in `.grad` the gradient of the mean objective over the samples that it keeps (None if it keeps none).

        Args:
            images: The batch.
            objective: Loss of each sample, and which samples to keep.
            given: What else belongs to the samples, one row each: the objective gets it after the pass's outputs.
            forward: Another pass than the plain one, from images and what is given to one or more outputs, logits first
                (`forward_features`, say). It has to treat each sample on its own.
            among: Mask of the samples that may be kept. The others are not passed at all, unless the samples interact.
            selective: Say that many may be rejected. It changes the cost, not the result.

        Raises:
            NonFiniteError: if that gradient, or a logit, is not finite. Nothing has been changed but float16's loss scale.

        If ranks share the batch, the mean is over the samples that any of them keeps, and all ranks have to call this.
        """

        batch = (images, *given)
        if among is not None and self.whole:
            objective = _restricted(objective, among)
        elif among is not None:
            batch = tuple(tensor[among] for tensor in batch)

        def passed(part: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
            outputs = (self.forward(part[0]),) if forward is None else forward(*part)
            return outputs[0], *objective(*outputs, *part[1:])

        @torch.enable_grad()
        def work(parts: Sequence[tuple[Tensor, ...]]) -> tuple[list[Sweep], list[Tensor] | None]:
            sweeps: list[Sweep] = []
            total: list[Tensor] | None = None
            for part in parts:
                sweep, loss = self._pass(part, passed)
                sweeps.append(sweep)
                if loss is not None:
                    total = self._accumulate(total, loss)
            return sweeps, total

        results = self._spread(work, batch, selective) if len(batch[0]) else []
        seen = [sweep for sweeps, _ in results for sweep in sweeps] or [self._unseen(batch[0])]
        sweep = Sweep(*(torch.cat([getattr(s, name) for s in seen]) for name in ("logits", "losses", "kept")))
        require_finite(sweep.logits)
        if self.ranks is not None:
            sweep.overall = self.ranks.mean(sweep.losses[sweep.kept])
        totals = [total for _, total in results if total is not None]
        self._set_gradient(totals, sweep.used)
        return sweep

    def _unseen(self, images: Tensor) -> Sweep:
        """Of no sample: an empty share of a batch, or one of which nothing is left."""
        losses = torch.zeros(0, dtype=torch.promote_types(images.dtype, torch.float32), device=images.device)
        return Sweep(losses.new_zeros(*images.shape[:-3], self.num_classes), losses, losses > 0)

    def _pass(
        self, part: tuple[Tensor, ...], passed: Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor]]
    ) -> tuple[Sweep, Tensor | None]:
        """Pass one micro-batch; the second result is the summed loss of what it keeps, with its graph."""
        logits, losses, kept = passed(part)
        sweep = Sweep(logits.detach(), losses.detach(), kept)
        if not sweep.used:
            return sweep, None
        if 2 * sweep.used < len(kept) and not self.whole:
            # a backward pass through everybody would cost more than a fresh pass of the few
            logits = losses = torch.empty(0)  # frees the large graph first
            self._count(backward=sweep.used)
            return sweep, passed(tuple(tensor[kept] for tensor in part))[1].sum()
        self._count(backward=len(kept))
        return sweep, losses[kept].sum()

    def _count(self, *, forward: int = 0, backward: int = 0) -> None:
        with _counting:
            self.passes.forward += forward
            self.passes.backward += backward

    def _accumulate(self, total: list[Tensor] | None, loss: Tensor) -> list[Tensor]:
        new = torch.autograd.grad(loss * self.loss_scale.to(loss.device), self.parameters, materialize_grads=True)
        if total is None:
            return list(new)
        torch._foreach_add_(total, new)
        return total

    def _set_gradient(self, totals: list[list[Tensor]], count: int) -> None:
        for p in self.parameters:
            p.grad = None
        if not count:
            return
        total = totals[0] if totals else [torch.zeros_like(p) for p in self.parameters]  # what is kept, other ranks have
        for more in totals[1:]:
            torch._foreach_add_(total, more)
        if self.ranks is not None:
            total = self.ranks.sum(total)
        torch._foreach_div_(total, count * float(self.loss_scale))
        self._gradient_norm = float(global_norm(total))
        if not math.isfinite(self._gradient_norm):
            if self._dtype is torch.float16:
                self.loss_scale.div_(2).clamp_(min=1)
            raise NonFiniteError("the gradient of this batch is not finite; no update was applied.")
        if self._dtype is torch.float16:
            self.loss_scale.mul_(1.002).clamp_(max=2.0**16)  # doubles in some 350 sweeps
        for p, gradient in zip(self.parameters, total):
            p.grad = gradient

    def _spread(
        self,
        work: Callable[[Sequence[tuple[Tensor, ...]]], T],
        batch: tuple[Tensor, ...],
        selective: bool,
        at_once: int | None = None,
    ) -> list[T]:
        """Cut a batch into micro-batches and give each worker a contiguous run of them, so that sums have one order.

        The batch is its images, and whatever else has one row per sample.
        """
        images = batch[0]
        threads = torch.get_num_threads()
        workers = min(threads, MOST_WORKERS) if images.device.type == "cpu" and not self._compile else 1
        size = self._part_size(images, workers, selective, at_once)
        parts = list(zip(*(rows.split(size) for rows in batch)))
        workers = min(workers, len(parts))
        if workers == 1:
            return [work(parts)]
        bounds = [round(i * len(parts) / workers) for i in range(workers + 1)]
        return list(_pool(threads).map(work, [parts[a:b] for a, b in zip(bounds, bounds[1:])]))

    def _part_size(self, images: Tensor, workers: int, selective: bool, at_once: int | None) -> int:
        if self.whole:
            return len(images)
        if self._micro_batch is not None:
            return self._micro_batch
        if at_once is not None:
            return min(at_once, math.ceil(len(images) / workers))
        views = images.shape[1] if images.ndim == 5 else 1
        if images.device.type != "cpu":
            return max(1, 32 // views)
        size = max(2, round(TOKENS_AT_ONCE / (self.vit.tokens * self.vit.width)) // views)
        if selective and float(self.kept_share) < 0.75:
            size //= 2
        return min(size, math.ceil(len(images) / workers))

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Inside, a batch is one pass, in the caller's thread and not compiled: hooks on the model see all of it."""
        usual = self._micro_batch, self._logits
        self._micro_batch, self._logits = sys.maxsize, self.vit.logits
        try:
            yield
        finally:
            self._micro_batch, self._logits = usual

    # ---- ranks ------------------------------------------------------------------------------------------------

    def gather(self, tensor: Tensor) -> Tensor:
        """One row per sample of this rank's share of a batch, to those of the whole batch, the same on every rank.

        A method that remembers samples (a bank), or that compares the samples of a batch (the k surest), has to do so with
        what this returns; all ranks have to call it. Without a group it returns the tensor itself.
        """
        return tensor if self.ranks is None else self.ranks.gather(tensor)

    def places(self, images: Tensor) -> tuple[Tensor, int]:
        """Where this rank's samples stand in the whole batch, and how many samples that has.

        What is drawn for each sample has to be drawn for the whole batch, of which a rank then takes its places: so all
        ranks draw the same, and what one process would. All ranks have to call this.
        """
        if self.ranks is None:
            return torch.arange(len(images)), len(images)
        whose = self.gather(torch.full((len(images), 1), self.ranks.rank))[:, 0]
        return (whose == self.ranks.rank).nonzero()[:, 0], len(whose)

    def divide(self, rows: Tensor) -> Tensor:
        """This rank's part of rows that all ranks hold, and whose work they share: `gather` puts the parts together."""
        return rows if self.ranks is None else rows.tensor_split(self.ranks.count)[self.ranks.rank]

    def together(self) -> AbstractContextManager[None]:
        """What fails inside on one rank fails on all of them, once they next exchange something."""
        return nullcontext() if self.ranks is None else self.ranks.together()

    # ---- pixels -----------------------------------------------------------------------------------------------

    def to_pixels(self, images: Tensor) -> Tensor:
        """Images as the model takes them to pixels, which are from 0 to 1 in an ordinary picture."""
        return self._normalised().undo(images)

    def from_pixels(self, pixels: Tensor) -> Tensor:
        """The inverse."""
        return self._normalised().apply(pixels)

    def _normalised(self) -> Normalisation:
        if self.normalisation is None:
            raise unknown_normalisation(type(self.vit.model).__name__)
        return self.normalisation

    # ---- updates ----------------------------------------------------------------------------------------------

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """Whatever happens to the parameters inside, they leave bit for bit as they came."""
        here = [p.detach().clone() for p in self.parameters]
        try:
            yield
        finally:
            self._assign(here)

    @contextmanager
    def perturbed(self, rho: float) -> Iterator[None]:
        """Inside, the parameters stand at distance `rho` along the gradient that the last sweep left."""
        with self._elsewhere():
            with torch.no_grad():
                gradients = [p.grad for p in self.parameters if p.grad is not None]
                torch._foreach_add_(self.parameters, gradients, alpha=rho / (self._gradient_norm + 1e-12))
            yield

    @contextmanager
    def standing_at(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Inside, for passes alone, the parameters are these: they change places with them, and nothing is copied."""
        self._exchange(values)
        try:
            yield
        finally:
            self._exchange(values)

    def _exchange(self, values: Sequence[Tensor]) -> None:
        for p, value in zip(self.parameters, values):
            p.data, value.data = value.data, p.data

    @contextmanager
    def at_source(self) -> Iterator[None]:
        """Inside, the model is as it was when it was wrapped."""
        with self._elsewhere():
            self.restore(keep_momentum=True)
            yield

    def update(self) -> None:
        """One optimizer step along the gradient that the last sweep left."""
        assert self.optimizer is not None, "the adapter builds the optimizer before a method's first step"
        self.optimizer.step()
        self.optimizer.zero_grad()

    def amend_gradient(self, *, times: float = 1.0, plus: Sequence[Tensor] | None = None) -> None:
        """Scale the gradient that the last sweep left, and add a term for each parameter, the same on all ranks."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, times)
        if plus is not None:
            torch._foreach_add_(gradients, list(plus))
        self._gradient_norm = float(global_norm(gradients))
        if not math.isfinite(self._gradient_norm):
            raise NonFiniteError("the amended gradient of this batch is not finite; no update was applied.")

    def zero_gradient(self) -> None:
        """A gradient of zeros, with which an optimizer step still moves by its momentum."""
        for p in self.parameters:
            p.grad = torch.zeros_like(p)

    def restore(self, *, keep_momentum: bool = False) -> None:
        """Put the adapted parameters back to their source values."""
        self._assign(self.source)
        if not keep_momentum and self.optimizer is not None:
            self.optimizer.state.clear()

    @torch.no_grad()
    def _assign(self, values: list[Tensor]) -> None:
        if values:  # a method may adapt no parameter
            torch._foreach_copy_(self.parameters, values)

    def drift(self) -> float:
        """Distance of the adapted parameters from their source values, relative to the latter's length (at least 1)."""
        with torch.no_grad():
            moved = [torch.dist(p, source) for p, source in zip(self.parameters, self.source)]
        return float(torch.stack(moved).norm()) / max(self._source_norm, 1.0) if moved else 0.0


def require_finite(*outputs: Tensor) -> None:
    """Refuse to learn from a batch whose logits (or features) are not finite."""
    if not all(output.isfinite().all() for output in outputs):
        raise NonFiniteError("the logits of this batch are not finite; no update was applied.")


def _full(tensor: Tensor) -> Tensor:
    """At least in float32."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _restricted(objective: Objective, among: Tensor) -> Objective:
    """The same losses, but nothing is kept outside of the mask over a whole batch."""

    def restricted(*outputs: Tensor) -> tuple[Tensor, Tensor]:
        losses, kept = objective(*outputs)
        return losses, kept & among

    return restricted


def _columns(classes: Sequence[int] | Tensor, count: int) -> list[int]:
    """Validated column indices of the head."""
    chosen = torch.as_tensor(classes)
    if chosen.dtype == torch.bool and chosen.shape == (count,):
        chosen = chosen.nonzero().flatten()
    columns: list[int] = chosen.tolist() if chosen.ndim == 1 and not chosen.is_floating_point() else []
    if (
        chosen.dtype == torch.bool
        or not columns
        or len(set(columns)) < len(columns)
        or not all(0 <= c < count for c in columns)
    ):
        raise ConfigError(f"classes: give distinct indices from 0 to {count - 1}, or a boolean mask of length {count}.")
    return columns


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean length of all tensors laid end to end."""
    return torch.stack(torch._foreach_norm(list(tensors))).norm()


def _compute_on(cores: int) -> None:
    torch.set_num_threads(cores)
    torch.get_num_threads()  # a thread takes over the process's default at its first use of torch: let that be now


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Worker threads that share the cores between them, and are shared by all adapters of the process."""
    workers = min(threads, MOST_WORKERS)
    pool = ThreadPoolExecutor(workers, "acclimate", initializer=_compute_on, initargs=(threads // workers,))
    everybody = threading.Barrier(workers)
    for started in [pool.submit(everybody.wait) for _ in range(workers)]:
        started.result()
    torch.set_num_threads(threads)  # what a worker sets would otherwise be the default of every thread started later
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork

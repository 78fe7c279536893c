"""Passes over a batch and exact gradients, computed in micro-batches.

In a LayerNorm model the samples of a batch are independent of each other. The gradient of the mean loss over the samples
that a method keeps is therefore a sum over micro-batches, divided by the number of kept samples at the end. The result
equals that of a pass over the whole batch, but needs the memory of one micro-batch. Samples that the method rejects get no
backward pass, unless most samples of their micro-batch are kept: then a second forward pass would cost more.

The same holds for several processes. Each rank of a group passes its share of a batch, and sums and counts are added up over
the ranks before the division.

An engine has five parts: the passes, which are defined here, the parameters that adapt (`engine.adapted`), the micro-batches
(`engine.micro_batches`), the ranks (`engine.ranks`), and perhaps a centre of the features (`engine.recentring`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError, ModelError, NonFiniteError
from ..models.normalisation import Normalisation, unknown_normalisation
from ..models.surgery import remove_captures
from ..models.view import ModelView, layer_without_gradient, require_gradient, samples_interact
from .microbatches import MicroBatches, Rows
from .parameters import AdaptedParameters
from .ranks import SingleProcess

if TYPE_CHECKING:
    from .recentre import Recentring
    from .reply import Reply

Objective = Callable[..., tuple[Tensor, Tensor]]
"""The type of an objective: a function that returns a loss per sample, and a mask of the samples to learn from.

Its arguments are the outputs of a pass, of which the first are the logits (batch, classes), and then the extra rows that
belong to the samples. It treats each sample on its own. If a sample consists of several images, (batch, views, channels,
height, width), its logits are (batch, views, classes).
"""

MOST_LOSS_SCALE = 2.0**16
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def entropy(logits: Tensor) -> Tensor:
    """Return the Shannon entropy of each prediction, softmax(logits), in nats."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def keep_all(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses with a mask that keeps every sample, as an objective returns them."""
    return losses, torch.ones_like(losses, dtype=torch.bool)


def require_finite(*outputs: Tensor) -> None:
    """Refuse outputs (logits or features) that are not finite, so that no method learns from them."""
    if not all(output.isfinite().all() for output in outputs):
        raise NonFiniteError("the logits of this batch are not finite; no update was applied.")


@dataclass
class GradientResult:
    """The outputs of a gradient pass, in the order of the batch.

    The gradient of the mean loss of the kept samples is in `.grad` of the parameters. If several ranks share the batch, the
    tensors are those of this rank's samples, while `used` and `loss` are about all samples. A decision that depends on these
    two is therefore the same on every rank.
    """

    logits: Tensor
    losses: Tensor
    kept: Tensor
    used: int = 0  # samples that were kept
    loss: float = float("nan")  # mean loss over the kept samples; NaN if there are none
    features: Tensor | None = None  # that entered the head, if recentring needs them


class Unadapted(NamedTuple):
    """The predictions of the unadapted model for some images."""

    logits: Tensor
    features: Tensor  # that entered the head
    rows: Tensor  # of the head, one for each of the target's classes


@dataclass
class Part:
    """A micro-batch, and the outputs of its pass if these are known already."""

    rows: Rows
    outputs: list[Tensor] | None = None


class PassCount:
    """The number of samples that this process has passed forward and backward.

    Each thread has its own counts, so that no lock is needed.
    """

    def __init__(self) -> None:
        self._by_thread: dict[int, list[int]] = {}

    def add(self, *, forward: int = 0, backward: int = 0) -> None:
        """Add samples that the calling thread has passed."""
        counts = self._by_thread.setdefault(threading.get_ident(), [0, 0])
        counts[0] += forward
        counts[1] += backward

    @property
    def forward(self) -> int:
        """The number of forward passes of a sample."""
        return sum(counts[0] for counts in list(self._by_thread.values()))

    @property
    def backward(self) -> int:
        """The number of backward passes of a sample."""
        return sum(counts[1] for counts in list(self._by_thread.values()))


class Engine:
    """The passes of one model over batches, and the gradients that methods learn from.

    Args:
        view: The model.
        parameters: The parameters that adapt, by name.
        classes: Columns of the head that exist in the target domain (indices, or a mask). The others are dropped before any
            softmax.
        micro_batch: Samples per pass. Default: 32; on a CPU 2 for ViT-B and more for smaller models, and half of that while
            a method rejects many samples, so that fewer of these get a backward pass. If the samples of a batch interact,
            the batch is always passed whole.
        precision: "float32", or autocast to "bfloat16" or "float16" (the latter with loss scaling).
        compile: Whether to `torch.compile` the forward pass. A string names the backend.
        normalisation: The normalisation of the images; None if it is not known.
        rng: The generator of all random numbers of a method. Ranks that share a batch must draw the same numbers.
        ranks: The processes that share every batch.
        recentring: The centre that is subtracted from the features before the head, or None.
    """

    def __init__(
        self,
        view: ModelView,
        parameters: Mapping[str, nn.Parameter],
        *,
        classes: Sequence[int] | Tensor | None = None,
        micro_batch: int | None = None,
        precision: str = "float32",
        compile: bool | str = False,
        normalisation: Normalisation | None = None,
        rng: torch.Generator,
        ranks: SingleProcess | None = None,
        recentring: Recentring | None = None,
    ) -> None:
        self._dtype = PRECISIONS[precision]
        self.view = view
        self.ranks = ranks or SingleProcess()
        self.samples_interact = samples_interact(view.model)
        if self.ranks.shared and self.samples_interact:
            raise ConfigError(
                "group: in this model the samples of a batch interact (BatchNorm on batch statistics, quantised layers), so "
                "that ranks cannot share a batch. Adapt it in one process."
            )
        self.micro_batches = MicroBatches(
            micro_batch,
            work=view.work,
            whole=self.samples_interact,
            threads=not compile and view.is_library_code(),  # a user's code may not be ready for several threads
        )
        self.adapted = AdaptedParameters(parameters)
        self.classes = columns_of(classes, view.classes)
        self.rng = rng
        self.normalisation = normalisation
        self.loss_scale = torch.tensor(2.0**14 if precision == "float16" else 1.0)
        self.batch_size = torch.tensor(0)  # that the learning rates are for; 0 before the first batch
        self.passes = PassCount()  # counted since the model was wrapped
        self.recentring = recentring
        self._unobserved: Tensor | None = None  # the batch of this step, until a pass has shown its features
        self.reply: Reply | None = None  # to the caller of this step, if it does not wait for the end
        self._without_gradient = layer_without_gradient(view.model)
        self._compile = compile
        self._logits = self._compiled()

    def _compiled(self) -> Callable[[Tensor], Tensor]:
        if not self._compile:
            return self.view.logits
        return torch.compile(self.view.logits, backend=self._compile if isinstance(self._compile, str) else "inductor")

    def __getstate__(self) -> dict[str, Any]:
        # the generator as bytes, because torch cannot send a generator to another process
        rng = self.rng.get_state().numpy().tobytes()
        kept = {name: value for name, value in self.__dict__.items() if name != "_logits"}
        return {**kept, "rng": rng, "reply": None}

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Restore a copy, which compiles its own function instead of that of the original."""
        self.__dict__.update(values)
        self.rng = torch.Generator()
        self.rng.set_state(torch.frombuffer(bytearray(values["rng"]), dtype=torch.uint8))
        self._logits = self._compiled()

    @property
    def num_classes(self) -> int:
        """The number of the target's classes."""
        return self.view.classes if self.classes is None else len(self.classes)

    # ---- one pass ---------------------------------------------------------------------------------------------

    def forward(self, images: Tensor, passed: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the logits of the target's classes, in float32 or float64.

        They are differentiable if gradients are enabled. `passed` is a function from images to logits instead of the plain
        pass of the model.
        """
        if images.ndim == 5:
            return self.forward(images.flatten(0, 1), passed).unflatten(0, images.shape[:2])
        self.passes.add(forward=len(images))
        return self._recentred(passed or self._logits, images)

    def forward_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the features that enter the head, (batch, width of the head).

        With recentring, the centre is subtracted from these.
        """
        logits, features = self.forward_with(self.view.features, images)
        return logits, self.centred(features)

    def forward_with(self, passed: Callable[[Tensor], tuple[Tensor, Tensor]], images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and what else a function from images to more outputs and logits returns."""
        self.passes.add(forward=len(images))
        more: list[Tensor] = []

        def logits_of(images: Tensor) -> Tensor:
            other, logits = passed(images)
            more.append(other)
            return logits

        return self._recentred(logits_of, images), _full(more[0])

    def centred(self, features: Tensor) -> Tensor:
        """Return features, as they enter the head, without their displacement, if the adapter has recentring."""
        if self.recentring is None:
            return features
        return features - self.recentring.displacement(features, self._rows().detach())

    def classify(self, features: Tensor) -> Tensor:
        """Return the logits of the target's classes for features of any floating-point type.

        With recentring, the features are given without the centre. A method that uses this calls
        `view.require_logits_of_head()` in `attach`.
        """
        with self.autocast():
            return self._target(self.view.classify(features.to(self.view.dtype)))

    def autocast(self) -> AbstractContextManager[Any]:
        """Let networks compute in the chosen precision inside the block."""
        # Cast weights are not cached: inside the caller's own autocast, a cached weight would be used after its update.
        return torch.autocast(self.view.device.type, self._dtype, enabled=self._dtype is not None, cache_enabled=False)

    def _target(self, logits: Tensor) -> Tensor:
        logits = _full(logits)
        return logits if self.classes is None else logits[:, self.classes]

    def _recentred(self, passed: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Pass images, and return the logits of the target's classes, without the displacement of the features."""
        with ExitStack() as stack:
            if self.recentring is not None:  # a pass may contain further ones, of other views
                features = stack.enter_context(self.view.capture_features(first=True))
            stack.enter_context(self.autocast())
            logits = passed(images)
        logits = self._target(logits)
        if self.recentring is None:
            return logits
        return logits - self._moved_by(_full(features()), self.recentring, logits)

    def _moved_by(self, features: Tensor, recentring: Recentring, logits: Tensor) -> Tensor:
        """Return by how much recentring changes the logits of images with these features."""
        rows = self._rows().to(logits.dtype)
        return recentring.displacement(features.to(logits.dtype), rows.detach()) @ rows.T

    def _rows(self) -> Tensor:
        """Return the rows of the head of the target's classes."""
        weight = self.view.head_weight()
        return weight if self.classes is None else weight[self.classes]

    # ---- recentring -------------------------------------------------------------------------------------------

    @contextmanager
    def observing(self, images: Tensor) -> Iterator[None]:
        """Move the centre to the batch of a step inside the block, by the first pass of this batch.

        The pass returns logits with the new centre, while a loss in it is computed with the centre from before. If the
        block contains no such pass, the batch is passed once more at the end.
        """
        self._unobserved = images if self.recentring is not None else None
        yield
        if self._unobserved is not None:
            self.predict(images)

    def _shifted(self, features: Tensor, logits: Tensor, recentring: Recentring | None) -> Tensor:
        """Move a centre to a batch, and return its logits with the new centre."""
        assert recentring is not None
        plain = logits.flatten(0, -2) + self._moved_by(features, recentring, logits).detach()
        everybody = self.ranks.gather(features), self.ranks.gather(plain)
        require_finite(*everybody)
        recentring.observe(*everybody, self._rows().detach())
        return (plain - self._moved_by(features, recentring, logits).detach()).view_as(logits)

    def _observed(self, features: Tensor, logits: Tensor) -> Tensor:
        """Move the centre to the batch of a step, and return its logits with the new centre."""
        self._unobserved = None
        return self._shifted(features, logits, self.recentring)

    def _with_features(self, passed: Callable[..., tuple[Tensor, ...]], part: Rows) -> tuple[Tensor, ...]:
        """Return the outputs of a pass, and then the features that entered the head."""
        with self.view.capture_features(first=True) as features:  # a pass may contain further ones, of other views
            outputs = passed(*part)
        return *outputs, _full(features().detach())

    # ---- a batch without gradients ----------------------------------------------------------------------------

    def predict(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        if not len(images) and images is not self._unobserved:
            return self._empty(images).logits
        return self.evaluate(images, lambda part: (self.forward(part),))[0]

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of a batch, and the features that enter the head, without the centre of recentring."""
        logits, features = self.evaluate(images, lambda part: self.forward_with(self.view.features, part))
        return logits, self.centred(features)

    def class_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of a batch, and the class tokens after all blocks (`ModelView.class_tokens`)."""
        logits, tokens = self.evaluate(images, lambda part: self.forward_with(self.view.class_tokens, part))
        return logits, tokens

    def unadapted(self, images: Tensor) -> Unadapted:
        """Return the predictions of the unadapted model, of which nothing is changed and whose features have no centre.

        If a sample consists of several images, the first one is predicted.
        """
        images = images[:, 0] if images.ndim == 5 else images

        with self.adapted.at_source(), self.view.unadapted():
            try:
                rows = self._rows().detach()
            except ModelError:  # without a linear head there are no features
                return Unadapted(logits := self.predict(images), logits[:, :0], logits.new_zeros(self.num_classes, 0))

            @torch.no_grad()
            def passed(part: Tensor) -> tuple[Tensor, Tensor]:
                self.passes.add(forward=len(part))
                with self.autocast():
                    features, logits = self.view.features(part)
                return self._target(logits), _full(features)

            if len(images):
                logits, features = self.map(passed, (images,))
                return Unadapted(logits, features, rows)
            logits = self._empty(images).logits
            return Unadapted(logits, logits.new_zeros(0, self.view.feature_width), rows)

    def evaluate(self, images: Tensor, forward: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the outputs of a given forward pass, logits first. It must treat each sample on its own."""
        observed = images is self._unobserved

        @torch.no_grad()
        def passed(*part: Tensor) -> tuple[Tensor, ...]:
            return self._with_features(forward, part) if observed else forward(*part)

        if len(images):
            outputs = self.map(passed, (images,))
        else:  # some models fail on an empty batch: get the shapes from one image
            outputs = tuple(output[:0] for output in passed(images.new_zeros(1, *images.shape[1:])))
        if observed:
            logits, *others, features = outputs
            outputs = self._observed(features, logits), *others
        if self.reply is not None and self.reply.awaits(images) and outputs[0].isfinite().all():
            self.reply.send(outputs[0])
        return outputs

    def map(self, work: Callable[..., tuple[Tensor, ...]], batch: Rows, *, size: int | None = None) -> tuple[Tensor, ...]:
        """Apply a function to every micro-batch, and concatenate the results.

        Args:
            work: A function from rows of the batch's tensors to tensors with as many rows. It treats each sample on its own.
                It may run in another thread, so that it has to enable or disable gradients itself.
            batch: Tensors with one row per sample, and at least one row.
            size: Samples in a micro-batch, unless the user chose a size. Default: a size that suits the model.
        """

        def run(parts: Iterable[Rows]) -> list[tuple[Tensor, ...]]:
            return [work(*part) for part in parts]

        results = [made for some in self.micro_batches.map(run, batch, size=size) for made in some]
        return tuple(torch.cat(rows) for rows in zip(*results))

    # ---- a batch with a gradient ------------------------------------------------------------------------------

    def gradient(
        self,
        images: Tensor,
        objective: Objective,
        *,
        extras: Sequence[Tensor] = (),
        forward: Callable[..., tuple[Tensor, ...]] | None = None,
        candidates: Tensor | None = None,
        selective: bool = False,
    ) -> GradientResult:
        """Compute the gradient of the mean loss over the samples that an objective keeps, and store it in `.grad`.

        The gradient is None if the objective keeps no sample. If ranks share the batch, the mean is over the samples that
        any rank keeps, and all ranks must call this method.

        Args:
            images: The batch.
            objective: A function that returns the loss of each sample, and which samples to keep.
            extras: Further tensors with one row per sample. The objective gets them after the outputs of the pass.
            forward: A pass from images and extras to one or more outputs, logits first, instead of the plain one; for
                example `forward_features`. It must treat each sample on its own.
            candidates: A mask of the samples that may be kept. The others are not passed at all, unless the samples
                interact.
            selective: Whether many samples may be rejected. It changes the cost, but not the result.

        Raises:
            NonFiniteError: If the gradient or a logit is not finite. Only the loss scale of float16 has then changed.
        """
        require_gradient(self._without_gradient)
        if images is self._unobserved and self.recentring is not None and self.recentring.is_empty:
            reply, self.reply = self.reply, None
            self.predict(images)  # the first batch of a stream needs a centre before the loss
            self.reply = reply
        observed = images is self._unobserved and candidates is None
        batch = (images, *extras)
        if candidates is not None and self.samples_interact:
            objective = _restricted(objective, candidates)
        elif candidates is not None:
            batch = tuple(tensor[candidates] for tensor in batch)

        def outputs_of(*rows: Tensor) -> tuple[Tensor, ...]:
            return (self.forward(rows[0]),) if forward is None else forward(*rows)

        def passed(rows: Rows) -> list[Tensor]:
            return list(self._with_features(outputs_of, rows) if observed else outputs_of(*rows))

        @torch.enable_grad()
        def work(parts: Iterable[Part]) -> tuple[list[GradientResult], list[Tensor] | None]:
            results: list[GradientResult] = []
            total: list[Tensor] | None = None
            for part in parts:
                outputs, part.outputs = passed(part.rows) if part.outputs is None else part.outputs, None
                features = outputs.pop() if observed else None
                result, loss = self._learn(part.rows, outputs, features, outputs_of, objective)
                outputs.clear()
                results.append(result)
                if loss is not None:
                    total = self._accumulate(total, loss)
            return results, total

        divided = self.micro_batches.groups(batch, selective=selective) if len(batch[0]) else []
        groups = [[Part(rows) for rows in group] for group in divided]
        if groups and self.reply is not None and self.reply.awaits(images) and candidates is None:
            self._reply(self.reply, groups, passed, observed)
        done = self.micro_batches.map_groups(work, groups)
        seen = [result for results, _ in done for result in results] or [self._empty(batch[0])]
        logits, losses, kept = (torch.cat([getattr(s, name) for s in seen]) for name in ("logits", "losses", "kept"))
        require_finite(logits)
        if observed:
            logits = self._observed(self._features_of(seen), logits)
        used, loss = self.ranks.mean(losses[kept])
        self._set_gradient([total for _, total in done if total is not None], used)
        return GradientResult(logits, losses, kept, used, loss)

    def _reply(self, reply: Reply, groups: list[list[Part]], passed: Callable[[Rows], list[Tensor]], observed: bool) -> None:
        """Pass all parts of a batch, reply, and leave their outputs with as many graphs as the memory is meant for.

        The centre of recentring moves after the backward pass, so that here a copy of it does. If a logit is not finite, the
        caller gets the reply at the end of the step.
        """
        most = self.micro_batches.graphs_at_once // len(groups)

        @torch.enable_grad()
        def ahead(parts: Iterable[Part]) -> list[tuple[Tensor, Tensor]]:
            seen, kept = [], 0
            for part in parts:
                outputs = passed(part.rows)
                seen.append((outputs[0].detach(), outputs[-1].detach()))
                kept += len(outputs[0])
                if kept <= max(most, len(outputs[0])):
                    part.outputs = outputs
            return seen

        seen = [pair for pairs in self.micro_batches.map_groups(ahead, groups) for pair in pairs]
        logits, features = (torch.cat(each) for each in zip(*seen))
        if logits.isfinite().all():
            reply.send(self._shifted(features, logits, copy.deepcopy(self.recentring)) if observed else logits)

    def _empty(self, images: Tensor) -> GradientResult:
        """Return the result of an empty batch."""
        losses = torch.zeros(0, dtype=torch.promote_types(images.dtype, torch.float32), device=images.device)
        return GradientResult(losses.new_zeros(*images.shape[:-3], self.num_classes), losses, losses > 0)

    def _features_of(self, seen: Sequence[GradientResult]) -> Tensor:
        """Return the features of all parts of a batch. An empty batch has none."""
        parts = [result.features for result in seen if result.features is not None]
        return torch.cat(parts) if parts else seen[0].losses.new_zeros(0, self.view.feature_width)

    def _learn(
        self,
        part: Rows,
        outputs: list[Tensor],
        features: Tensor | None,
        passed: Callable[..., tuple[Tensor, ...]],
        objective: Objective,
    ) -> tuple[GradientResult, Tensor | None]:
        """Return the result of a micro-batch that was passed, and the summed loss of the kept samples, with its graph."""
        losses, kept = objective(*outputs, *part[1:])
        result, used = GradientResult(outputs[0].detach(), losses.detach(), kept, features=features), int(kept.sum())
        if not used:
            return result, None
        if 2 * used < len(kept) and not self.samples_interact:
            # a second forward pass of the few kept samples costs less than a backward pass of all samples
            losses = torch.empty(0)
            outputs.clear()  # frees the large graph first
            self.passes.add(backward=used)
            part = tuple(tensor[kept] for tensor in part)
            return result, objective(*passed(*part), *part[1:])[0].sum()
        self.passes.add(backward=len(kept))
        return result, losses[kept].sum()

    def _accumulate(self, total: list[Tensor] | None, loss: Tensor) -> list[Tensor]:
        if not loss.requires_grad:
            raise ModelError(
                "The loss has no gradient: a layer of the model passes none (does it run under torch.no_grad?), or the "
                "logits do not depend on what adapts. Choose a method that needs no gradient (source, t3a, lame)."
            )
        scaled = loss * self.loss_scale.to(loss.device)
        # torch 2.4 fills in zeros that require a gradient themselves
        new = [g.detach() for g in torch.autograd.grad(scaled, self.adapted.tensors, materialize_grads=True)]
        if total is None:
            return new
        torch._foreach_add_(total, new)
        return total

    def _set_gradient(self, totals: list[list[Tensor]], count: int) -> None:
        """Divide the sums over all workers and all ranks by the number of kept samples, and set the gradient."""
        if not count:
            self.adapted.set_gradient(None)
            return
        # there are no totals if all kept samples are on other ranks
        total = totals[0] if totals else [torch.zeros_like(p) for p in self.adapted.tensors]
        for more in totals[1:]:
            torch._foreach_add_(total, more)
        total = self.ranks.sum(total)
        torch._foreach_div_(total, count * float(self.loss_scale))
        try:
            self.adapted.set_gradient(total)
        except NonFiniteError:
            if self._dtype is torch.float16:
                self.loss_scale.div_(2).clamp_(min=1)
            raise
        if self._dtype is torch.float16:
            self.loss_scale.mul_(1.002).clamp_(max=MOST_LOSS_SCALE)  # doubles in about 350 passes

    def tidy(self) -> None:
        """Undo what an interrupted pass may have left: borrowed memory, gradients, and hooks on the model."""
        self._unobserved = self.reply = None
        self.adapted.use_own()
        self.adapted.set_gradient(None)
        self.view.put_back()
        remove_captures(self.view.model)

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Let every batch be one pass inside the block, in the thread of the caller and not compiled.

        Hooks on the model then see the whole batch.
        """
        usual, self._logits = self._logits, self.view.logits
        try:
            with self.micro_batches.undivided():
                yield
        finally:
            self._logits = usual

    # ---- pixels -----------------------------------------------------------------------------------------------

    def to_pixels(self, images: Tensor) -> Tensor:
        """Return the pixels, nominally from 0 to 1, of images as the model takes them, in float32 or float64."""
        return self._normalised().undo(_full(images))

    def from_pixels(self, pixels: Tensor) -> Tensor:
        """Return images as the model takes them, in its type, from pixels between 0 and 1."""
        return self._normalised().apply(pixels).to(self.view.dtype)

    def _normalised(self) -> Normalisation:
        if self.normalisation is None:
            raise unknown_normalisation(type(self.view.model).__name__)
        return self.normalisation


def _full(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it is of that type."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _restricted(objective: Objective, candidates: Tensor) -> Objective:
    """Return an objective that keeps only samples inside of a mask over the whole batch."""

    def restricted(*outputs: Tensor) -> tuple[Tensor, Tensor]:
        losses, kept = objective(*outputs)
        return losses, kept & candidates

    return restricted


def columns_of(classes: Sequence[int] | Tensor | None, count: int) -> list[int] | None:
    """Return the columns of the head that `classes` selects, after checking them. None selects all of them."""
    if classes is None:
        return None
    try:
        chosen = torch.as_tensor(classes)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        chosen = torch.zeros(0)
    if chosen.dtype == torch.bool and chosen.shape == (count,):
        chosen = chosen.nonzero().flatten()
    whole = not chosen.is_floating_point() and not chosen.is_complex()
    columns: list[int] = chosen.tolist() if chosen.ndim == 1 and whole else []
    if (
        chosen.dtype == torch.bool
        or not columns
        or len(set(columns)) < len(columns)
        or not all(0 <= c < count for c in columns)
    ):
        raise ConfigError(f"classes: give distinct indices from 0 to {count - 1}, or a boolean mask of length {count}.")
    return columns

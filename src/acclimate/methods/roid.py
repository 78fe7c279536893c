"""ROID (Marsden et al., WACV 2024).

The title is "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior Correction".
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.engine import Engine, entropy, keep_all
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..errors import InputError, NonFiniteError, require_between, require_whole
from ..models.view import ModelView, parameters_of
from ._augment import jitter_and_move
from ._predictions import nothing_yet, or_uniform
from ._teacher import blend, require_nesterov, symmetric_cross_entropy
from ._window import Window


@register("roid")
class ROID(Method):
    """Learn from diverse and certain samples, stay near the source, and correct for the class frequencies.

    The weight of a sample is larger if its prediction is less similar to the average prediction so far, and if it is more
    certain. Samples that are less diverse than the mean of their batch are not used. The loss is the soft likelihood ratio
    of a sample, plus the symmetric cross entropy between the sample and an augmented view. After each step the parameters
    move a little towards the source. The returned logits come from before the update, and are weighted by the frequency of
    each class in the predictions of the batch.

        p, p': predictions of a sample and of its view;  d, u: diversity and certainty, scaled to 0 ... 1 in the batch
        loss = sum over d >= mean of d of exp(d u / temperature) (ratio + consistency) / B
        ratio = -sum_c p_c ln(p_c / (1 - p_c)),  consistency = -1/2 sum_c (p_c ln p'_c + p'_c ln p_c)
        w <- source_momentum w + (1 - source_momentum) w0,  where w0 are the source parameters
        logits = z + ln((m + s) / (1 + s C)),  m = mean of p over the batch,  s = max(1 / B, 1 / C) / max_c m_c

    The method needs the normalisation of the model, to augment pixels (`adapt(..., mean=, std=)`). It also needs batches of
    at least two images, or a window, because the weights compare the samples of a batch. Without a window, a stream of
    single images is refused. A single image at the end of another stream is predicted, and nothing is learned from it.

    Args:
        lr: Learning rate.
        momentum: Momentum of SGD.
        nesterov: Whether to use Nesterov's momentum.
        decay: Share of the average prediction that is kept at each step.
        temperature: Temperature of the sample weights. With a lower value, diverse and certain samples have more weight.
        source_momentum: Share of the adapted parameters that is kept when they move towards the source.
        window: Number of images that are collected in a stream of single images. The method learns from them whenever so
            many new images have come, and the class frequencies are those of the last `window` images. The authors pass all
            of them with each image; here the logits from the arrival of an image are stored (ours).
        reference: Behave as the authors' released code: the logits, not the probabilities, are multiplied with the class
            frequencies; a batch whose samples are equally diverse or equally certain is not learned from (its weights are
            0/0; by default these samples have equal weights); and losses are summed and divided by the size of the first
            batch, whatever the size of this one, so that those of a window are not divided.
    """

    info = Info(
        paper="Marsden et al., WACV 2024",
        adapts="all norms",
        requires=("norms",),
        batch_statistics=True,
        remembers="an average prediction; of single images a window",
        augments=True,
        exceptions={"batch_of_one": "the weights compare the samples of a batch; give window= for single images"},
        passes=(3, 2),
    )

    def __init__(
        self,
        *,
        lr: float = 0.00025,
        momentum: float = 0.9,
        nesterov: bool = True,
        decay: float = 0.9,
        temperature: float = 1 / 3,
        source_momentum: float = 0.99,
        window: int | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_between(0, math.inf, lr=lr)
        require_between(0, 1, momentum=momentum, decay=decay, source_momentum=source_momentum)
        require_between(1e-6, math.inf, temperature=temperature)
        require_nesterov(nesterov, momentum)
        if window is not None:
            require_whole(2, window=window)
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.decay = decay
        self.temperature = temperature
        self.source_momentum = source_momentum
        self.window = window
        self.reference = reference

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt all norms, and create the average prediction and the window."""
        self._adapted = parameters_of(view.norms)
        self.average: Tensor  # average prediction; NaN before the first batch
        self.register_buffer("average", nothing_yet(view))
        self.collected = None if self.window is None else Window(self.window, view)
        return self._adapted

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over the norms, and raise an error for a stream of single images without a window."""
        if batch_size == 1 and self.window is None:
            raise InputError(
                f"{self.name} compares the samples of a batch, which a single image does not allow: pass at least two at "
                "once, let it collect some (window=16), or choose a method that learns from one (dct, sar, tent)."
            )
        return torch.optim.SGD(self._adapted, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Predict the batch with prior correction, and learn from its diverse and certain samples."""
        logits = engine.predict(images)
        everybody = engine.ranks.gather(logits)
        if len(everybody) > 1:
            return Step(self.corrected(logits, everybody), *self.learn(images, everybody, engine))
        if self.collected is None:
            corrected = self.corrected(logits, everybody)
            return Step(corrected, event="skipped: a single image cannot be compared with others")
        image = engine.ranks.gather(images)
        batch, outputs, complete = self.collected.with_next(image[0], everybody[0])
        corrected = self.corrected(logits, outputs)
        learned = self.learn(engine.ranks.share(batch), outputs, engine) if complete else ()
        self.collected.add(image[0], everybody[0])
        return Step(corrected, *learned)

    def learn(self, images: Tensor, everybody: Tensor, engine: Engine) -> tuple[int, float]:
        """Learn from images in one update, and return the number of samples used and the loss.

        `images` are those of this rank, and `everybody` has the logits of all ranks.
        """
        weights, kept = self.weights(everybody)
        if not weights.isfinite().all():
            raise NonFiniteError("the weights of this batch are not finite; no update was applied.")
        positions, total = engine.ranks.positions(images)
        mine = kept[positions]
        pairs = torch.stack([images[mine], self.augmented(images, mine, engine)], dim=1)
        # the engine divides by the number of kept samples, the paper by the number of all samples
        divisor = int(engine.batch_size) if self.reference else total
        share = weights[positions][mine] * (int(kept.sum()) / divisor)
        result = engine.gradient(pairs, likelihood_ratio_and_consistency, extras=[share])
        self.remember(everybody)
        engine.adapted.update()
        self.ensemble(engine)
        return result.used, result.loss

    def augmented(self, images: Tensor, kept: Tensor, engine: Engine) -> Tensor:
        """Return one augmented view of each kept image."""
        view = jitter_and_move(engine.to_pixels(images[kept]), engine.rng, padding="reflect", blur=False)
        return engine.from_pixels(view.clamp(0, 1))

    def remember(self, logits: Tensor) -> None:
        """Update the average prediction with the mean prediction of a batch."""
        classes = logits.shape[-1]
        mean = or_uniform(self.average, classes)
        self.average[:classes] = self.decay * mean + (1 - self.decay) * logits.softmax(-1).mean(0)

    def weights(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each sample of a batch, and whether it is used."""
        mean = or_uniform(self.average, logits.shape[-1])
        diversity = self.scaled(1 - F.cosine_similarity(mean[None], logits.softmax(-1), dim=-1))
        certainty = self.scaled(-entropy(logits))
        return (diversity * certainty / self.temperature).exp(), diversity >= diversity.mean()

    def scaled(self, values: Tensor) -> Tensor:
        """Scale the values of a batch linearly, so that the least is 0 and the largest is 1."""
        least, most = values.min(), values.max()
        if least == most and not self.reference:
            return torch.ones_like(values)
        return (values - least) / (most - least)

    def corrected(self, logits: Tensor, everybody: Tensor) -> Tensor:
        """Return the logits, weighted by the smoothed class frequencies of the batch."""
        samples, classes = everybody.shape
        frequency = everybody.softmax(-1).mean(0)
        smoothing = max(1 / samples, 1 / classes) / frequency.max()
        prior = (frequency + smoothing) / (1 + smoothing * classes)
        return logits * prior if self.reference else logits + prior.log()

    def ensemble(self, engine: Engine) -> None:
        """Move the adapted parameters a little towards the source."""
        blend(engine.adapted.tensors, engine.adapted.source, self.source_momentum)


def likelihood_ratio_and_consistency(logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted loss of each pair (image, view), and that every pair is kept.

    The loss is the soft likelihood ratio of the image plus the symmetric cross entropy between image and view. Both get a
    gradient.
    """
    z, view = logits.unbind(1)
    loss = weight * (soft_likelihood_ratio(z) + symmetric_cross_entropy(view, z))
    return keep_all(loss)


def soft_likelihood_ratio(logits: Tensor) -> Tensor:
    """Return -sum p log(p / (1 - p)) of each sample, with p limited to 0.99."""
    p = logits.softmax(-1).clamp(max=0.99)
    return -(p * (p / (1 - p) + 1e-5).log()).sum(-1)

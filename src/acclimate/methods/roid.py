"""ROID: Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior Correction
(Marsden et al., WACV 2024).
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
from ..models.view import ViT, parameters_of
from ._augment import jitter_and_move
from ._predictions import nothing_yet, or_uniform
from ._teacher import blend, require_nesterov, symmetric_cross_entropy
from ._window import Window


@register("roid")
class ROID(Method):
    """Learn from the diverse and certain samples of a batch, stay near the source, and correct for the classes' frequency.

    A sample counts the more, the less its prediction resembles the average prediction so far and the surer it is; those less
    diverse than the mean of their batch do not count. Each is to have a high likelihood ratio, and an augmented view of it
    the same prediction. After each step the parameters move a little towards the source. What is returned is from before the
    update, weighted by how often the batch predicts each class.

    Needs the model's normalisation, to augment pixels (`adapt(..., mean=, std=)`), and batches of two images or more, or a
    window: the weights compare the samples of a batch. Without a window a stream of single images is refused; a single image
    at the end of another stream is predicted, and nothing is learned from it.

    Args:
        lr: Learning rate.
        momentum: Momentum of SGD.
        nesterov: Nesterov's momentum.
        decay: Share of the average prediction that stays at each step.
        temperature: Of the weights: the lower, the more a diverse and certain sample counts.
        source_momentum: Share of the adapted parameters that stays when they move towards the source.
        window: In a stream of single images, learn from so many at a time, once these have come; the frequency of the
            classes is that in the last so many. The authors pass all of them with each image; here the logits from when
            an image came are remembered (ours).
        reference: Behave as the authors' released code: the logits, not the probabilities, are multiplied with the classes'
            frequency; a batch whose samples are equally diverse or equally certain is not learned from (its weights are
            0/0; by default these samples count alike); and losses are summed and divided by the size of the first batch,
            whatever the size of this one, so that those of a window are not divided.
    """

    info = Info(
        paper="Marsden et al., WACV 2024",
        adapts="all norms",
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

    def attach(self, vit: ViT, setup: Setup) -> Iterable[nn.Parameter]:
        self._adapted = parameters_of(vit.norms)
        self.average: Tensor  # prediction; NaN until there is one
        self.register_buffer("average", nothing_yet(vit))
        self.collected = None if self.window is None else Window(self.window, vit)
        return self._adapted

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        if batch_size == 1 and self.window is None:
            raise InputError(
                f"{self.name} compares the samples of a batch, which a single image does not allow: pass at least two at "
                "once, let it collect some (window=16), or choose a method that learns from one (dct, sar, tent)."
            )
        return torch.optim.SGD(self._adapted, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)

    def step(self, images: Tensor, engine: Engine) -> Step:
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
        """One update by images, of which a rank has its share, and the logits of them all."""
        weights, kept = self.weights(everybody)
        if not weights.isfinite().all():
            raise NonFiniteError("the weights of this batch are not finite; no update was applied.")
        places, total = engine.ranks.positions(images)
        mine = kept[places]
        pairs = torch.stack([images[mine], self.augmented(images, mine, engine)], dim=1)
        # the engine takes the mean over the kept samples, the paper the sum over them divided by all
        divisor = int(engine.batch_size) if self.reference else total
        share = weights[places][mine] * (int(kept.sum()) / divisor)
        result = engine.gradient(pairs, likelihood_ratio_and_consistency, extras=[share])
        self.remember(everybody)
        engine.adapted.update()
        self.ensemble(engine)
        return result.used, result.loss

    def augmented(self, images: Tensor, kept: Tensor, engine: Engine) -> Tensor:
        """One view of each kept image."""
        view = jitter_and_move(engine.to_pixels(images[kept]), engine.rng, padding="reflect", blur=False)
        return engine.from_pixels(view.clamp(0, 1))

    def remember(self, logits: Tensor) -> None:
        classes = logits.shape[-1]
        mean = or_uniform(self.average, classes)
        self.average[:classes] = self.decay * mean + (1 - self.decay) * logits.softmax(-1).mean(0)

    def weights(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """How much each sample of a batch counts, and whether it counts at all."""
        mean = or_uniform(self.average, logits.shape[-1])
        diversity = self.scaled(1 - F.cosine_similarity(mean[None], logits.softmax(-1), dim=-1))
        certainty = self.scaled(-entropy(logits))
        return (diversity * certainty / self.temperature).exp(), diversity >= diversity.mean()

    def scaled(self, values: Tensor) -> Tensor:
        """From 0, the least in the batch, to 1, the most."""
        least, most = values.min(), values.max()
        if least == most and not self.reference:
            return torch.ones_like(values)
        return (values - least) / (most - least)

    def corrected(self, logits: Tensor, everybody: Tensor) -> Tensor:
        """Logits weighted by the smoothed frequency of the classes in the batch."""
        samples, classes = everybody.shape
        frequency = everybody.softmax(-1).mean(0)
        smoothing = max(1 / samples, 1 / classes) / frequency.max()
        prior = (frequency + smoothing) / (1 + smoothing * classes)
        return logits * prior if self.reference else logits + prior.log()

    def ensemble(self, engine: Engine) -> None:
        """Move a little towards the source."""
        blend(engine.adapted.tensors, engine.adapted.source, self.source_momentum)


def likelihood_ratio_and_consistency(logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of pairs (image, view): the image's soft likelihood ratio, and the cross entropy between both, which both learn."""
    z, view = logits.unbind(1)
    loss = weight * (soft_likelihood_ratio(z) + symmetric_cross_entropy(view, z))
    return keep_all(loss)


def soft_likelihood_ratio(logits: Tensor) -> Tensor:
    """-sum p log(p / (1 - p)), with p at most 0.99."""
    p = logits.softmax(-1).clamp(max=0.99)
    return -(p * (p / (1 - p) + 1e-5).log()).sum(-1)

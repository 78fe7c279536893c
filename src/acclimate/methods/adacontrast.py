"""AdaContrast: Contrastive Test-Time Adaptation (Chen et al., CVPR 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.engine import Engine, keep_all
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..core.statecheck import COUNT
from ..errors import require_between, require_whole
from ..models.view import ModelView
from ._augment import mirrored, moco_view, views_of_each
from ._bank import Bank, ring
from ._predictions import log_mean_prediction, uniformity
from ._teacher import Teacher, require_nesterov, weights_and_biases


@register("adacontrast")
class AdaContrast(Method):
    """Learn refined pseudo labels, contrast samples of different classes, and keep the predictions diverse.

    The label of a sample is the vote of the nearest neighbours of its weakly augmented view in a bank of features and
    predictions. The loss has three parts. A strongly augmented view learns that label. The feature of this view is
    contrasted: it should be similar to the feature of another strong view, which an averaged model encodes, and different
    from earlier features in a queue that have other labels. The mean prediction of the batch should be diverse; for a single
    image this raises the entropy of its prediction. The logits come from after the update.

        y: label by vote;  z, q: logits and feature of the strong view;  k: feature of the other strong view
        contrast = -ln(exp(q k / T) / (exp(q k / T) + sum over n of exp(q n / T))),  n: queue with other labels than y
        m = mean of softmax(z) over the batch
        loss = mean of (alpha cross-entropy(z, y) + beta contrast) + eta sum_c m_c ln m_c

    The paper makes several passes over the target data. This is the online form of later benchmarks: one pass, a constant
    learning rate for all layers, predicted labels until the bank has enough samples, and views without crops.

    The method needs the normalisation of the model, to augment pixels (`adapt(..., mean=, std=)`), and memory for the
    averaged model.

    Args:
        lr: Learning rate.
        momentum: Momentum of SGD.
        nesterov: Whether to use Nesterov's momentum.
        weight_decay: Weight decay.
        teacher_momentum: Share of the averaged model that is kept at each step.
        queue: Number of features in the queue, and of samples in the bank.
        neighbours: Number of nearest neighbours in the bank that vote.
        refine_after: Number of samples after which the neighbours vote. Before that, the predicted labels are used.
        temperature: Temperature of the contrastive loss.
        alpha: Weight of the loss of the pseudo labels.
        beta: Weight of the contrastive loss.
        eta: Weight of the diversity loss.
        reference: Behave as the released code and its online port: the labels of the queue are replaced by those of this
            batch before they are compared, while its features are still the old ones; the bank grows by whole batches, and
            may become larger than the queue by a part of one; and the newest samples of the bank are the first to be
            replaced.
    """

    info = Info(
        paper="Chen et al., CVPR 2022",
        adapts="weights and biases of all layers, and their average",
        remembers="an average of all weights, and a queue of features and predictions",
        requires=("features",),
        augments=True,
        predicts_after=True,
        quick={"queue": 16, "neighbours": 3, "refine_after": 8},
        passes=(6, 1),
    )

    def __init__(
        self,
        *,
        lr: float = 0.0002,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 0.0001,
        teacher_momentum: float = 0.999,
        queue: int = 16_384,
        neighbours: int = 10,
        refine_after: int = 1024,
        temperature: float = 0.07,
        alpha: float = 1.0,
        beta: float = 1.0,
        eta: float = 1.0,
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_between(0, math.inf, lr=lr, weight_decay=weight_decay, alpha=alpha, beta=beta, eta=eta)
        require_between(0, 1, momentum=momentum, teacher_momentum=teacher_momentum)
        require_nesterov(nesterov, momentum)
        require_between(1e-6, math.inf, temperature=temperature)
        require_whole(1, queue=queue, neighbours=neighbours, refine_after=refine_after)
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.teacher_momentum = teacher_momentum
        self.queue = queue
        self.neighbours = neighbours
        self.refine_after = refine_after
        self.temperature = temperature
        self.alpha = alpha
        self.beta = beta
        self.eta = eta
        self.reference = reference

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt the weights and biases of all layers, and create the averaged model, the bank and the queue."""
        self._adapted = weights_and_biases(view)
        self.teacher = Teacher(self._adapted)
        self.bank = Bank(self.queue, view, lagging=self.reference)
        width = view.feature_width
        self.queue_features: Tensor
        self.queue_labels: Tensor
        self.queue_at: Tensor
        noise = F.normalize(torch.randn(self.queue, width, generator=setup.rng), dim=-1)
        labels = torch.randint(view.classes, (self.queue,), generator=setup.rng)
        self.register_buffer("queue_features", noise.to(view.device, view.precise))
        self.register_buffer("queue_labels", labels.to(view.device))
        self.register_buffer("queue_at", torch.tensor(0))  # index of the next entry
        self.ranges = {"queue_labels": (0, view.classes - 1), "queue_at": COUNT}
        return self._adapted

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over all adapted parameters."""
        return torch.optim.SGD(self._adapted, self.lr, self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Learn from pseudo labels, contrast and diversity in one update, and predict with the updated model."""
        weak, query, key = self.views(images, engine)
        labels = self.pseudo_labels(*engine.features(weak))
        average = self.teacher.ahead(engine.adapted.tensors, self.teacher_momentum)
        with engine.adapted.using(average):
            keys = F.normalize(engine.features(key)[1], dim=-1)
        all_keys, all_labels = engine.ranks.gather(keys), engine.ranks.gather(labels)
        entries = ring(int(self.queue_at), len(all_labels), self.queue)
        new_labels = self.queue_labels.clone()
        new_labels[entries] = all_labels[-self.queue :]
        known = new_labels if self.reference else self.queue_labels
        log_mean = log_mean_prediction(query, engine)

        def objective(logits: Tensor, features: Tensor, label: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            feature = F.normalize(features, dim=-1)
            others = (feature @ self.queue_features.to(feature).T).masked_fill(label[:, None] == known, -math.inf)
            contrast = torch.cat([(feature * key).sum(-1, keepdim=True), others], dim=-1) / self.temperature
            loss = self.alpha * F.cross_entropy(logits, label, reduction="none")
            loss = loss - self.beta * contrast.log_softmax(-1)[:, 0]
            loss = loss + self.eta * uniformity(logits, log_mean)
            return keep_all(loss)

        result = engine.gradient(query, objective, extras=[labels, keys], forward=lambda x, *_: engine.forward_features(x))
        engine.adapted.update()
        self.teacher.become(average)
        self.queue_features[entries] = all_keys[-self.queue :].to(self.queue_features)
        self.queue_labels.copy_(new_labels)
        self.queue_at.fill_((int(self.queue_at) + len(all_labels)) % self.queue)
        with engine.adapted.using(self.teacher.weights):
            logits, features = engine.features(weak)
        self.bank.remember(engine.ranks.gather(features), engine.ranks.gather(logits.softmax(-1)))
        return Step(engine.predict(images), used=result.used, loss=result.loss)

    def views(self, images: Tensor, engine: Engine) -> tuple[Tensor, Tensor, Tensor]:
        """Return a weak and two strong views of each image."""
        weak, query, key = views_of_each(images, engine, (mirrored, moco_view, moco_view))
        return weak, query, key

    def pseudo_labels(self, logits: Tensor, features: Tensor) -> Tensor:
        """Return the pseudo labels, given logits and features of the weak view."""
        return self.bank.labels(logits, features, neighbours=self.neighbours, after=self.refine_after)

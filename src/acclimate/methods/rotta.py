"""RoTTA: Robust Test-Time Adaptation in Dynamic Scenarios (Yuan et al., CVPR 2023)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.engine import Engine, entropy, keep_all
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..core.statecheck import COUNT
from ..errors import ConfigError, require_between, require_whole
from ..models.view import ModelView, parameters_of
from ._augment import noisy_view
from ._teacher import Teacher
from ._window import memory_of, require_size_of

EMPTY = -1


@register("rotta")
class RoTTA(Method):
    """Train a student with an averaged teacher on a memory of recent, certain and class-balanced samples.

    The teacher predicts, and its logits from before any update in the batch are returned. Each sample is a candidate for the
    memory, in which every class has an equal share. After a fixed number of samples, also within a batch, the
    student learns from the memory: its predictions of augmented views should equal those of the teacher for the images
    themselves. Older samples have less weight. Then the teacher is updated.

        score = lambda_t sigmoid(age / memory) + lambda_u H(z) / ln C:  the highest leaves the memory first
        loss = mean over the memory of sigmoid(-age / memory) cross-entropy(teacher(x), student(view of x))
        w' <- (1 - nu) w' + nu w,  where w' is the teacher and w the student

    The method needs the normalisation of the model, to augment pixels (`adapt(..., mean=, std=)`), images of one size, and
    memory for some of them. The statistics of BatchNorm layers start at those of the source, and follow the memory at each
    update. Here teacher and student share them (ours). Later benchmarks port the method to a ViT by an adaptation of the
    norms. The augmentation is that of CoTTA. Weights in float16 are refused, because the squared gradients
    of Adam are too small for it.

    Args:
        lr: Learning rate of Adam.
        betas: Decay rates of the moments of Adam.
        nu: Share of the student in the average of the teacher at each update.
        memory: Number of images in the memory.
        every: Number of samples between two updates.
        alpha: Share of the memory in the statistics of BatchNorm at each update.
        lambda_t: Weight of the age of a sample in the score. Samples with a high score are removed from the memory first.
        lambda_u: Weight of the entropy of a sample in the score.
        reference: Accepted by every method. The released code has no quirk to reproduce here.
    """

    info = Info(
        paper="Yuan et al., CVPR 2023",
        adapts="all norms, and their average",
        requires=("norms",),
        remembers="an average of the norms, statistics of BatchNorm, and 64 images",
        augments=True,
        float16=False,
        quick={"memory": 8, "every": 8},
        passes=(3, 1),
    )

    def __init__(
        self,
        *,
        lr: float = 0.001,
        betas: Sequence[float] = (0.9, 0.999),
        nu: float = 0.001,
        memory: int = 64,
        every: int = 64,
        alpha: float = 0.05,
        lambda_t: float = 1.0,
        lambda_u: float = 1.0,
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_between(0, math.inf, lr=lr, lambda_t=lambda_t, lambda_u=lambda_u)
        require_between(0, 1, nu=nu, alpha=alpha)
        require_whole(1, memory=memory, every=every)
        numbers = [beta for beta in betas if isinstance(beta, (int, float))] if isinstance(betas, Sequence) else []
        if len(numbers) != 2 or len(betas) != 2 or not all(0 <= beta < 1 for beta in numbers):
            raise ConfigError(f"betas={betas!r}: give two numbers from 0 to below 1.")
        self.lr = lr
        self.betas = tuple(float(beta) for beta in betas)
        self.nu = nu
        self.memory = memory
        self.every = every
        self.alpha = alpha
        self.lambda_t = lambda_t
        self.lambda_u = lambda_u
        self.reference = reference

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt all norms, and create the teacher and the memory."""
        self._adapted = parameters_of(view.norms)
        self.teacher = Teacher(self._adapted)
        self.statistics = view.move_statistics(self.alpha)
        self.images: Tensor
        self.labels: Tensor
        self.entropies: Tensor
        self.arrivals: Tensor
        self.seen: Tensor
        self.register_buffer("images", memory_of(self.memory, view))
        self.register_buffer("labels", torch.full((self.memory,), EMPTY))  # predicted labels, or EMPTY
        self.register_buffer("entropies", torch.zeros(self.memory))
        self.register_buffer("arrivals", torch.zeros(self.memory, dtype=torch.long))  # number of samples before this one
        self.register_buffer("seen", torch.tensor(0))
        self.ranges = {"labels": (EMPTY, view.classes - 1), "arrivals": COUNT, "seen": COUNT}
        return self._adapted

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return Adam over the norms."""
        return torch.optim.Adam(self._adapted, lr=self.lr, betas=(self.betas[0], self.betas[1]))

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Return the logits of the teacher."""
        return self.teacher.predict(images, engine)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Predict with the teacher, store the samples in the memory, and learn from it at fixed intervals."""
        require_size_of(self.images, images)
        logits = self.teacher.predict(images, engine)
        everybody, batch = engine.ranks.gather(logits), engine.ranks.gather(images)
        uncertainty, labels = entropy(everybody).tolist(), everybody.argmax(-1).tolist()
        step = Step(logits)
        for image, label, h in zip(batch, labels, uncertainty):
            place = self.place_for(label, h, engine.num_classes)
            if place is not None:
                self.images[place] = image
                self.labels[place] = label
                self.entropies[place] = h
                self.arrivals[place] = self.seen
            self.seen += 1
            if int(self.seen) % self.every == 0:
                step.used, step.loss = self.learn(engine)
        return step

    def place_for(self, label: int, uncertainty: float, classes: int) -> int | None:
        """Return the index in the memory for a new sample of this class, or None if it is not stored.

        The index is that of a free entry, or of a sample with a higher score. Every class has an equal share of the entries,
        and at least one. If the class has less than its share and the memory is full, the new sample competes with samples
        of the largest classes. If the class has its share, the new sample competes with samples of its own class.
        """
        labels = self.labels.cpu()
        taken = labels != EMPTY
        counts = labels[taken].bincount(minlength=classes)
        if int(counts[label]) < self.memory / classes:
            if not taken.all():
                return int((~taken).nonzero()[0])
            rivals = (counts == counts.max())[labels]
        else:
            rivals = labels == label
        score = self.score(self.ages(), self.entropies.cpu(), classes)
        worst = int(score.where(rivals, -math.inf).argmax())
        newcomer = self.score(torch.zeros(1), torch.tensor([uncertainty]), classes)
        return worst if score[worst] > newcomer else None

    def ages(self) -> Tensor:
        """Return the age of each entry, as a number of samples."""
        return (self.seen - self.arrivals).cpu()

    def score(self, ages: Tensor, uncertainty: Tensor, classes: int) -> Tensor:
        """Return the score of samples; a sample with a higher score is removed earlier."""
        return self.lambda_t * (ages / self.memory).sigmoid() + self.lambda_u * uncertainty / math.log(classes)

    def learn(self, engine: Engine) -> tuple[int, float]:
        """Learn from the memory in one update, and return the number of its samples and the loss."""
        filled = (self.labels != EMPTY).nonzero()[:, 0]
        images = self.images[filled]
        ages = self.ages()[filled.cpu()].to(engine.view.precise)
        weights = torch.sigmoid(-(ages / self.memory)).to(images.device)
        views = self.augmented(images, filled, engine)
        with self.following():
            target = self.teacher.predict(engine.ranks.share(images), engine)
        result = engine.gradient(
            engine.ranks.share(views), weighted_cross_entropy, extras=[target, engine.ranks.share(weights)]
        )
        engine.adapted.update()
        self.teacher.follow(engine.adapted.tensors, 1 - self.nu)
        return result.used, result.loss

    @contextmanager
    def following(self) -> Iterator[None]:
        """Let the statistics of BatchNorm follow the images that are passed inside the block."""
        moving: Any = list(self.statistics)
        for each in moving:
            each.follows = True
        try:
            yield
        finally:
            for each in moving:
                each.follows = False

    def augmented(self, images: Tensor, places: Tensor, engine: Engine) -> Tensor:
        """Return an augmented view of each image at these indices of the memory."""
        return noisy_view(images, torch.randn(images.shape, generator=engine.rng), engine)


def weighted_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted cross entropy from teacher to student, and that every sample is kept."""
    loss = -weight * (target.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return keep_all(loss)

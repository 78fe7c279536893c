"""RoTTA: Robust Test-Time Adaptation in Dynamic Scenarios (Yuan et al., CVPR 2023)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..core.engine import Engine, entropy, keep_all
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..errors import ConfigError, require_between, require_whole
from ..models.view import ViT, parameters_of, require_supported
from ._adam import require_room_for_squares
from ._augment import noisy_view
from ._teacher import Teacher

EMPTY = -1


@register("rotta")
class RoTTA(Method):
    """A student learns from an averaged teacher on a memory of samples that are recent, sure and of all classes.

    The teacher predicts, and its logits are returned, from before any update in the batch. Each sample is offered to the
    memory, where every class has the same room. After every so many samples, also in the middle of a batch, the student
    learns on augmented views of the memory to predict what the teacher does without, the less of a sample the older it is;
    then the teacher follows.

    Needs the model's normalisation, to augment pixels (`adapt(..., mean=, std=)`), images of one size, and memory for some
    of them. The paper replaces BatchNorm, which a ViT has not; to adapt the norms of a ViT is how later benchmarks port it.
    The augmentation is CoTTA's. Weights in float16 are refused, because Adam's squared gradients do not fit into it.

    Args:
        lr: Learning rate of Adam.
        betas: Decay of Adam's moments.
        nu: Share of the student in the teacher's average, at each update.
        memory: Images in the memory.
        every: Samples from one update to the next.
        lambda_t: Weight of a sample's age in the score by which it has to leave the memory.
        lambda_u: Weight of its entropy.
        reference: Accepted by every method; the released code has no quirk to reproduce here.
    """

    info = Info(
        paper="Yuan et al., CVPR 2023",
        adapts="all norms, and their average",
        remembers="an average of the norms, and 64 images",
        augments=True,
        updates_once=False,
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
        lambda_t: float = 1.0,
        lambda_u: float = 1.0,
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_between(0, math.inf, lr=lr, lambda_t=lambda_t, lambda_u=lambda_u)
        require_between(0, 1, nu=nu)
        require_whole(1, memory=memory, every=every)
        numbers = [beta for beta in betas if isinstance(beta, (int, float))] if isinstance(betas, Sequence) else []
        if len(numbers) != 2 or len(betas) != 2 or not all(0 <= beta < 1 for beta in numbers):
            raise ConfigError(f"betas={betas!r}: give two numbers from 0 to below 1.")
        self.lr = lr
        self.betas = tuple(float(beta) for beta in betas)
        self.nu = nu
        self.memory = memory
        self.every = every
        self.lambda_t = lambda_t
        self.lambda_u = lambda_u
        self.reference = reference

    def attach(self, vit: ViT, setup: Setup) -> Iterable[nn.Parameter]:
        require_supported(vit.model, vit.image_size is not None, "RoTTA remembers images, which have to be of one size")
        self._adapted = parameters_of(vit.norms)
        require_room_for_squares(vit, self._adapted)
        self.teacher = Teacher(self._adapted)
        self.images: Tensor
        self.labels: Tensor
        self.entropies: Tensor
        self.arrivals: Tensor
        self.seen: Tensor
        size = vit.image_size or ()
        zeros = torch.zeros(self.memory, vit.channels, *size, dtype=vit.dtype, device=vit.device)
        self.register_buffer("images", zeros)
        self.register_buffer("labels", torch.full((self.memory,), EMPTY))  # predicted; a place may be empty
        self.register_buffer("entropies", torch.zeros(self.memory))
        self.register_buffer("arrivals", torch.zeros(self.memory, dtype=torch.long))  # how many samples came before
        self.register_buffer("seen", torch.tensor(0))
        return self._adapted

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        return torch.optim.Adam(self._adapted, lr=self.lr, betas=(self.betas[0], self.betas[1]))

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        return self.teacher.predict(images, engine)

    def step(self, images: Tensor, engine: Engine) -> Step:
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
        """Where a new sample of this class goes: a free place, or that of a sample which deserves it less; None if nowhere.

        A class has its share of the places, and at least one. Below that, the newcomer competes with the largest classes
        once the memory is full; otherwise with its own.
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
        """In samples, of each place."""
        return (self.seen - self.arrivals).cpu()

    def score(self, ages: Tensor, uncertainty: Tensor, classes: int) -> Tensor:
        """The higher, the sooner a sample leaves."""
        return self.lambda_t * (ages / self.memory).sigmoid() + self.lambda_u * uncertainty / math.log(classes)

    def learn(self, engine: Engine) -> tuple[int, float]:
        """One update on the memory: how many samples it holds, and their loss."""
        filled = (self.labels != EMPTY).nonzero()[:, 0]
        images = self.images[filled]
        ages = self.ages()[filled.cpu()].to(engine.vit.precise)
        weights = torch.sigmoid(-(ages / self.memory)).to(images.device)
        views = self.augmented(images, filled, engine)
        target = self.teacher.predict(engine.ranks.share(images), engine)
        result = engine.gradient(
            engine.ranks.share(views), weighted_cross_entropy, extras=[target, engine.ranks.share(weights)]
        )
        engine.adapted.update()
        self.teacher.follow(engine.adapted.tensors, 1 - self.nu)
        return result.used, result.loss

    def augmented(self, images: Tensor, places: Tensor, engine: Engine) -> Tensor:
        """A view of each image of these places in the memory."""
        return noisy_view(images, torch.randn(images.shape, generator=engine.rng), engine)


def weighted_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The student's against the teacher."""
    loss = -weight * (target.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return keep_all(loss)

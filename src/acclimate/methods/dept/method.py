"""DePT-G: Visual Prompt Tuning for Test-time Domain Adaptation (Gao et al., 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode

from ...core.engine import Engine, keep_all, require_finite
from ...core.method import Info, Method, Setup, Step
from ...core.registry import register
from ...errors import ConfigError, require_between, require_whole
from ...models.view import ModelView
from .._augment import mirrored, moco_view, resized_crop, views_of_each
from .._bank import Bank
from .._predictions import log_mean_prediction, uniformity
from .._teacher import Teacher, require_nesterov
from .network import PROMPTS, Prompted, Regulariser, Sizes, followed, sharpened


@register("dept-g")
class DePT(Method):
    """Tune prompts that were trained on the source, by refined pseudo labels and agreement with an averaged teacher.

    The blocks are divided into stages, and each stage has its own learned tokens in the sequence. The label of a sample is
    the vote of the nearest neighbours of its weakly augmented view in a bank of features and predictions. The strong view of
    the student learns that label. It should also agree with the view of the teacher in the DINO outputs of the class token
    and of the prompts of every stage. The mean prediction should be diverse, and so should the prompts. Prompts, classifier
    and DINO heads adapt; all other parameters are frozen. The logits come from after the update. For a single image, the
    diversity loss raises the entropy of its prediction.

        y: label by vote;  m: mean prediction;  d, t: DINO outputs of student and teacher, for token and stages
        loss = mean of cross-entropy(z, y) + diversity sum_c m_c ln m_c
               + dino_weight (mean of cross-entropy(t_token, d_token))
               + prompt_weight (mean of sum_s v_s (1 - cos(d_s, t_s))),  where v = softmax(0, 1, ...) over the stages
               - prompt_diversity (mean distance between the prompts of a stage)

    Prompts, classifier and DINO heads have to be trained on labelled source images first. `acclimate train-prompts` does
    this once for a model, and `acclimate.adapt(model, "dept-g", source_statistics="prompts.safetensors")` loads them. They
    are kept in the state file. The method also needs the normalisation of the model, to augment pixels (`adapt(..., mean=,
    std=)`).

    Args:
        lr: Learning rate, the authors' for VisDA-C.
        momentum: Momentum of SGD.
        nesterov: Whether to use Nesterov's momentum.
        weight_decay: Weight decay.
        clip: Norm to which the gradient of each tensor is clipped.
        steps: Number of updates for each batch, each with new views.
        teacher_momentum: Share of the teacher that is kept at each step.
        bank: Number of samples in the bank.
        neighbours: Number of nearest neighbours in the bank that vote.
        refine_after: Number of samples after which the neighbours vote. Before that, the predicted labels are used.
        dino_weight: Weight of the agreement on the class token.
        prompt_weight: Weight of the agreement on the prompts.
        diversity: Weight of the diversity of the predictions.
        prompt_diversity: Weight of the diversity of the prompts.
        student_temperature: Temperature of the DINO outputs of the student.
        teacher_temperature: Temperature of the DINO outputs of the teacher.
        random_prompts: Whether to start with random prompts and DINO heads, and the classifier of the model. This needs no
            source data. It is not the method of the paper, but only similar to it.
        stages: Number of stages. By default this and the following sizes are those of the trained prompts. With random
            prompts the default is 4.
        prompts: Number of prompts of each stage. With random prompts the default is 50.
        hidden: Width of the hidden layer of a DINO head. With random prompts the default is 2048.
        bottleneck: Width of the second layer of a DINO head. With random prompts the default is 256.
        outputs: Number of outputs of a DINO head. With random prompts the default is 2048.
        reference: Behave as the released code in one process: the DINO centre follows the sum of a batch, not its mean.

    Ours, because the authors' code for streams is not public: one pass with several steps for each batch (their
    configuration names 4 iterations), a bank of the last samples instead of all, predicted labels until the bank has enough
    samples, no decay of the learning rate, and a weak view that is only mirrored. Not known, and therefore also ours: that
    labels come from the teacher, whose view is stored in the bank; weight decay and the temperature of the teacher, which
    are those of the source phase; that the DINO head of the last stage projects the class token, and that prompts are
    averaged before they are projected; that the vote of the neighbours becomes a hard label; that prompts should differ
    within a stage; that the DINO centre starts at 0 and keeps 0.9 of itself at each step, as in DINO.
    """

    info = Info(
        paper="Gao et al., arXiv 2022",
        adapts="prompts in 4 stages, classifier and DINO heads, and their average",
        remembers="an average of what adapts, and a bank of features and predictions",
        requires=("features", "blocks"),
        augments=True,
        predicts_after=True,
        needs=(PROMPTS,),
        quick={
            "random_prompts": True,
            "steps": 1,
            "bank": 16,
            "neighbours": 3,
            "refine_after": 8,
            "prompts": 3,
            "hidden": 16,
            "bottleneck": 8,
            "outputs": 12,
        },
    )

    def __init__(
        self,
        *,
        lr: float = 0.005,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 0.0001,
        clip: float = 1.0,
        steps: int = 4,
        teacher_momentum: float = 0.99,
        bank: int = 16_384,
        neighbours: int = 10,
        refine_after: int = 1024,
        dino_weight: float = 0.1,
        prompt_weight: float = 0.1,
        diversity: float = 1.0,
        prompt_diversity: float = 0.05,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.07,
        random_prompts: bool = False,
        stages: int | None = None,
        prompts: int | None = None,
        hidden: int | None = None,
        bottleneck: int | None = None,
        outputs: int | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_between(0, math.inf, lr=lr, weight_decay=weight_decay, clip=clip, dino_weight=dino_weight)
        require_between(0, math.inf, prompt_weight=prompt_weight, diversity=diversity, prompt_diversity=prompt_diversity)
        require_between(0, 1, momentum=momentum, teacher_momentum=teacher_momentum)
        require_between(1e-6, math.inf, student_temperature=student_temperature, teacher_temperature=teacher_temperature)
        require_whole(1, steps=steps, bank=bank, neighbours=neighbours, refine_after=refine_after)
        require_nesterov(nesterov, momentum)
        sizes = dict(stages=stages, prompts=prompts, hidden=hidden, bottleneck=bottleneck, outputs=outputs)
        self._wanted = {name: size for name, size in sizes.items() if size is not None}
        Sizes(**self._wanted)  # raises an error for an invalid size
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.clip = clip
        self.steps = steps
        self.teacher_momentum = teacher_momentum
        self.bank = bank
        self.neighbours = neighbours
        self.refine_after = refine_after
        self.dino_weight = dino_weight
        self.prompt_weight = prompt_weight
        self.diversity = diversity
        self.prompt_diversity = prompt_diversity
        self.student_temperature = student_temperature
        self.teacher_temperature = teacher_temperature
        self.random_prompts = random_prompts
        self.stages = stages
        self.prompts = prompts
        self.hidden = hidden
        self.bottleneck = bottleneck
        self.outputs = outputs
        self.reference = reference
        if random_prompts:
            self.info = replace(self.info, needs=())
        self.info = replace(self.info, passes=(4 * self.steps + 1, self.steps))

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Insert prompts and classifier into the model, and adapt them together with the DINO heads."""
        self.learned = Prompted(view, self._sizes(setup), setup.rng)
        if self.info.needs:
            self.learned.load_state_dict(setup.statistics_of(PROMPTS))
        self.learned.insert(view)
        self._adapted = list(self.learned.parameters())
        self.teacher = Teacher(self._adapted)
        self.memory = Bank(self.bank, view)
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(self.learned.sizes.outputs, dtype=view.precise, device=view.device))
        return self._adapted

    def _sizes(self, setup: Setup) -> Sizes:
        """Return the sizes of the trained prompts, or the chosen sizes if the prompts are random."""
        if setup.statistics is None or not self.info.needs:
            return Sizes(**self._wanted)
        sizes = Sizes.of(setup.statistics.about)
        for name, size in self._wanted.items():
            if size != getattr(sizes, name):
                raise ConfigError(
                    f"{name}={size}: {setup.statistics.origin} has {getattr(sizes, name)}. Leave it out, or train again."
                )
        return sizes

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over prompts, classifier and DINO heads."""
        return torch.optim.SGD(self._adapted, self.lr, self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Learn from several sets of views of the batch, and predict with the updated model."""
        for _ in range(self.steps):
            weak, first, second = self.views(images, engine)
            average = self.teacher.ahead(engine.adapted.tensors, self.teacher_momentum)
            with engine.adapted.using(average):
                logits, features = engine.features(weak)
                _, _, token, stages = engine.evaluate(first, lambda x: self.embed(x, engine))
            everybody = engine.ranks.gather(token)
            require_finite(logits, everybody)
            used, loss = self.learn(second, self.labels(logits, features), token, stages, engine)
            self.teacher.become(average)
            self.centre.copy_(followed(self.centre, everybody.sum(0) if self.reference else everybody.mean(0)))
        self.memory.remember(engine.ranks.gather(features), engine.ranks.gather(logits.softmax(-1)))
        return Step(engine.predict(images), used=used, loss=loss)

    def learn(self, images: Tensor, labels: Tensor, token: Tensor, stages: Tensor, engine: Engine) -> tuple[int, float]:
        """Learn from the view of the student in one update, and return the number of samples and the loss.

        `token` and `stages` are the DINO outputs of the teacher for its own view.
        """
        log_mean = log_mean_prediction(images, engine)
        target = sharpened(token, self.centre.to(token), self.teacher_temperature)
        regulariser = Regulariser(self.dino_weight, self.prompt_weight, self.prompt_diversity, self.student_temperature)
        prompts = list(self.learned.prompts)

        def objective(
            logits: Tensor, _: Tensor, token: Tensor, stages: Tensor, label: Tensor, target: Tensor, stage_target: Tensor
        ) -> tuple[Tensor, Tensor]:
            loss = F.cross_entropy(logits, label, reduction="none") + self.diversity * uniformity(logits, log_mean)
            return keep_all(loss + regulariser(token, stages, target, stage_target, prompts))

        given = [labels, target, stages]
        result = engine.gradient(images, objective, extras=given, forward=lambda x, *_: self.embed(x, engine))
        for p in engine.adapted.tensors:
            nn.utils.clip_grad_norm_([p], self.clip)
        engine.adapted.update()
        return result.used, result.loss

    def embed(self, images: Tensor, engine: Engine) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits, features, and the DINO outputs of the class token and of the prompts."""
        return self.learned.embed(engine.view, images, engine.forward_features)

    def labels(self, logits: Tensor, features: Tensor) -> Tensor:
        """Return the pseudo labels, given logits and features of the weak view."""
        return self.memory.labels(logits, features, neighbours=self.neighbours, after=self.refine_after)

    def views(self, images: Tensor, engine: Engine) -> tuple[Tensor, Tensor, Tensor]:
        """Return a weak view of each image, a strong view for the teacher, and a strong view for the student."""
        weak, first, second = views_of_each(images, engine, (mirrored, strong_view, strong_view))
        return weak, first, second


def strong_view(image: Tensor, rng: torch.Generator) -> Tensor:
    """Return a random crop at full size, with random changes of colour, conversion to grey, blur and mirroring."""
    part = resized_crop(image, rng, least=0.2, interpolation=InterpolationMode.BICUBIC)
    return moco_view(part, rng)

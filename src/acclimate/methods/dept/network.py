"""The networks of DePT and their regulariser.

They are learned first on source data (`acclimate train-prompts`), and then on the target.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.statistics import Statistic
from ...errors import ConfigError, require_whole
from ...models.surgery import capture
from ...models.view import ModelView

CENTRE = 0.9  # share of the centre that stays at each step, as in DINO


@dataclass(frozen=True)
class Sizes:
    """The sizes of the networks.

    Args:
        stages: Number of stages into which the blocks are divided.
        prompts: Number of tokens of each stage.
        hidden: Width of the hidden layer of a DINO head.
        bottleneck: Width of the second layer of a DINO head.
        outputs: Number of outputs of a DINO head.
    """

    stages: int = 4
    prompts: int = 50
    hidden: int = 2048
    bottleneck: int = 256
    outputs: int = 2048

    def __post_init__(self) -> None:
        require_whole(1, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> Sizes:
        """Return the sizes in the description of trained prompts."""
        return cls(**{field.name: about[field.name] for field in fields(cls)})


class DinoHead(nn.Module):
    """The projection head of DINO, from (..., width) to (..., outputs): two layers, then cosines with learned directions.

    The cosines are the output of a last layer with weight vectors of length 1 for a normalised bottleneck.
    """

    def __init__(self, width: int, sizes: Sizes, view: ModelView, rng: torch.Generator) -> None:
        super().__init__()

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(
                nn.init.trunc_normal_(torch.empty(shape), std=0.02, generator=rng).to(view.device, view.dtype)
            )

        def zeros(count: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(count, device=view.device, dtype=view.dtype))

        self.weight1, self.bias1 = drawn(sizes.hidden, width), zeros(sizes.hidden)
        self.weight2, self.bias2 = drawn(sizes.bottleneck, sizes.hidden), zeros(sizes.bottleneck)
        self.directions = drawn(sizes.outputs, sizes.bottleneck)

    def forward(self, x: Tensor) -> Tensor:
        """Return the cosines of the projected input with the learned directions."""
        x = F.linear(F.gelu(F.linear(x.to(self.weight1), self.weight1, self.bias1)), self.weight2, self.bias2)
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.directions, dim=-1))


class Prompted(nn.Module):
    """The prompts of each stage, a classifier that starts as that of the model, and a DINO head for each stage.

    Args:
        view: The model.
        sizes: The sizes of the networks.
        rng: The generator of the initial values: prompts by the rule of Xavier and Glorot, heads as in DINO.
    """

    def __init__(self, view: ModelView, sizes: Sizes, rng: torch.Generator) -> None:
        super().__init__()
        depth = len(view.blocks)
        if sizes.stages > depth:
            raise ConfigError(f"stages={sizes.stages}: this model has {depth} blocks, and a stage needs at least one.")
        self.sizes = sizes
        self.starts = [stage * depth // sizes.stages for stage in range(sizes.stages)]
        drawn = (nn.init.xavier_uniform_(torch.empty(sizes.prompts, view.width), generator=rng) for _ in self.starts)
        self.prompts = nn.ParameterList(nn.Parameter(p.to(view.device, view.dtype)) for p in drawn)
        self.head = copy.deepcopy(view.head)
        self.dino = nn.ModuleList(DinoHead(view.width, sizes, view, rng) for _ in self.starts)

    def insert(self, view: ModelView) -> None:
        """Insert the prompts and the classifier into the model."""
        view.prompt(dict(zip(self.starts, self.prompts)), read=True)
        view.exchange_head(self.head)

    def embed(
        self, view: ModelView, images: Tensor, forward: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits and features of a pass, and the DINO outputs of the class token and of the prompts.

        The DINO outputs of the class token, (batch, outputs), are those of the head of the last stage. Those of the prompts,
        (batch, stages, outputs), are computed from the mean of the prompts of each stage at its end.
        """
        ends = [view.blocks[start - 1].module for start in (*self.starts[1:], len(view.blocks))]
        with capture(ends) as seen:
            logits, features = forward(images)
        means = [seen[end].outputs[:, 1 : 1 + self.sizes.prompts].mean(1) for end in ends]
        return logits, features, self.dino[-1](features), torch.stack([d(m) for d, m in zip(self.dino, means)], dim=1)


@dataclass(frozen=True)
class Regulariser:
    """The losses of a student beside that of its labels: agreement with a teacher, and diversity of the prompts.

    Args:
        dino: Weight of the cross entropy between the DINO outputs of student and teacher for the class token.
        prompt: Weight of the distance between the DINO outputs of student and teacher for the prompts.
        spread: Weight of the distance of the prompts from each other.
        temperature: Temperature of the outputs of the student.
    """

    dino: float
    prompt: float
    spread: float
    temperature: float

    def __call__(
        self, token: Tensor, stages: Tensor, target: Tensor, stage_target: Tensor, prompts: Sequence[Tensor]
    ) -> Tensor:
        """Return the loss of each sample.

        `target` and `stage_target` are outputs of the teacher; the first is sharpened.
        """
        loss = -self.dino * (target * (token / self.temperature).log_softmax(-1)).sum(-1)
        loss = loss + self.prompt * stage_distance(stages, stage_target)
        return loss - self.spread * torch.stack([mean_distance(p) for p in prompts]).mean()


def sharpened(outputs: Tensor, centre: Tensor, temperature: float) -> Tensor:
    """Return the outputs of a teacher as probabilities, softmax((outputs - centre) / temperature).

    The centre prevents that one output is always the largest.
    """
    return ((outputs - centre) / temperature).softmax(-1)


def followed(centre: Tensor, outputs: Tensor) -> Tensor:
    """Return the centre of the outputs of a teacher, updated with those of one more batch."""
    return CENTRE * centre + (1 - CENTRE) * outputs.to(centre)


def stage_distance(stages: Tensor, others: Tensor) -> Tensor:
    """Return the weighted cosine distance over the stages, where stage i has a weight proportional to e^i."""
    weights = torch.arange(stages.shape[1], device=stages.device, dtype=stages.dtype).softmax(0)
    return ((1 - F.cosine_similarity(stages, others, dim=-1)) * weights).sum(-1)


def mean_distance(prompts: Tensor) -> Tensor:
    """Return the mean cosine distance of two different prompts, or 0 if there is only one."""
    count = len(prompts)
    directions = F.normalize(prompts, dim=-1)
    return (count**2 - (directions @ directions.T).sum()) / max(count * (count - 1), 1)


class TrainedPrompts(Statistic):
    """Prompts, classifier and DINO heads that were trained on labelled source images."""

    kind = "prompts"
    what = "prompts that were trained on labelled source data"
    how = (
        "acclimate train-prompts --model NAME --data folder --root DIR --out prompts.safetensors on the command line. "
        "With random_prompts=True it does without, and is then not the paper's method"
    )
    learned = True

    @classmethod
    def empty(cls, view: ModelView, about: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return tensors with the names and shapes of the trained prompts."""
        return dict(Prompted(view, Sizes.of(about), torch.Generator()).state_dict())


PROMPTS = TrainedPrompts.kind


def named_prompts(learned: nn.Module) -> dict[str, Tensor]:
    """Return the learned tensors, with the names that they have in source statistics."""
    return {f"{PROMPTS}/{name}": tensor.detach().clone() for name, tensor in learned.state_dict().items()}

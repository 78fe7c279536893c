"""What DePT learns, first on source data (`acclimate train-prompts`) and then on the target, and what keeps it in bounds."""

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
from ...models.surgery import tap
from ...models.view import ViT

CENTRE = 0.9  # share of the centre that stays at each step, as in DINO


@dataclass(frozen=True)
class Sizes:
    """Of what is learned.

    Args:
        stages: Into so many stages the blocks are divided.
        prompts: Tokens of each stage.
        hidden: Width of the hidden layer of a DINO head.
        bottleneck: Width of its second layer.
        outputs: How many outputs it has.
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
        """From what is written about trained prompts."""
        return cls(**{field.name: int(about[field.name]) for field in fields(cls)})


class DinoHead(nn.Module):
    """DINO's projection, (..., width) to (..., outputs): two layers, then cosines with learned directions.

    Cosines are what a last layer with normalised weights of length 1 computes of a normalised bottleneck.
    """

    def __init__(self, width: int, sizes: Sizes, vit: ViT, rng: torch.Generator) -> None:
        super().__init__()

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02, generator=rng).to(vit.device, vit.dtype))

        def zeros(count: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(count, device=vit.device, dtype=vit.dtype))

        self.weight1, self.bias1 = drawn(sizes.hidden, width), zeros(sizes.hidden)
        self.weight2, self.bias2 = drawn(sizes.bottleneck, sizes.hidden), zeros(sizes.bottleneck)
        self.directions = drawn(sizes.outputs, sizes.bottleneck)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(F.gelu(F.linear(x.to(self.weight1), self.weight1, self.bias1)), self.weight2, self.bias2)
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.directions, dim=-1))


class Prompted(nn.Module):
    """Prompts of each stage, a classifier that begins as the model's own, and a DINO head for each stage.

    Args:
        vit: The model.
        sizes: How much of it.
        rng: Where the initial values are drawn from: prompts after Xavier and Glorot, heads as DINO's.
    """

    def __init__(self, vit: ViT, sizes: Sizes, rng: torch.Generator) -> None:
        super().__init__()
        depth = len(vit.blocks)
        if sizes.stages > depth:
            raise ConfigError(f"stages={sizes.stages}: this model has {depth} blocks, and a stage needs at least one.")
        self.sizes = sizes
        self.starts = [stage * depth // sizes.stages for stage in range(sizes.stages)]
        drawn = (nn.init.xavier_uniform_(torch.empty(sizes.prompts, vit.width), generator=rng) for _ in self.starts)
        self.prompts = nn.ParameterList(nn.Parameter(p.to(vit.device, vit.dtype)) for p in drawn)
        self.head = copy.deepcopy(vit.head)
        self.dino = nn.ModuleList(DinoHead(vit.width, sizes, vit, rng) for _ in self.starts)

    def insert(self, vit: ViT) -> None:
        """Let the model run with these prompts and this classifier."""
        vit.prompt(dict(zip(self.starts, self.prompts)), read=True)
        vit.exchange_head(self.head)

    def embed(
        self, vit: ViT, images: Tensor, forward: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits and features of a pass, and what the DINO heads make of the class token and of each stage's prompts.

        The first is (batch, outputs), by the last stage's head; the second (batch, stages, outputs), each of the mean of a
        stage's prompts when they leave it.
        """
        ends = [vit.blocks[start - 1].module for start in (*self.starts[1:], len(vit.blocks))]
        with tap(ends) as seen:
            logits, features = forward(images)
        means = [seen[end].left[:, 1 : 1 + self.sizes.prompts].mean(1) for end in ends]
        return logits, features, self.dino[-1](features), torch.stack([d(m) for d, m in zip(self.dino, means)], dim=1)


@dataclass(frozen=True)
class Regulariser:
    """What a student is held to beside its labels: a teacher's view of the same image, and prompts that differ.

    Args:
        dino: Weight of the cross-entropy between the student's and the teacher's DINO outputs of the class token.
        prompt: Weight of the distance between those of the prompts.
        spread: Weight of the prompts' distance from each other.
        temperature: Of the student's outputs.
    """

    dino: float
    prompt: float
    spread: float
    temperature: float

    def __call__(
        self, token: Tensor, stages: Tensor, target: Tensor, stage_target: Tensor, prompts: Sequence[Tensor]
    ) -> Tensor:
        """Of each sample; `target` and `stage_target` are the teacher's, the first sharpened."""
        loss = -self.dino * (target * (token / self.temperature).log_softmax(-1)).sum(-1)
        loss = loss + self.prompt * stage_distance(stages, stage_target)
        return loss - self.spread * torch.stack([mean_distance(p) for p in prompts]).mean()


def sharpened(outputs: Tensor, centre: Tensor, temperature: float) -> Tensor:
    """A teacher's outputs as probabilities, none of which is always the largest."""
    return ((outputs - centre) / temperature).softmax(-1)


def followed(centre: Tensor, outputs: Tensor) -> Tensor:
    """The centre of a teacher's outputs after those of one more batch."""
    return CENTRE * centre + (1 - CENTRE) * outputs.to(centre)


def stage_distance(stages: Tensor, others: Tensor) -> Tensor:
    """Cosine distance of each stage, later ones counting more: by e to the power of their number."""
    weights = torch.arange(stages.shape[1], device=stages.device, dtype=stages.dtype).softmax(0)
    return ((1 - F.cosine_similarity(stages, others, dim=-1)) * weights).sum(-1)


def mean_distance(prompts: Tensor) -> Tensor:
    """Mean cosine distance of two different prompts; 0 if there is one alone."""
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
    def empty(cls, vit: ViT, about: Mapping[str, Any]) -> dict[str, Tensor]:
        return dict(Prompted(vit, Sizes.of(about), torch.Generator()).state_dict())


PROMPTS = TrainedPrompts.kind


def named_prompts(learned: nn.Module) -> dict[str, Tensor]:
    """Return what was learned, under the names that source statistics have."""
    return {f"{PROMPTS}/{name}": tensor.detach().clone() for name, tensor in learned.state_dict().items()}

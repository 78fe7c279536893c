"""DCT: Domain-Conditioned Transformer for Fully Test-time Adaptation (Tang et al., ACM MM 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.method import Setup
from ..core.registry import register
from ..errors import ConfigError, require_between
from ..models.view import ViT
from ._leading import leading_blocks
from .sar import SAR


class Conditioner(nn.Module):
    """One block's domain conditioners: a further query, key and value, made from the class token.

    Together the parts are the paper's Linear(width, 3 width). The output row of the appended query is discarded, so the
    logits do not depend on the query conditioner and its third of the weights would receive a gradient of zero: it is
    generated on demand only (`conditioners`) and never changes.

    Args:
        width: Width of the model.
        heads: Number of attention heads.
        parts: Which of "q", "k" and "v" are generated. A key or value that is not generated is zero.
        generator: Generate them from the class token; otherwise they are free vectors, the same for every sample.
        zero: Start from zeros instead of PyTorch's default for linear layers, U(-1/sqrt(width), 1/sqrt(width)).
        rng: Where the initial values are drawn from.
    """

    def __init__(self, width: int, heads: int, *, parts: str, generator: bool, zero: bool, rng: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.parts = parts
        bound = 0.0 if zero else 1 / math.sqrt(width)

        def draw(*shape: int) -> nn.ParameterDict:  # always all three, so that the parts do not depend on the choice
            thirds = torch.empty(3 * width, *shape).uniform_(-bound, bound, generator=rng).chunk(3)
            return nn.ParameterDict({part: nn.Parameter(thirds["qkv".index(part)].clone()) for part in parts})

        self.weights = draw(width) if generator else None
        self.biases = draw()

    def acting(self) -> list[nn.Parameter]:
        """The parameters that the logits depend on."""
        return [p for name, p in self.named_parameters() if not name.endswith(".q")]

    def generate(self, part: str, class_token: Tensor) -> Tensor:
        """One conditioner, (batch, heads, 1, head width)."""
        if part not in self.parts:
            out = torch.zeros_like(class_token)
        elif self.weights is None:
            out = self.biases[part].expand_as(class_token)
        else:
            out = F.linear(class_token, self.weights[part], self.biases[part])
        return out.unflatten(-1, (self.heads, -1)).unsqueeze(2)

    def key_value(self, class_token: Tensor) -> tuple[Tensor, Tensor]:
        return self.generate("k", class_token), self.generate("v", class_token)

    def conditioners(self, class_token: Tensor) -> Tensor:
        """All that are generated, (parts, batch, heads, 1, head width): for figures."""
        return torch.stack([self.generate(part, class_token) for part in self.parts])


@register("dct")
class DCT(SAR):
    """Domain conditioners beside the keys and values of self-attention, learned with the norms as in SAR.

    In every block but the last ones, a small generator turns the class token (after the block's first norm) into a query,
    key and value that are appended to those of the tokens; the appended row of the output is dropped. Generators and
    norms of these blocks are learned by sharpness-aware minimisation of the entropy of reliable samples.

    Args:
        lr: Learning rate of the norms; by default 0.001 for a batch of 64, proportional to the batch size.
        lr_generator: Learning rate of the generators. The authors use 0.01 for ViT-B whatever the batch size, 0.003 on
            ImageNet-R, and for ViT-L 0.001 at batch 32 and 0.0001 at batch 1. By default: that rule for 24 blocks and
            more (0.001, and 0.0001 for a batch of 1; `batch_size` says whose size counts), 0.01 otherwise.
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        rho: Radius of the sharpness-aware ascent.
        momentum: Momentum of SGD.
        recovery: Moving average of the loss below which the initial parameters come back.
        decay: Decay of that moving average.
        conditioners: Which of "q", "k", "v" exist. A key or value left out is zero (ours; the paper has no such ablation).
        generator: Make the conditioners from the class token; if False they are free vectors, one set per block (the
            paper's ablation; their initial values and learning rate are ours).
        init: "default", as the authors (the unadapted model is then not the source model), or "zero", which starts next to
            it.
        blocks: Which blocks are conditioned and adapt: a number (the first so many) or indices; by default all but the last
            quarter, of which at most three are left out (9 of 12, 21 of 24).
        batch_size: Batch size for the default learning rate; by default that of each batch, with reference=True that of the
            first.
        loss: What is minimised, and compared with the margin: "entropy", or "come", the opinion entropy of COME (Zhang et
            al., ICLR 2025) whose mass of uncertainty is the number of classes.
        reference: Behave as the authors' released code, quirks included: see `SAR`. In a 24-block model, blocks 9 to 11
            have conditioners that stay at their random initial values.
    """

    info = replace(
        SAR.info,
        paper="Tang et al., ACM MM 2024",
        adapts="norms and conditioner generators of all but the last blocks",
    )
    single_sample_lr_factor = 1

    def __init__(
        self,
        *,
        lr: float | None = None,
        lr_generator: float | None = None,
        margin: float | None = None,
        rho: float = 0.05,
        momentum: float = 0.9,
        recovery: float = 0.2,
        decay: float = 0.9,
        conditioners: str | Sequence[str] = "qkv",
        generator: bool = True,
        init: str = "default",
        blocks: int | Sequence[int] | None = None,
        batch_size: int | None = None,
        loss: str = "entropy",
        reference: bool = False,
    ) -> None:
        super().__init__(
            lr=lr,
            margin=margin,
            rho=rho,
            momentum=momentum,
            recovery=recovery,
            decay=decay,
            blocks=blocks,
            batch_size=batch_size,
            loss=loss,
            reference=reference,
        )
        require_between(0, math.inf, optional=True, lr_generator=lr_generator)
        self.lr_generator = lr_generator
        self.conditioners = "".join(conditioners)
        self.generator = generator
        self.init = init
        if not self.conditioners or any(
            self.conditioners.count(part) > 1 or part not in "qkv" for part in self.conditioners
        ):
            raise ConfigError(f'conditioners={conditioners!r}: choose from "q", "k" and "v".')
        if init not in ("default", "zero"):
            raise ConfigError(f'init={init!r}: choose "default" or "zero".')

    def attach(self, vit: ViT, setup: Setup) -> Iterable[nn.Parameter]:
        depth = len(vit.blocks)
        adapted = self.adapted_blocks(depth)
        conditioned = adapted if self.blocks is not None else leading_blocks(depth)
        self._depth = depth
        self.generators = nn.ModuleDict()  # by block
        self._generators: list[nn.Parameter] = []
        for i in conditioned:
            conditioner = Conditioner(
                vit.width,
                vit.blocks[i].heads,
                parts=self.conditioners,
                generator=self.generator,
                zero=self.init == "zero",
                rng=setup.rng,
            ).to(vit.device, vit.dtype)
            self.generators[str(i)] = conditioner
            if set(self.conditioners) & set("kv"):
                vit.blocks[i].open().extra = conditioner.key_value
            if i in adapted:
                self._generators += conditioner.acting()
        return [*super().attach(vit, setup), *self._generators]

    def generator_lr(self, batch_size: int) -> float:
        if self.lr_generator is not None:
            return self.lr_generator
        if self._depth < 24:
            return 0.01
        return 0.0001 if (self.batch_size or batch_size) == 1 else 0.001

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        groups = [
            {"params": self._norms, "lr": self.norm_lr(batch_size)},
            {"params": self._generators, "lr": self.generator_lr(batch_size)},
        ]
        return torch.optim.SGD(groups, momentum=self.momentum)

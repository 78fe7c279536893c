"""DCT: Domain-Conditioned Transformer for Fully Test-time Adaptation (Tang et al., ACM MM 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.method import Setup
from ..core.registry import register
from ..errors import ConfigError, require_between
from ..models.view import ModelView
from ._leading import leading_blocks
from .sar import SAR


class Conditioner(nn.Module):
    """The domain conditioners of one block: an additional query, key and value from the class token.

    Together the parts are the Linear(width, 3 width) of the paper. The output row of the appended query is discarded.
    Therefore the logits do not depend on the query conditioner, and its third of the weights would receive a gradient of
    zero. It is generated only on demand (`conditioners`) and never changes.

    Args:
        width: Width of the model.
        heads: Number of attention heads.
        parts: The parts that are generated, of "q", "k" and "v". A key or value that is not generated is zero.
        generator: Whether the parts are generated from the class token. Otherwise they are free vectors, the same for every
            sample.
        zero: Whether to start from zeros instead of PyTorch's default for linear layers, U(-1/sqrt(width), 1/sqrt(width)).
        rng: The generator of the initial values.
    """

    def __init__(self, width: int, heads: int, *, parts: str, generator: bool, zero: bool, rng: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.parts = parts
        bound = 0.0 if zero else 1 / math.sqrt(width)

        def draw(*shape: int) -> nn.ParameterDict:  # draws all three, so that the values do not depend on `parts`
            thirds = torch.empty(3 * width, *shape).uniform_(-bound, bound, generator=rng).chunk(3)
            return nn.ParameterDict({part: nn.Parameter(thirds["qkv".index(part)].clone()) for part in parts})

        self.weights = draw(width) if generator else None
        self.biases = draw()

    def acting(self) -> list[nn.Parameter]:
        """Return the parameters that the logits depend on."""
        return [p for name, p in self.named_parameters() if not name.endswith(".q")]

    def generate(self, part: str, class_token: Tensor) -> Tensor:
        """Return one conditioner, (batch, heads, 1, head width)."""
        if part not in self.parts:
            out = torch.zeros_like(class_token)
        elif self.weights is None:
            out = self.biases[part].expand_as(class_token)
        else:
            out = F.linear(class_token, self.weights[part], self.biases[part])
        return out.unflatten(-1, (self.heads, -1)).unsqueeze(2)

    def key_value(self, class_token: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key and the value conditioner."""
        return self.generate("k", class_token), self.generate("v", class_token)

    def conditioners(self, class_token: Tensor) -> Tensor:
        """Return all generated conditioners, (parts, batch, heads, 1, head width), for figures."""
        return torch.stack([self.generate(part, class_token) for part in self.parts])


@register("dct")
class DCT(SAR):
    """Learn domain conditioners in the self-attention, together with the norms, by the loss of SAR.

    In every block but the last ones, a small generator turns the class token (after the first norm of the block) into a
    query, key and value, which are appended to those of the tokens. The appended row of the output is discarded. The
    generators and norms of these blocks are learned by sharpness-aware minimisation of the entropy of reliable samples. In
    models with rotary positions or a relative position bias the appended key has no position (ours).

        X: tokens after the first norm of a block;  x: the class token among them
        (c_q, c_k, c_v) = G x + b
        Q = [X W_q; c_q],  K = [X W_k; c_k],  V = [X W_v; c_v]
        attention = softmax(Q K^T / sqrt(d)) V without its last row,  in each head of width d
        G, b and the norms learn by the steps of `sar`

    Args:
        lr: Learning rate of the norms; by default 0.001 for a batch of 64, proportional to the batch size.
        lr_generator: Learning rate of the generators. The authors use 0.01 for ViT-B at any batch size, 0.003 on ImageNet-R,
            and for ViT-L 0.001 at batch 32 and 0.0001 at batch 1. By default it follows the rule of ViT-L for 24 blocks and
            more (0.001, and 0.0001 for a batch of 1, where `batch_size` replaces the actual size if given), and is 0.01
            otherwise.
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        rho: Radius of the sharpness-aware ascent.
        momentum: Momentum of SGD.
        recovery: Value of the moving average of the loss below which the initial parameters are restored.
        decay: Decay of that moving average.
        conditioners: The conditioners that exist, of "q", "k", "v". A key or value that is left out is zero (ours; the paper
            has no such ablation).
        generator: Whether to generate the conditioners from the class token. If False, they are free vectors, one set per
            block (the paper's ablation; their initial values and learning rate are ours).
        token: "class", to generate from the class token, or "mean", from the mean of the patch tokens (ours), which models
            without a class token allow as well.
        init: "default", the initialisation of the authors, with which the unadapted model is not the source model; or
            "zero", which starts close to the source model.
        blocks: Blocks that have conditioners and adapt: a number (the first blocks) or indices. By default all but the last
            quarter, of which at most three are left out (9 of 12, 21 of 24).
        batch_size: Batch size for the default learning rate. By default it is that of each batch, and with reference=True
            that of the first batch.
        loss: The loss, which is also compared with the margin: "entropy", or "come", the opinion entropy of COME (Zhang et
            al., ICLR 2025), whose mass of uncertainty is the number of classes.
        reference: Behave as the authors' released code, with the quirks of `SAR`. In a 24-block model, blocks 9 to 11 have
            conditioners that stay at their random initial values, and blocks 21 to 23 have none.
    """

    info = replace(
        SAR.info,
        paper="Tang et al., ACM MM 2024",
        adapts="norms and conditioner generators of all but the last blocks",
        requires=("norms", "attention", "class token"),
    )
    reference_skip: ClassVar = SAR.reference_skip | {21, 22, 23}
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
        token: str = "class",
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
        self.token = token
        self.init = init
        if token not in ("class", "mean"):
            raise ConfigError(f'token={token!r}: choose "class" or "mean".')
        if token == "mean":
            self.info = replace(self.info, requires=("norms", "attention"))
        if not self.conditioners or any(
            self.conditioners.count(part) > 1 or part not in "qkv" for part in self.conditioners
        ):
            raise ConfigError(f'conditioners={conditioners!r}: choose from "q", "k" and "v".')
        if init not in ("default", "zero"):
            raise ConfigError(f'init={init!r}: choose "default" or "zero".')

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Insert the conditioners, and adapt them together with the norms."""
        depth = len(view.attentions)
        adapted = self.adapted_blocks(depth)
        conditioned = adapted if self.blocks is not None else leading_blocks(depth)
        self._depth = depth
        self.generators = nn.ModuleDict()  # the keys are block indices
        self._generators: list[nn.Parameter] = []
        for i in conditioned:
            conditioner = Conditioner(
                view.width,
                view.attentions[i].heads,
                parts=self.conditioners,
                generator=self.generator,
                zero=self.init == "zero",
                rng=setup.rng,
            ).to(view.device, view.dtype)
            self.generators[str(i)] = conditioner
            if set(self.conditioners) & set("kv"):
                after = None if self.token == "class" else view.prefix
                view.attentions[i].open().condition(conditioner.key_value, after=after)
            if i in adapted:
                self._generators += conditioner.acting()
        return [*super().attach(view, setup), *self._generators]

    def generator_lr(self, batch_size: int) -> float:
        """Return the learning rate of the generators for batches of this size."""
        if self.lr_generator is not None:
            return self.lr_generator
        if self._depth < 24:
            return 0.01
        return 0.0001 if (self.batch_size or batch_size) == 1 else 0.001

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over norms and generators, each with its own learning rate."""
        groups = [
            {"params": self._norms, "lr": self.norm_lr(batch_size)},
            {"params": self._generators, "lr": self.generator_lr(batch_size)},
        ]
        return torch.optim.SGD(groups, momentum=self.momentum)

"""VPT: Visual Prompt Tuning (Jia et al., ECCV 2022), learned at test time with SAR's loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from ..core.method import Setup
from ..core.registry import register
from ..errors import require_whole
from ..models.view import ViT
from ._prompts import new_prompts
from .sar import SAR


@register("vpt")
class VPT(SAR):
    """Prompt tokens behind the class token, learned by sharpness-aware minimisation of the entropy of reliable samples.

    The paper learns prompts from labels, and there is no test-time method of this name: that they are learned with the loss,
    the filter and the recovery of `SAR` is ours, as are all defaults. Nothing but the prompts changes, and it needs nothing
    beyond the batch. The unadapted model is not quite the source model, because the prompts do not begin at zero.

    Args:
        prompts: Number of prompt tokens. The paper chooses from 1 to 200 on validation data.
        deep: Every block has prompts of its own, in the place of those before it; otherwise the first one's go through all.
        lr: Learning rate; by default 0.1 for a batch of 64, proportional to the size of each batch, with reference=True to
            that of the first.
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        rho: Radius of the sharpness-aware ascent.
        momentum: Momentum of SGD.
        recovery: Moving average of the loss below which the initial prompts come back.
        loss: What is minimised, and compared with the margin: "entropy", or "come", as in `SAR`.
        reference: With the quirks of SAR's released code, see `SAR`.
    """

    info = replace(SAR.info, paper="Jia et al., ECCV 2022", adapts="prompt tokens")
    lr_at_64 = 0.1
    single_sample_lr_factor = 1

    def __init__(
        self,
        *,
        prompts: int = 10,
        deep: bool = False,
        lr: float | None = None,
        margin: float | None = None,
        rho: float = 0.05,
        momentum: float = 0.9,
        recovery: float = 0.2,
        loss: str = "entropy",
        reference: bool = False,
    ) -> None:
        super().__init__(lr=lr, margin=margin, rho=rho, momentum=momentum, recovery=recovery, loss=loss, reference=reference)
        require_whole(1, prompts=prompts)
        self.prompts = prompts
        self.deep = deep

    def attach(self, vit: ViT, setup: Setup) -> Iterable[nn.Parameter]:
        blocks = range(len(vit.blocks) if self.deep else 1)
        self.tokens = nn.ParameterList(new_prompts(vit, self.prompts, setup.rng) for _ in blocks)  # by block
        vit.prompt(dict(zip(blocks, self.tokens)))
        return list(self.tokens)

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.tokens, lr=self.norm_lr(batch_size), momentum=self.momentum)

"""VPT: Visual Prompt Tuning (Jia et al., ECCV 2022), learned at test time with SAR's loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from ..core.method import Setup
from ..core.registry import register
from ..errors import require_whole
from ..models.view import ModelView
from ._prompts import new_prompts
from .sar import SAR


@register("vpt")
class VPT(SAR):
    """Learn prompt tokens by sharpness-aware minimisation of the entropy of reliable samples.

    The prompts follow the class token. The paper learns prompts from labels, and there is no test-time method of this name.
    The use of the loss, the filter and the recovery of `SAR` is ours, as are all defaults. Only the prompts change, and the
    method needs only the batch. The unadapted model is not exactly the source model, because the initial prompts are not
    zero.

        tokens = [class token; P; patches];  P learns by the steps of `sar`

    Args:
        prompts: Number of prompt tokens. The paper chooses from 1 to 200 on validation data.
        deep: Whether every block has its own prompts, which replace those of the block before. Otherwise the prompts of the
            first block pass through all blocks.
        lr: Learning rate; by default 0.1 for a batch of 64, proportional to the size of each batch, or with reference=True
            to that of the first batch.
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        rho: Radius of the sharpness-aware ascent.
        momentum: Momentum of SGD.
        recovery: Value of the moving average of the loss below which the initial prompts are restored.
        loss: The loss, which is also compared with the margin: "entropy", or "come", as in `SAR`.
        reference: Behave as the released code of SAR, with the quirks that `SAR` lists.
    """

    info = replace(SAR.info, paper="Jia et al., ECCV 2022", adapts="prompt tokens", requires=("blocks",))
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

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Insert new prompts into the model, and adapt only these."""
        blocks = range(len(view.blocks) if self.deep else 1)
        self.tokens = nn.ParameterList(new_prompts(view, self.prompts, setup.rng) for _ in blocks)  # one per block
        view.prompt(dict(zip(blocks, self.tokens)))
        return list(self.tokens)

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over the prompts."""
        return torch.optim.SGD(self.tokens, lr=self.norm_lr(batch_size), momentum=self.momentum)

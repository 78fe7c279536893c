"""The parameters that SAR, DCT, DeYO, POEM, REM and ReCAP adapt: the norms of all but the last blocks or stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import nn

from ..core.engine import Engine
from ..core.method import RESNET_LR, Method, Setup, scaled_lr
from ..errors import ConfigError, require_between, require_whole
from ..models.view import ModelView, parameters_of


def leading_blocks(depth: int) -> range:
    """Return the blocks without the last quarter, of which at most three are left out: 9 of 12, 21 of 24."""
    return range(depth - min(3, depth // 4))


def _plain(blocks: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    """Return the option `blocks` as plain numbers, after checking that it consists of whole numbers."""
    if blocks is None or not isinstance(blocks, Iterable):
        require_whole(0, optional=True, blocks=blocks)
        return None if blocks is None else int(blocks)
    for each in blocks:
        require_whole(0, blocks=each)
    return tuple(int(each) for each in blocks)


class LeadingNorms(Method):
    """The base class of methods that adapt the norms of the leading blocks by SGD.

    In a model without blocks, stages take their place. The default learning rate is the usual one of the literature, and
    twice that for a batch of 1. For BatchNorm and GroupNorm it is SAR's for ResNet-50: 0.00025, and less for batches below
    32.
    """

    lr_at_64: ClassVar[float] = 0.001
    reference_skip: ClassVar = {9, 10, 11}  # blocks that the released code leaves out, however many there are
    single_sample_lr_factor = 2
    _layer_norms = True

    def __init__(
        self,
        *,
        lr: float | None,
        momentum: float,
        blocks: int | Sequence[int] | None,
        batch_size: int | None,
        reference: bool,
    ) -> None:
        super().__init__()
        require_between(0, math.inf, optional=True, lr=lr)
        require_whole(1, optional=True, batch_size=batch_size)
        require_between(0, 1, momentum=momentum)
        self.lr = lr
        self.momentum = momentum
        self.blocks = _plain(blocks)
        self.batch_size = batch_size
        self.reference = reference

    def adapted_blocks(self, depth: int, *, stages: bool = False) -> list[int]:
        """Return the indices of the blocks, or stages, whose parameters adapt."""
        if self.blocks is None:
            by_number = self.reference and not stages  # of the four stages of a ResNet, the released code leaves out layer4
            return [i for i in range(depth) if i not in self.reference_skip] if by_number else list(leading_blocks(depth))
        chosen = range(self.blocks) if isinstance(self.blocks, int) else self.blocks
        if not chosen or not all(0 <= i < depth for i in chosen) or len(set(chosen)) < len(chosen):
            raise ConfigError(f"blocks={self.blocks!r}: choose from the {depth} blocks of this model, 0 to {depth - 1}.")
        return list(chosen)

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt the norms of the chosen blocks."""
        stages = view.stages
        self._layer_norms = view.kind_of_norm == "layer"
        chosen = self.adapted_blocks(len(stages), stages=not view.blocks)
        self._norms = parameters_of(norm for i in chosen for norm in stages[i])
        return self._norms

    def norm_lr(self, batch_size: int) -> float:
        """Return the learning rate of the norms for batches of this size."""
        if self.lr is not None:
            return self.lr
        batch_size = self.batch_size or batch_size
        if not self._layer_norms:
            return RESNET_LR * min(1.0, batch_size / 32)
        return scaled_lr(batch_size, self.lr_at_64) * (self.single_sample_lr_factor if batch_size == 1 else 1)

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over the norms."""
        return torch.optim.SGD(self._norms, lr=self.norm_lr(batch_size), momentum=self.momentum)

    def update(self, engine: Engine, used: int) -> None:
        """Update the parameters, unless there was no sample to learn from.

        The released code of several methods still steps then, so that with `reference` momentum moves the parameters.
        """
        if not used and self.reference:
            engine.adapted.zero_gradient()
        if used or self.reference:
            engine.adapted.update()


def final_norms(view: ModelView) -> list[nn.Module]:
    """Return the norms between the last block and the head. A model without blocks has none."""
    norms = view.norms
    return norms[norms.index(view.blocks[-1].norms[-1]) + 1 :] if view.blocks else []

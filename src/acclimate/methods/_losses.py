"""Loss functions that several methods share, and the entropy margin of reliable samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..core.engine import Engine, entropy
from ..errors import ConfigError

LOSSES = ("entropy", "come")
COME_MASS = 1000  # in the released code of COME, for any number of classes


def require_loss(loss: str) -> None:
    """Raise an error if there is no loss of this name."""
    if loss not in LOSSES:
        raise ConfigError(f"loss={loss!r}: choose one of {', '.join(LOSSES)}.")


def uncertainty(loss: str, engine: Engine, *, reference: bool) -> Callable[[Tensor], Tensor]:
    """Return the function from logits to the loss of each sample.

    The loss is the entropy of the prediction, or the opinion entropy of COME.
    """
    if loss == "entropy":
        return entropy
    mass = COME_MASS if reference else engine.num_classes
    return lambda logits: opinion_entropy(logits, mass)


def opinion_entropy(logits: Tensor, mass: float) -> Tensor:
    """Return the entropy of a subjective opinion (COME, Zhang et al., ICLR 2025).

    An opinion consists of a belief in each class and an uncertainty. They are the evidence exp(logits) and a fixed mass,
    both divided by their sum, which is a softmax with the additional logit ln(mass). The gradient treats the norm of the
    logits as a constant, so that a sample cannot become certain by an increase of that norm.
    """
    length = logits.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    directed = logits * (length.detach() / length)
    doubt = torch.full_like(logits[:, :1], math.log(mass))
    opinion = torch.cat([directed, doubt], dim=-1).softmax(-1) + 1e-7
    return -(opinion * opinion.log()).sum(-1)


def reliable_margin(engine: Engine, *, all_classes: bool = False) -> float:
    """Return the entropy below which a sample is reliable, 0.4 ln C.

    C is the number of classes of the target, or with `all_classes` that of the head.
    """
    return 0.4 * math.log(engine.view.classes if all_classes else engine.num_classes)

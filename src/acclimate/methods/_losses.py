"""What several methods minimise, and the margin below which they trust it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..core.engine import Engine, entropy
from ..errors import ConfigError

LOSSES = ("entropy", "come")
COME_MASS = 1000  # in COME's released code, whatever the number of classes


def require_loss(loss: str) -> None:
    if loss not in LOSSES:
        raise ConfigError(f"loss={loss!r}: choose one of {', '.join(LOSSES)}.")


def uncertainty(loss: str, engine: Engine, *, reference: bool) -> Callable[[Tensor], Tensor]:
    """From logits to what is minimised of each sample: its entropy, or that of COME's opinion about it."""
    if loss == "entropy":
        return entropy
    mass = COME_MASS if reference else engine.num_classes
    return lambda logits: opinion_entropy(logits, mass)


def opinion_entropy(logits: Tensor, mass: float) -> Tensor:
    """Entropy of a subjective opinion: belief in each class, and uncertainty (COME, Zhang et al., ICLR 2025).

    Evidence exp(logits) shares the whole with a fixed mass of uncertainty, which is a softmax with one more logit, ln(mass).
    The length of the logits is held fixed by the gradient, so that a sample cannot become sure by growing them.
    """
    length = logits.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    directed = logits * (length.detach() / length)
    doubt = torch.full_like(logits[:, :1], math.log(mass))
    opinion = torch.cat([directed, doubt], dim=-1).softmax(-1) + 1e-7
    return -(opinion * opinion.log()).sum(-1)


def reliable_margin(engine: Engine, *, all_classes: bool = False) -> float:
    """Entropy below which a sample is reliable, 0.4 ln C, of the target's classes or of all that the head has."""
    return 0.4 * math.log(engine.vit.classes if all_classes else engine.num_classes)

"""A teacher: the adapted parameters, averaged over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..core.engine import Engine
from ..errors import ConfigError
from ..models.view import ViT, require_supported


class Teacher(nn.Module):
    """An exponential moving average of parameters, one buffer for each: all that a second model would add.

    Args:
        parameters: What is averaged; the average starts there.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        for i, p in enumerate(parameters):
            self.register_buffer(str(i), p.detach().clone())

    @property
    def weights(self) -> list[Tensor]:
        return list(self.buffers())

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """The teacher's logits."""
        with engine.adapted.using(self.weights):
            return engine.predict(images)

    def follow(self, parameters: Sequence[Tensor], momentum: float) -> None:
        """momentum * teacher + (1 - momentum) * student."""
        blend(self.weights, parameters, momentum)

    def ahead(self, parameters: Sequence[Tensor], momentum: float) -> list[Tensor]:
        """The weights that following would give: for a teacher that moves first, and only if the step succeeds."""
        return [own.lerp(p.detach(), 1 - momentum) for own, p in zip(self.weights, parameters)]

    @torch.no_grad()
    def become(self, weights: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self.weights, list(weights))


@torch.no_grad()
def blend(tensors: Sequence[Tensor], others: Sequence[Tensor], share: float) -> None:
    """In place: share * tensors + (1 - share) * others."""
    torch._foreach_mul_(list(tensors), share)
    torch._foreach_add_(list(tensors), list(others), alpha=1 - share)


def require_nesterov(nesterov: bool, momentum: float) -> None:
    """Refuse what SGD would refuse at the first step only."""
    if nesterov and not momentum:
        raise ConfigError(f"nesterov={nesterov}: Nesterov's momentum needs a momentum above 0.")


def symmetric_cross_entropy(logits: Tensor, others: Tensor) -> Tensor:
    """Between two predictions of each sample, half in each direction."""
    log_p, log_q = logits.log_softmax(-1), others.log_softmax(-1)
    return -0.5 * (log_q.exp() * log_p + log_p.exp() * log_q).sum(-1)


def weights_and_biases(vit: ViT) -> list[nn.Parameter]:
    """The parameters of all layers; class token, position embedding and layer scales, which are of no layer, are not."""
    found = {
        p: None
        for module in vit.model.modules()
        for name, p in module.named_parameters(recurse=False)
        if name.endswith(("weight", "bias"))  # torchvision's attention has an in_proj_weight
    }
    require_supported(vit.model, bool(found), "it has no layer with weights or biases")
    return list(found)

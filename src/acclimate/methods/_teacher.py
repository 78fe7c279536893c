"""A teacher: an exponential moving average of the adapted parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..core.engine import Engine
from ..errors import ConfigError
from ..models.view import ModelView, require_supported


class Teacher(nn.Module):
    """An exponential moving average of parameters, with one buffer for each.

    It holds only the weights, in the type of the model. The teacher predicts with the modules of the student.

    Args:
        parameters: The parameters to average. They are the initial value of the average.
    """

    of_the_models_type = True

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        for i, p in enumerate(parameters):
            self.register_buffer(str(i), p.detach().clone())

    @property
    def weights(self) -> list[Tensor]:
        """The averaged parameters."""
        return list(self.buffers())

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Return the logits of the teacher."""
        with engine.adapted.using(self.weights):
            return engine.predict(images)

    def follow(self, parameters: Sequence[Tensor], momentum: float) -> None:
        """Set the teacher to momentum * teacher + (1 - momentum) * student."""
        blend(self.weights, parameters, momentum)

    def ahead(self, parameters: Sequence[Tensor], momentum: float) -> list[Tensor]:
        """Return the weights that `follow` would set, without a change of the teacher.

        A method whose teacher moves before the student predicts with these weights, and keeps them only if the step
        succeeds.
        """
        return [own.lerp(p.detach(), 1 - momentum) for own, p in zip(self.weights, parameters)]

    @torch.no_grad()
    def become(self, weights: Sequence[Tensor]) -> None:
        """Set the teacher to these weights."""
        torch._foreach_copy_(self.weights, list(weights))


@torch.no_grad()
def blend(tensors: Sequence[Tensor], others: Sequence[Tensor], share: float) -> None:
    """Set the tensors in place to share * tensors + (1 - share) * others."""
    torch._foreach_mul_(list(tensors), share)
    torch._foreach_add_(list(tensors), list(others), alpha=1 - share)


def require_nesterov(nesterov: bool, momentum: float) -> None:
    """Raise an error if Nesterov's momentum is chosen without momentum.

    SGD itself would raise an error only at the first step.
    """
    if nesterov and not momentum:
        raise ConfigError(f"nesterov={nesterov}: Nesterov's momentum needs a momentum above 0.")


def symmetric_cross_entropy(logits: Tensor, others: Tensor) -> Tensor:
    """Return the mean of the cross entropies between two predictions of each sample in both directions."""
    log_p, log_q = logits.log_softmax(-1), others.log_softmax(-1)
    return -0.5 * (log_q.exp() * log_p + log_p.exp() * log_q).sum(-1)


def weights_and_biases(view: ModelView) -> list[nn.Parameter]:
    """Return the weights and biases of all layers.

    Class token, position embedding and layer scales do not belong to a layer and are not included.
    """
    found = {
        p: None
        for module in view.model.modules()
        for name, p in module.named_parameters(recurse=False)
        # the attention of torchvision has an in_proj_weight; a parametrised weight is computed from others
        if (name.endswith(("weight", "bias")) or isinstance(module, ParametrizationList)) and p.is_floating_point()
    }
    require_supported(view.model, bool(found), "it has no layer with weights or biases")
    return list(found)

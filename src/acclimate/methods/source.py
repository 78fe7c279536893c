"""Source: the unadapted model, which is the baseline of every table."""

from __future__ import annotations

from torch import Tensor

from ..core.engine import Engine
from ..core.method import Info, Method, Step
from ..core.registry import register


@register("source")
class Source(Method):
    """Predict with the source model and adapt nothing.

    Args:
        reference: Accepted by every method. It has no effect here.
    """

    info = Info(paper="no adaptation", replies_first=True)

    def __init__(self, *, reference: bool = False) -> None:
        super().__init__()
        self.reference = reference

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Predict the batch, and learn nothing."""
        return Step(engine.predict(images))

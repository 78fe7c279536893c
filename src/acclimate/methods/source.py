"""Source: the model as it was trained, the baseline of every table."""

from __future__ import annotations

from torch import Tensor

from ..core.engine import Engine
from ..core.method import Info, Method, Step
from ..core.registry import register


@register("source")
class Source(Method):
    """Predict with the source model and adapt nothing.

    Args:
        reference: Accepted by every method; there is nothing to differ here.
    """

    info = Info(paper="no adaptation")

    def __init__(self, *, reference: bool = False) -> None:
        super().__init__()
        self.reference = reference

    def step(self, images: Tensor, engine: Engine) -> Step:
        return Step(engine.predict(images))

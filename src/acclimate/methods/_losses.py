"""What several methods minimise, and the margin below which they trust it."""

from __future__ import annotations

import math

from ..engine import Engine


def reliable_margin(engine: Engine, *, all_classes: bool = False) -> float:
    """Entropy below which a sample is reliable, 0.4 ln C, of the target's classes or of all that the head has."""
    return 0.4 * math.log(engine.vit.classes if all_classes else engine.num_classes)

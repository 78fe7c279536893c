"""Image classifiers that adapt to a new domain while they predict: no labels, no source data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Torch is heavy: each name is imported when it is first used, so that the command line answers at once.
_HOME = {
    "Adapter": "core.adapter",
    "Guard": "core.guard",
    "Method": "core.method",
    "Step": "core.method",
    "adapt": "core.adapt",
    "bench": "evaluation.bench",
    "check_method": "testing.check",
    "load": "core.adapt",
    "list_methods": "core.registry",
    "register": "core.registry",
    "source_statistics": "core.statistics",
    "zero_shot": "models.zero_shot",
}
_MODULES = {"bundled": "data.bundled", "errors": "errors"}
__all__ = [*_HOME, *_MODULES, "__version__"]  # noqa: PLE0604

if TYPE_CHECKING:  # "as" tells type checkers that these names are for users
    from . import errors as errors
    from .core.adapt import adapt as adapt
    from .core.adapt import load as load
    from .core.adapter import Adapter as Adapter
    from .core.guard import Guard as Guard
    from .core.method import Method as Method
    from .core.method import Step as Step
    from .core.registry import list_methods as list_methods
    from .core.registry import register as register
    from .core.statistics import source_statistics as source_statistics
    from .data import bundled as bundled
    from .evaluation.bench import bench as bench
    from .models.zero_shot import zero_shot as zero_shot
    from .testing.check import check_method as check_method


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{_MODULES[name]}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

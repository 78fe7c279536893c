"""Vision transformers that adapt to a new domain while they predict: no labels, no source data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Torch is heavy: each name is imported when it is first used, so that the command line answers at once.
_HOME = {
    "Adapter": "adapter",
    "Guard": "guard",
    "Method": "method",
    "Step": "method",
    "adapt": "wrap",
    "check_method": "check",
    "load": "wrap",
    "list_methods": "method",
    "register": "method",
    "source_statistics": "source",
}
_MODULES = {"bench": "bench", "bundled": "data.bundled", "errors": "errors"}
__all__ = [*_HOME, *_MODULES, "__version__"]  # noqa: PLE0604

if TYPE_CHECKING:  # "as" tells type checkers that these names are for users
    from . import errors as errors
    from .adapter import Adapter as Adapter
    from .bench.api import bench as bench
    from .check import check_method as check_method
    from .data import bundled as bundled
    from .guard import Guard as Guard
    from .method import Method as Method
    from .method import Step as Step
    from .method import list_methods as list_methods
    from .method import register as register
    from .source import source_statistics as source_statistics
    from .wrap import adapt as adapt
    from .wrap import load as load


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{_MODULES[name]}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

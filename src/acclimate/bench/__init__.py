"""Runs, scores, tables. The module can be called: `acclimate.bench(...)` is `acclimate.bench.api.bench`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Bench(ModuleType):
    """Both `acclimate.bench(...)` and `acclimate.bench.tables` are what users write; so this module is a function, too."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from .api import bench

        return bench(*arguments, **options)


sys.modules[__name__].__class__ = _Bench

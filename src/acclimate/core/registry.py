"""The methods by name: built in, registered by a user, found as entry points, or read from a file."""

from __future__ import annotations

import inspect
import pkgutil
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from ..errors import ConfigError, nearest
from .method import Method

M = TypeVar("M", bound=type[Method])
_REGISTRY: dict[str, type[Method]] = {}
_FIRST = ("source", "tent", "sar", "dct")  # in lists; the others follow by name


def register(name: str) -> Callable[[M], M]:
    """Class decorator that makes a method known by name to `adapt`, `check_method`, the state file and the command line."""

    def decorate(cls: M) -> M:
        # a built-in one may be imported before the others, which may need it, as when it comes out of a pickle
        if not cls.__module__.startswith("acclimate.methods."):
            _load_built_in()
        signature = inspect.signature(cls.__init__)
        loose = [n for n, p in signature.parameters.items() if n != "self" and p.kind is not p.KEYWORD_ONLY]
        if loose and cls.__init__ is not Method.__init__:
            raise ConfigError(f"{cls.__name__}.__init__ must take its options by keyword only: put a * before {loose[0]}.")
        known = _REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(f"A method named {name!r} is registered already: {known.__module__}.{known.__qualname__}.")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def list_methods() -> list[str]:
    """Names of all registered methods."""
    _load_built_in()
    return [*_FIRST, *sorted(_REGISTRY.keys() - set(_FIRST))]


def find(method: str | type[Method]) -> type[Method]:
    """The class of a method, given by name or as itself."""
    if isinstance(method, type) and issubclass(method, Method):
        return method
    known = list_methods()
    if method not in known:
        raise ConfigError(f"Unknown method {method!r}.{nearest(str(method).lower(), known, 0.5)} Known: {', '.join(known)}.")
    return _REGISTRY[str(method)]


def create(method: str | type[Method], options: Mapping[str, Any]) -> Method:
    """A method with its options; an option that it does not have is an error that names the nearest."""
    cls = find(method)
    known = cls.options()
    for name in options:
        if name not in known:
            hint = nearest(name.lower(), known, 0.5)
            raise ConfigError(f"{cls.name or cls.__name__} has no option {name!r}.{hint} Options: {', '.join(known)}.")
    return cls(**options)


def is_registered(method: Method) -> bool:
    """Whether the method's name leads back to its class; a subclass does not inherit its parent's place."""
    return _REGISTRY.get(method.name) is type(method)


_loading = threading.RLock()
_loaded = False


def _load_built_in() -> None:
    global _loaded
    with _loading:
        if not _loaded:
            for module in pkgutil.iter_modules(import_module("acclimate.methods").__path__):
                if not module.name.startswith("_"):
                    import_module(f"acclimate.methods.{module.name}")
            _loaded = True

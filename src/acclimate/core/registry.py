"""The registry of methods: built in, registered by a user, found as entry points, or read from a Python file."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import ConfigError, ModelError, suggest
from ..models.trace import title
from ..models.view import PARTS, ModelView
from .digests import digest_json
from .files import file_digest
from .method import Method

GROUP = "acclimate.methods"  # the group of entry points, and the package of the built-in methods
LISTED_FIRST = ("source", "tent", "sar", "dct", "keel")

M = TypeVar("M", bound=type[Method])
_REGISTRY: dict[str, type[Method]] = {}


class _ReadFile(NamedTuple):
    """A Python file that was read."""

    digest: str
    names: list[str]  # of the methods that it registered


_FILES: dict[Path, _ReadFile] = {}


def register(name: str) -> Callable[[M], M]:
    """Return a class decorator that makes a method known by name to `adapt`, the state file and the command line."""

    def decorate(cls: M) -> M:
        # A built-in method may be imported before the others, for example by pickle, and the others may import it.
        if not cls.__module__.startswith(f"{GROUP}."):
            _load_all()
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
    """Return the names of all registered methods. Those of `LISTED_FIRST` come first, and others follow by name."""
    _load_all()
    return [*LISTED_FIRST, *sorted(_REGISTRY.keys() - set(LISTED_FIRST))]


def find_method(method: str | type[Method]) -> type[Method]:
    """Return the class of a method, given its name, the class itself, or the Python file that registers it."""
    if isinstance(method, type) and issubclass(method, Method):
        return method
    if str(method).endswith(".py"):
        names = read_file(str(method))
        if len(names) > 1:
            raise ConfigError(
                f"{method} registers several methods ({', '.join(names)}): name one, as in {method}:{names[0]}."
            )
        return _REGISTRY[names[0]]
    return registered_method(str(method))


def registered_method(name: str) -> type[Method]:
    """Return the class of a method, given its name. Unlike `find_method`, this never reads a Python file."""
    known = list_methods()
    if name not in known:
        raise ConfigError(f"Unknown method {name!r}.{suggest(name.lower(), known, 0.5)} Known: {', '.join(known)}.")
    return _REGISTRY[name]


def create_method(method: str | type[Method], options: Mapping[str, Any]) -> Method:
    """Return a method with its options, and raise an error that suggests a name if an option is unknown."""
    cls = find_method(method)
    known = cls.options()
    for name in options:
        if name not in known:
            hint = suggest(name.lower(), known, 0.5)
            raise ConfigError(f"{cls.name or cls.__name__} has no option {name!r}.{hint} Options: {', '.join(known)}.")
    return cls(**options)


def require_parts_of_model(method: Method, view: ModelView, needed: Sequence[str], *, what: str | None = None) -> None:
    """Refuse a model without a part that a method needs, and name the methods that suit the model.

    Args:
        method: The method.
        view: The model.
        needed: The names of parts in `PARTS`.
        what: What needs them. Default: the method.
    """
    has = view.parts
    missing = [part for part in needed if part not in has]
    if missing:
        raise ModelError(
            f"{what or method.name or type(method).__name__} needs {PARTS[missing[0]]}, which {title(view.model)} lacks. "
            f"Methods that suit this model: {', '.join(fitting_methods(view))}."
        )


def fitting_methods(view: ModelView) -> list[str]:
    """Return the names of the methods that suit a model."""
    return [name for name in list_methods() if {*_REGISTRY[name].info.requires} <= {*view.parts}]


def is_registered(method: Method) -> bool:
    """Return whether the method's name is registered for its own class, and not for a parent class."""
    return _REGISTRY.get(method.name) is type(method)


def read_file(file: str | os.PathLike[str]) -> list[str]:
    """Run a Python file that registers methods, and return their names. A file that has changed is run again.

    The file becomes a module whose name depends on its path and content, so that its classes can be sent to other processes
    that have read it too.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"{file} does not exist: give a Python file that registers methods, or the name of one.")
    digest = file_digest(path)
    before = _FILES.get(path)
    if before is None or before.digest != digest:
        for name in [] if before is None else before.names:
            _REGISTRY.pop(name, None)
        _FILES[path] = _ReadFile(digest, _run_file(path, f"acclimate_file_{digest_json([str(path), digest])}"))
    if not _FILES[path].names:
        raise ConfigError(f"{file} registers no method: decorate a class with acclimate.register(...).")
    return _FILES[path].names


def _run_file(path: Path, module_name: str) -> list[str]:
    """Run a file as a module, and return the methods that it registered; one that fails leaves nothing behind."""
    known = set(list_methods())
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        del sys.modules[module_name]
        for new in set(_REGISTRY) - known:
            del _REGISTRY[new]
        raise ConfigError(f"{path} cannot be read as a file of methods: {type(error).__name__}: {error}") from error
    return [name for name in list_methods() if name not in known]


def method_file(cls: type[Method]) -> Path | None:
    """Return the file that a method was read from; None for a method that is part of a package."""
    return next((path for path, read in _FILES.items() if cls.name in read.names), None)


def code_digest(cls: type[Method]) -> str | None:
    """Return a digest of the file that a method was read from; None for a method that is part of a package."""
    path = method_file(cls)
    return None if path is None else _FILES[path].digest


_loading = threading.RLock()
_loaded = False


def _load_all() -> None:
    """Import the built-in methods, and the methods that other packages provide as entry points."""
    global _loaded
    with _loading:
        if _loaded:
            return
        for module in pkgutil.iter_modules(import_module(GROUP).__path__):
            if not module.name.startswith("_"):
                import_module(f"{GROUP}.{module.name}")
        _loaded = True
        for entry in entry_points(group=GROUP):
            try:
                cls = entry.load()
            except Exception as error:  # name the package that cannot be imported
                raise ConfigError(f"The method {entry.name!r} of {entry.value} cannot be imported: {error}") from error
            if isinstance(cls, type) and issubclass(cls, Method) and cls.name != entry.name:
                register(entry.name)(cls)

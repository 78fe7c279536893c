"""Whether a module runs the code of a known class and nothing else.

A short cut computes what a module would compute, without calling it. It is right only if nobody has changed the module: by a
subclass, a hook, a `forward` on the instance, or a layer put in place of another. These checks are cheap enough for every
pass, so that a hook that is registered or removed later counts as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as _torch

Function = TypeVar("Function", bound=Callable[..., Any])

# layers that treat every token on its own
TOKEN_WISE: frozenset[type] = frozenset(
    {
        nn.Linear,
        nn.modules.linear.NonDynamicallyQuantizableLinear,
        nn.Identity,
        nn.Dropout,
        nn.LayerNorm,
        nn.RMSNorm,
        nn.GELU,
        nn.ReLU,
        nn.SiLU,
        nn.Mish,
        nn.Tanh,
        nn.Sequential,
    }
)


def ours(function: Function) -> Function:
    """Mark a function of this library, so that it does not count as a change when it is a hook or method of a module."""
    vars(function)["ours"] = True
    return function


def runs_code_of(module: nn.Module, kinds: frozenset[type]) -> bool:
    """Return whether a module runs the methods of one of these classes.

    A subclass may add attributes, as parametrisations do, but neither it nor the instance may replace a method.
    """
    kind: Any = type(module)
    methods = _methods_of(kind, kinds)
    own = vars(module)
    return methods is not None and (
        methods.isdisjoint(own) or all(hasattr(own[name], "ours") for name in methods.intersection(own))
    )


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks that are not of this library."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    return bool(before or after) and not all(hasattr(hook, "ours") for hook in (*before.values(), *after.values()))


def all_modules_are_hooked() -> bool:
    """Return whether there are hooks on all modules of the process."""
    return bool(
        _torch._global_forward_hooks
        or _torch._global_forward_pre_hooks
        or _torch._global_backward_hooks
        or _torch._global_backward_pre_hooks
    )


@lru_cache(maxsize=1024)
def _methods_of(kind: Any, kinds: frozenset[Any]) -> frozenset[str] | None:
    """Return the names of the methods of a class that is one of these, or that replaces no method of one; otherwise None."""
    for known in kinds:
        if issubclass(kind, known):
            names = {name for name in dir(known) if not name.startswith("__") and callable(getattr(known, name, None))}
            names.add("__call__")
            same = all(inspect.getattr_static(kind, name) is inspect.getattr_static(known, name) for name in names)
            libraries = {base.__module__.partition(".")[0] for base in known.__mro__}
            source = known.forward.__module__ or ""  # torch.fx writes functions that come from no module
            if same and source.partition(".")[0] in libraries:  # not put into the class by others
                return frozenset(names)
    return None

"""Rebuilds a forward with private globals, in which a function that it calls by name is replaced: for functions that are not methods of a
module.

The globals are a copy of the module's own. They live in a module registered in `sys.modules`, where Dynamo looks a function's globals up by
name. A value that a program gives one of the module's own globals later is not seen: `restore(model)` before that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ..instance_method import MadeMethod
from .instances import put_method


@dataclass(frozen=True, slots=True)
class Replacement:
    """The replacement of a global: `make(the global, *options)`.

    name     as the forward's globals have it
    make     a function or class of a module, so that a pickle finds it by name
    options  plain values
    """

    name: str
    make: Callable[..., Any]
    options: tuple[Any, ...] = ()

    @property
    def form(self) -> str:
        """Distinguishes replacements of the same name."""
        return "-".join((self.name, self.make.__name__, *map(str, self.options)))


def why_not_rebuilt(forward: Any) -> str | None:
    """Why this forward cannot be rebuilt over other globals, or None."""
    plain = isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__")
    return None if plain else "its forward is decorated: rebuilt over other globals it would lose the decorator"


def put_rebuilt(module: nn.Module, replacements: list[Replacement]) -> None:
    """The instance's forward, over globals with these replacements."""
    put_method(module, MadeMethod(rebuilt, (replacements,), module), None, len(replacements))


def rebuilt(forward: Any, replacements: list[Replacement]) -> Any:
    """A forward that does not read these globals is another one, which the class has by now; it stays."""
    if why_not_rebuilt(forward) or any(r.name not in forward.__globals__ for r in replacements):
        return forward
    name = ".".join(("isotype.optimize.private", forward.__module__, *(r.form for r in replacements)))
    module = sys.modules.get(name)
    if module is None:
        module = ModuleType(name, f"Globals of {forward.__module__} with {', '.join(r.name for r in replacements)} replaced.")
        # the copy includes __builtins__, which Dynamo needs
        module.__dict__.update({k: v for k, v in forward.__globals__.items() if k not in ("__name__", "__loader__", "__spec__")})
        module.__dict__.update({r.name: r.make(forward.__globals__[r.name], *r.options) for r in replacements})
        sys.modules[name] = module
    made = FunctionType(forward.__code__, module.__dict__, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__, made.__doc__, made.__annotations__ = forward.__kwdefaults__, forward.__doc__, forward.__annotations__
    made.__qualname__ = forward.__qualname__
    return made

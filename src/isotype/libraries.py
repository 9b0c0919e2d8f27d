"""Which code is a library's, and which a program's or a model's own: by the package that a class or a function was written in."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

_LIBRARIES = frozenset((
    "accelerate", "bitsandbytes", "datasets", "diffusers", "isotype", "numpy", "pandas", "peft", "pyarrow", "rich", "tokenizers", "torch",
    "tqdm", "transformers", "trl",
))  # fmt: skip
# of whom every state is in `optimizer.state` or in the settings of its groups
_OF_OPTIMIZERS = ("torch.", "bitsandbytes.", "transformers.", "accelerate.", "schedulefree.", "prodigyopt.", "isotype.")


def package_of(made: Any) -> str:
    """The package of a class or a function: the first part of its module's name."""
    return str(getattr(made, "__module__", None) or "builtins").partition(".")[0]


def of_a_library(made: Any) -> bool:
    """Whether a class or a function was written in a library that Isotype knows; the standard library is none of them.

    The code that a model of the hub brings lies in `transformers_modules`, and is its own.
    """
    return package_of(made) in _LIBRARIES


def code_of_update(optimizer: Any) -> str | None:
    """The name of a program's own code that an update of this optimizer runs: its class, a `step` that replaced it, or a hook of it.

    A library that is not known counts as a program's own.
    """
    from torch.optim import optimizer as of_torch

    if type(optimizer).__module__.startswith("accelerate."):
        return code_of_update(optimizer.optimizer)
    if not _of_an_optimizers_library(type(optimizer)):
        return type(optimizer).__name__
    hooks: list[Any] = [optimizer.step]
    for of_one in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks += getattr(optimizer, of_one, {}).values()
    hooks += [*of_torch._global_optimizer_pre_hooks.values(), *of_torch._global_optimizer_post_hooks.values()]
    return next((_name(hook) for hook in hooks if not _of_an_optimizers_library(hook)), None)


def hook_of_gradients(parameters: Iterable[Any]) -> str | None:
    """The name of a program's own hook that runs when a gradient has arrived, as one that updates the weight in backward."""
    hooks = (hook for p in parameters for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())
    return next((_name(hook) for hook in hooks if not _of_an_optimizers_library(hook)), None)


def _of_an_optimizers_library(made: Any) -> bool:
    """Whether a class, or a function and everything that it wraps, is of a library: `functools.wraps` copies the name of the module."""
    while isinstance(made, functools.partial):
        made = made.func
    while (function := getattr(made, "__func__", made)) is not None and isinstance(getattr(function, "__globals__", None), dict):
        # the class of functions has a descriptor of that name
        if not f"{function.__globals__.get('__name__', '')}.".startswith(_OF_OPTIMIZERS):
            return False
        made = getattr(function, "__wrapped__", None)
    if made is None:
        return True
    module = getattr(made, "__module__", None) or type(made).__module__
    return f"{module}.".startswith(_OF_OPTIMIZERS)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)

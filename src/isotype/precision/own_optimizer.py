"""Optimizers of a program's own: whether an update runs a program's code, and what such an optimizer keeps outside `optimizer.state`.

PyTorch's contract has every state in `optimizer.state`. A class of a program's own may keep a residual, slow weights or counters in
attributes, an optimizer that it wraps, or closures.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as of_torch

# of whom every state is in `optimizer.state` or in the settings of its groups
_LIBRARIES = ("torch.", "bitsandbytes.", "transformers.", "accelerate.", "isotype.")
_DEPTH = 4
_OF_EVERY_OPTIMIZER = frozenset(("defaults", "param_groups", "state"))


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper, or itself."""
    wrapped = type(optimizer).__module__.startswith("accelerate.")
    return plain_optimizer(optimizer.optimizer) if wrapped else optimizer


def own_update(optimizer: Any) -> str | None:
    """The name of a program's own code that an update of this optimizer runs: its class, a `step` that replaced it, or a hook of it.

    A library that is not known counts as a program's own.
    """
    optimizer = plain_optimizer(optimizer)
    if not _of_a_library(type(optimizer)):
        return type(optimizer).__name__
    hooks: list[Any] = [optimizer.step]
    for of_one in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks += getattr(optimizer, of_one, {}).values()
    hooks += [*of_torch._global_optimizer_pre_hooks.values(), *of_torch._global_optimizer_post_hooks.values()]
    return next((_name(hook) for hook in hooks if not _of_a_library(hook)), None)


def own_hooks(parameters: Iterable[Tensor]) -> str | None:
    """The name of a program's own hook that runs when a gradient has arrived, as one that updates the weight in backward."""
    hooks = (hook for p in parameters for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())
    return next((_name(hook) for hook in hooks if not _of_a_library(hook)), None)


def kept_beside_states(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """(attribute, tensor) of the tensors that an optimizer of a program's own class keeps, other than parameters and `optimizer.state`."""
    optimizer = plain_optimizer(optimizer)
    if _of_a_library(type(optimizer)):
        return
    seen = {id(t) for state in optimizer.state.values() for t in state.values()}
    seen |= {id(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for attribute, value in vars(optimizer).items():
        if attribute not in _OF_EVERY_OPTIMIZER and not attribute.startswith("_optimizer_"):
            yield from ((attribute, tensor) for tensor in _tensors(value, seen, 0))


def _tensors(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if id(value) in seen or depth > _DEPTH or isinstance(value, nn.Parameter | nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Optimizer):
        parts = (part for key, part in vars(value).items() if key != "param_groups")
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple | deque | set):
        parts = value
    elif isinstance(getattr(value, "__dict__", None), dict) and not _of_a_library(type(value)):
        parts = vars(value).values()
    for part in list(parts):
        yield from _tensors(part, seen, depth + 1)


def _of_a_library(made: Any) -> bool:
    """Whether a class, or a function and everything that it wraps, is of a library: `functools.wraps` copies the name of the module."""
    while isinstance(made, functools.partial):
        made = made.func
    while (function := getattr(made, "__func__", made)) is not None and isinstance(getattr(function, "__globals__", None), dict):
        # the class of functions has a descriptor of that name
        if not f"{function.__globals__.get('__name__', '')}.".startswith(_LIBRARIES):
            return False
        made = getattr(function, "__wrapped__", None)
    if made is None:
        return True
    module = getattr(made, "__module__", None) or type(made).__module__
    return f"{module}.".startswith(_LIBRARIES)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)

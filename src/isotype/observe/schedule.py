"""Chooses the steps that are observed: the first, every `every`-th, a random one between two of these, and one after a change of the model.

The random steps make it likely that a module is found that computes differently in some steps only. The choice depends only on the
number of the step and the seed, so that a resumed run observes the same steps as an uninterrupted one.
"""

from __future__ import annotations

import random
from typing import Any

from torch import nn

_AT_ONCE = 128


def is_observed(step: int, *, every: int, seed: int, total: int) -> bool:
    """Whether `step` (counted from 1) is observed. A run shorter than 3 x `every` steps is divided into three stretches."""
    if step == 1 or step % every == 0:
        return True
    length = max(2, min(every, -(-total // 3)))
    stretch = (step - 1) // length
    drawn = random.Random(f"{seed} {stretch}").randrange(length)
    return step - 1 == stretch * length + drawn


class Changes:
    """Compares dtypes of parameters and buffers, hooks, children, classes and replaced forwards with what they were at `remember`.

    Each step compares the next 128 modules, so that the cost does not grow with the model: 300 modules take three steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.remember()

    def remember(self) -> None:
        self._known = [(module, _state(module)) for module in self.model.modules()]
        self._next = 0

    def found(self) -> bool:
        """Whether one of the next modules differs from its remembered state."""
        if self._next >= len(self._known):
            self._next = 0
        part = self._known[self._next : self._next + _AT_ONCE]
        self._next += _AT_ONCE
        return any(_state(module) != known for module, known in part)


def _state(module: nn.Module) -> list[Any]:
    own = module.__dict__
    state: list[Any] = [module.__class__, id(own.get("forward"))]
    for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"]):
        if hooks:
            state.append(tuple(hooks))
    if own["_modules"]:
        state.append(list(map(id, own["_modules"].values())))
    for tensors in (own["_parameters"], own["_buffers"]):
        for tensor in tensors.values():
            if tensor is not None:
                state.append(tensor.dtype)
                state.append(tensor._backward_hooks is not None and len(tensor._backward_hooks))
    return state

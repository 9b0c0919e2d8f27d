"""Detects changes of a model since the last observed step, at negligible cost. After a change the next step is observed.

Each step compares the next 128 modules, so that the cost does not grow with the model: 300 modules take three steps. A module may also
compute differently without any such change; the randomly chosen observed steps find this (`schedule`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

_AT_ONCE = 128


class Changes:
    """Compares dtypes of parameters and buffers, hooks, children, classes and replaced forwards with what they were at `remember`."""

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

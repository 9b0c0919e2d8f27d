"""What changed in a model since it was last looked at: cheap enough for every step (0.1 ms for 300 modules), and a reason to look again."""

from __future__ import annotations

from typing import Any

from torch import nn


class Changes:
    """Compares dtypes of parameters and buffers, hooks, classes and replaced forwards with what they were at `remember`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.remember()

    def remember(self) -> None:
        self._known = self._state()

    def found(self) -> bool:
        """Whether anything is not as it was remembered."""
        return self._state() != self._known

    def _state(self) -> list[Any]:
        state: list[Any] = []
        for module in self.model.modules():
            own = module.__dict__
            state.append(id(type(module)))
            state.append(id(own.get("forward")))
            hooks = own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"]
            state.extend([*map(tuple, hooks)])
            for tensors in (own["_parameters"], own["_buffers"]):
                state.extend((t.dtype, bool(t._backward_hooks)) for t in tensors.values() if t is not None)
        return state

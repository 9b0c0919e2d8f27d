"""Tracks the current module and the current part of a step: forward, loss, backward, between backward and update, or update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..apply import inner_model
from .callers import Caller, forward_files, is_practice

FORWARD, LOSS, BACKWARD, GRADIENTS, UPDATE = "forward", "loss", "backward", "gradients", "update"


def observing(hook: Any) -> Any:
    """Marks a hook that changes nothing. Fused layers fall back to PEFT's code for other hooks, and must not do so in an observed step."""
    hook.observes = True
    return hook


@dataclass
class Call:
    """A running call of a module, with the dtypes of the sums, powers and roots in it and who first computed so.

    autocast  whether autocast was on when it began
    """

    name: str
    module: nn.Module
    autocast: bool = False
    sums: dict[str, Caller] = field(default_factory=dict)


class Regions:
    """Follows one step. A recomputation is a forward inside backward: its module is on the stack, so it is judged as forward.

    left  is called with each call that ends
    """

    def __init__(self, model: nn.Module, left: Callable[[Call], None]) -> None:
        self.model, self.left = model, left
        self.stack: list[Call] = []
        self._device_type = next((p.device.type for p in model.parameters()), "cpu")
        self._after = LOSS
        self._updating = 0

    def now(self) -> str:
        if self._updating:
            return UPDATE
        if self.stack:
            return FORWARD
        if torch._C._current_graph_task_id() != -1:
            self._after = GRADIENTS
            return BACKWARD
        return self._after

    @property
    def module(self) -> str:
        return self.stack[-1].name if self.stack else ""

    def inside(self, predicate: Callable[[nn.Module], bool]) -> Call | None:
        """The innermost call of a module that satisfies the predicate."""
        return next((call for call in reversed(self.stack) if predicate(call.module)), None)

    def in_a_part(self) -> bool:
        """Whether the innermost running module that has weights is a part of the model: not the model itself, nor a wrapper around it."""
        model = inner_model(self.model)
        call = self.inside(lambda module: next(module.parameters(), None) is not None)
        return call is not None and all(module is not model for module in call.module.modules())

    def switched_off_by_family(self) -> bool:
        """Whether code of transformers has switched off, inside its module, the autocast under which that module was called.

        So a family asks for fp32 whatever a run's precision is (Flint's scores, HY V4's mixing of streams).
        """
        if torch.is_autocast_enabled(self._device_type):
            return False
        call = next((call for call in reversed(self.stack) if call.autocast), None)
        return call is not None and all(is_practice(file) for file in forward_files(call.module))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Hooks every module and every optimizer."""
        hooks: list[Any] = []
        for name, module in self.model.named_modules():
            with suppress(RuntimeError):  # a scripted module takes no hooks
                hooks.append(module.register_forward_pre_hook(observing(self._entering(name or type(module).__name__)), prepend=True))
                hooks.append(module.register_forward_hook(observing(self._leaving()), always_call=True))
        hooks += [register_optimizer_step_pre_hook(self._update(1)), register_optimizer_step_post_hook(self._update(-1))]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._after = LOSS
            self.stack.append(Call(name, module, autocast=torch.is_autocast_enabled(self._device_type)))

        return hook

    def _leaving(self) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            while self.stack:
                call = self.stack.pop()
                if call.module is module:
                    self.left(call)
                    return

        return hook

    def _update(self, by: int) -> Any:
        def hook(*_: Any) -> None:
            self._updating = max(0, self._updating + by)

        return hook

"""Passes every call of an operator and of a PyTorch function to a callback, which is called a
reader. `Tape` is the dispatch mode for operators, and `FunctionTape` the mode for functions. This
file also keeps the stack of running modules.

The dtype checks of a training step (`contract`), `isotype doctor trace` and `isotype doctor
conform` use such readers. The reader gets each call of an operator and makes the call itself. So a
reader can run code before the call, after the call and after an error, or compute something else
instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..precision.apply import inner_model
from .operators import Operator
from .origin import Caller, is_library_forward

# the regions of a step (`StepTracker.current_region`)
FORWARD = "forward"  # in a module of the model
LOSS = "loss"  # between the model's forward and backward
BACKWARD = "backward"  # while autograd runs
AFTER_BACKWARD = "gradients"  # between backward and the update, such as gradient clipping
UPDATE = "update"  # in the optimizer's step

# runs an operator with its arguments and returns its result
RunOperator = Callable[[Operator, tuple, dict], Any]


def mark_observing(hook: Any) -> Any:
    """Marks a hook that does not change any value. If a hook of a fused layer does not have this
    mark, the layer runs PEFT's code instead of the fused code. A step that is observed must run the
    fused code, as other steps do.
    """
    hook.is_observer = True
    return hook


class Tape(TorchDispatchMode):
    """Passes each operator to `run(op, args, kwargs)`, which calls the operator and returns its
    result.

    on_new_operator  called once with each operator, before its first call
    """

    supports_higher_order_operators = True

    def __init__(
        self, run: RunOperator, *, on_new_operator: Callable[[Operator], None] | None = None
    ) -> None:
        super().__init__()
        self._run = run
        self._on_new_operator = on_new_operator
        # the key is an operator's id, because its hash is slow; `Operator.func` keeps the operator
        # alive, so that no other object gets this id
        self._operators: dict[int, Operator] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise PyTorch wraps this mode and imports its compiler, which costs a second and 148
        # MiB in a run that compiles nothing
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = self._operators.get(id(func))
        if op is None:
            op = self._operators[id(func)] = Operator(func)
            if self._on_new_operator is not None:
                self._on_new_operator(op)
        return self._run(op, args, kwargs or {})


class _CompilerHiddenTape(Tape):
    """The same mode as `Tape`, except that PyTorch's compiler ignores it. Otherwise the compiler
    would also compile the Python code of this mode.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def make_tape(run: RunOperator) -> Tape:
    """Creates a tape that also works in a program that uses `torch.compile`."""
    return (_CompilerHiddenTape if "torch._dynamo" in sys.modules else Tape)(run)


class FunctionTape(TorchFunctionMode):
    """Passes each call of a PyTorch function, before it is dispatched, to `run(func, args,
    kwargs)`, which returns its result.
    """

    def __init__(self, run: Callable[[Any, tuple, dict], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__":
            return func(*args)  # reading an attribute runs no operator, and is half of all calls
        return self._run(func, args, kwargs or {})


@dataclass
class ModuleCall:
    """Describes a call of a module that is still running.

    was_autocast_on  whether autocast was on when it began
    sum_dtypes  dtype of a sum, power or root that the module computes -> the first caller
    """

    name: str
    module: nn.Module
    was_autocast_on: bool = False
    sum_dtypes: dict[str, Caller] = field(default_factory=dict)


class ModuleStack:
    """The stack of running modules."""

    def __init__(self) -> None:
        self.stack: list[ModuleCall] = []

    @property
    def module(self) -> str:
        """Returns the name of the innermost running module."""
        return self.stack[-1].name if self.stack else ""

    def pop(self, module: nn.Module) -> ModuleCall | None:
        """Removes the call of a module from the stack. If calls inside this call ended with an
        exception, they are removed too.
        """
        while self.stack:
            call = self.stack.pop()
            if call.module is module:
                return call
        return None

    def innermost_call(self, predicate: Callable[[nn.Module], bool]) -> ModuleCall | None:
        """Returns the innermost call of a module that satisfies the predicate."""
        return next((call for call in reversed(self.stack) if predicate(call.module)), None)


class StepTracker(ModuleStack):
    """Tracks the running modules of one model. It also tracks which part of the training step is
    running: forward, loss, backward, work on gradients, or update.

    A recompute of gradient checkpointing runs a forward inside backward. The tracker counts such a
    recompute as forward, because the module's call is on the stack.

    on_inputs  called with the arguments of an outermost module
    on_exit    called with a module call when the call ends
    """

    def __init__(self, model: nn.Module, *, on_exit: Callable[[ModuleCall], None]) -> None:
        super().__init__()
        self.model = model
        self.on_exit = on_exit
        self.on_inputs: Callable[[Any], None] = lambda _: None
        self._device_type = next((p.device.type for p in model.parameters()), "cpu")
        self._region_between = LOSS
        self._open_updates = 0

    def current_region(self) -> str:
        if self._open_updates:
            return UPDATE
        if self.stack:
            return FORWARD
        if torch._C._current_graph_task_id() != -1:
            self._region_between = AFTER_BACKWARD
            return BACKWARD
        return self._region_between

    def is_in_submodule(self) -> bool:
        """Looks at the innermost running module that has weights. Returns True if it is a submodule
        of the model, and not the model itself or a wrapper around it.
        """
        model = inner_model(self.model)
        call = self.innermost_call(lambda module: next(module.parameters(), None) is not None)
        return call is not None and all(module is not model for module in call.module.modules())

    def is_autocast_off_by_library(self) -> bool:
        """Whether code of transformers has switched autocast off inside one of its modules. Some
        model families do this to compute in fp32 whatever the precision is.
        """
        if torch.is_autocast_enabled(self._device_type):
            return False
        call = next((call for call in reversed(self.stack) if call.was_autocast_on), None)
        return call is not None and is_library_forward(call.module)

    @contextmanager
    def track(self) -> Iterator[None]:
        """Hooks every module and every optimizer within this block."""
        hooks: list[Any] = []
        for name, module in self.model.named_modules():
            with suppress(RuntimeError):  # a scripted module takes no hooks
                entry_hook = mark_observing(self._entry_hook(name or type(module).__name__))
                hooks.append(
                    module.register_forward_pre_hook(entry_hook, prepend=True, with_kwargs=True)
                )
                hooks.append(module.register_forward_hook(self._exit_hook, always_call=True))
        hooks += [
            register_optimizer_step_pre_hook(self._update_hook(1)),
            register_optimizer_step_post_hook(self._update_hook(-1)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entry_hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._region_between = LOSS
            if not self.stack:
                self.on_inputs((args, kwargs))
            self.stack.append(
                ModuleCall(
                    name, module, was_autocast_on=torch.is_autocast_enabled(self._device_type)
                )
            )

        return hook

    @mark_observing
    def _exit_hook(self, module: nn.Module, args: Any, output: Any) -> None:
        if (call := self.pop(module)) is not None:
            self.on_exit(call)

    def _update_hook(self, change: int) -> Any:
        def hook(*_: Any) -> None:
            self._open_updates = max(0, self._open_updates + change)

        return hook

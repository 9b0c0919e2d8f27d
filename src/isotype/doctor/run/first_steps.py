"""Records the tensors of a program during its first steps, and again during its first evaluations.

`doctor run` does so without an option: most dtype errors happen in the first step, or in the first
evaluation. The record takes at most two seconds of the time of a program. It ends when the program
calls `torch.compile`, because compiled code cannot be observed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .tensor_record import Replacement, TensorRecord

FIRST_STEPS = 10
MAX_SECONDS = 2.0  # of the program's time that the record may take


class FirstStepsRecord(TensorRecord):
    """Records the events of tensors until the tenth step of an optimizer. After that, records from
    each call of `model.eval()` to the next step. Ends for good when it has taken `MAX_SECONDS`, or
    when the program calls `torch.compile`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        self._remaining_steps = FIRST_STEPS
        self._is_exhausted = False
        self._hooks: list[RemovableHandle] = []
        self._kept_replacements: list[Replacement] = []

    def install(self) -> None:
        """Starts to record."""
        super().install()
        self._hooks = [register_optimizer_step_post_hook(self._count_step)]
        self._kept_replacements = [
            Replacement.make(torch, "compile", self._end_before),
            Replacement.make(nn.Module, "train", self._resume_at_evaluation),
        ]

    def remove(self) -> None:
        """Stops to record for good. The events remain."""
        self.is_complete = False
        super().remove()
        for hook in self._hooks:
            hook.remove()
        for replacement in self._kept_replacements:
            replacement.undo()
        self._hooks, self._kept_replacements = [], []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_exhausted:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _record_result(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        start = time.perf_counter()
        try:
            super()._record_result(func, args, kwargs, result)
        finally:
            self._seconds += time.perf_counter() - start
            if self._seconds > MAX_SECONDS and not self._is_exhausted:
                self._end_at_next_module()

    def _end_at_next_module(self) -> None:
        """Ends the record at the next call of a module. Inside the call of a function, PyTorch would
        add the mode again after this call.
        """
        self._is_exhausted = True
        self.is_complete = False
        self.failed_call = None
        self._hooks.append(register_module_forward_pre_hook(self._end))

    def _end(self, *_: Any) -> None:
        self.failed_call = None  # its arguments would stay in memory
        self.remove()

    def _count_step(self, *_: Any) -> None:
        self._remaining_steps -= 1
        if self._is_exhausted:
            self._end()
        elif self._remaining_steps <= 0:
            self.pause()

    def pause(self) -> None:
        """Stops to record until the next evaluation."""
        self.is_complete = False
        self.failed_call = None
        super().remove()

    def _resume_at_evaluation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            if not mode and not self.is_recording and not self._is_exhausted:
                super(FirstStepsRecord, self).install()
            result: nn.Module = original(module, mode)
            return result

        return train

    def _end_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile_code(*args: Any, **kwargs: Any) -> Any:
            self._end()
            return original(*args, **kwargs)

        return compile_code

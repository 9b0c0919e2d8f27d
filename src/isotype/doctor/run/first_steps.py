"""Records the tensors of a program during its first steps, and again during its first evaluations.

`doctor run` does so without an option: most dtype errors happen in the first step, or in the first
evaluation. The record takes at most two seconds of the time of a program. It ends when the program
calls `torch.compile`, or a function that a library compiled, because compiled code cannot be
observed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .replacements import Replacement
from .tensor_record import TensorRecord

FIRST_STEPS = 10
MAX_SECONDS = 2.0  # of the program's time that the record may take


class FirstStepsRecord(TensorRecord):
    """Records the events of tensors until the tenth step of an optimizer. After that, records from
    each call of `model.eval()` to the next step. Ends for good when it has taken `MAX_SECONDS`, or
    before compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        self._remaining_steps = FIRST_STEPS
        self._hooks: list[RemovableHandle] = []

    def install(self) -> None:
        """Starts to record."""
        super().install()
        self._hooks = [register_optimizer_step_post_hook(self._count_step)]
        self._lasting_replacements.append(Replacement.make(nn.Module, "train", self._wrap_train))

    def remove(self) -> None:
        """Stops to record for good. The events remain."""
        super().remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def stop(self) -> None:
        """Switches the record off. The events remain."""
        self.is_complete = False
        self.failed_call = None  # its arguments would stay in memory
        super().stop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_recording:  # the record has ended inside a call, see `_end`
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _record_result(
        self, func: Any, args: Any, kwargs: Any, result: Any, first_number: int
    ) -> None:
        start = time.perf_counter()
        try:
            super()._record_result(func, args, kwargs, result, first_number)
        finally:
            self._seconds += time.perf_counter() - start
            if self._seconds > MAX_SECONDS and self.is_recording:
                self._end()

    def _end(self, *_: Any) -> None:
        """Ends the record for good. After a call that the mode has passed on, PyTorch adds the mode to
        its stack again; the next call of a module or step of an optimizer takes it off.
        """
        is_inside_call = self.is_recording and not self._is_on_stack()
        self.remove()
        if is_inside_call:
            self._hooks = [
                register_module_forward_pre_hook(self._end),
                register_optimizer_step_post_hook(self._end),
            ]

    def _count_step(self, *_: Any) -> None:
        self._remaining_steps -= 1
        if self._remaining_steps <= 0:
            self.stop()

    def _wrap_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `Module.train`, which `eval` calls too."""

        @functools.wraps(original)
        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            has_ended = not self._lasting_replacements
            if not mode and not self.is_recording and not has_ended:
                self.start()
            result: nn.Module = original(module, mode)
            return result

        return train

    def _meet_compiled_code(self) -> None:
        """Ends the record before compiled code runs."""
        if self._lasting_replacements:
            self._end()

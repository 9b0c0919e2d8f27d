"""What `isotype train` does at the beginning of a step, for an attached trainer: it asks whether the model is still what was optimized, and
casts adapters down once for all micro-batches.

Trainer's events bound a step: it begins before its first micro-batch, and its gradients are whole before the optimizer writes. A step of
one micro-batch keeps no copies: only a recompute would use them again.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback

from ..lora.products import copies_kept
from ..optimize import check_placed


class AdapterCopies(TrainerCallback):
    """One trainer's copies. `install` adds them, `remove` removes them."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._step = ExitStack()

    def install(self) -> None:
        self.trainer.add_callback(self)

    def remove(self) -> None:
        self._step.close()
        self.trainer.remove_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # of a step that ended with an error
        self._step.close()
        check_placed(self.trainer.model)
        if args.gradient_accumulation_steps > 1:
            self._step.enter_context(copies_kept())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step.close()

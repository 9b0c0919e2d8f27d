"""`IsotypeCallback`, for tools that take callbacks only: LLaMA-Factory's `run_exp(callbacks=[...])` and the like.

A callback exists before its trainer is complete (TRL puts its head on the model after transformers' own constructor), and meets
`on_train_begin` after accelerate has wrapped the model. So it attaches when the trainer is first used: at `train`, `evaluate` or `predict`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback

from ..errors import UsageError
from .attach import attach
from .methods import Methods
from .refusals import ATTACHED

FIRST_USES = ("train", "evaluate", "predict")


def attach_at_first_use(trainer: Any, precision: Any = "auto", **options: Any) -> None:
    """`attach(trainer, precision, **options)` when the trainer's `train`, `evaluate` or `predict` is called for the first time."""
    methods = Methods(trainer)

    def attached_first(name: str) -> Callable[..., Any]:
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            methods.restore()
            attach(trainer, precision, **options)
            return getattr(trainer, name)(*args, **kwargs)

        return run

    for name in FIRST_USES:
        methods.wrap(name, attached_first(name))


class IsotypeCallback(TrainerCallback):
    """`Trainer(..., callbacks=[IsotypeCallback("bf16-lora")])`; the arguments are `attach`'s."""

    def __init__(self, precision: Any = "auto", **options: Any) -> None:
        self.precision, self.options = precision, options
        self.trainer: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer = _constructed_now(args)
        attach_at_first_use(self.trainer, self.precision, **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is None or ATTACHED not in self.trainer.__dict__:
            raise UsageError(
                "IsotypeCallback was given to a trainer that was complete already",
                fix="Trainer(..., callbacks=[IsotypeCallback(...)]), or attach(trainer)",
            )


def _constructed_now(args: Any) -> Trainer:
    """The trainer whose constructor is running: transformers passes callbacks everything except the trainer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and found.args is args:
            return found
        frame = frame.f_back
    raise UsageError("IsotypeCallback.on_init_end was not called by a trainer's constructor", fix="attach(trainer)")

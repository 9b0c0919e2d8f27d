"""Watches what a user's own callbacks write into the weights, gradients and optimizer states of an attached trainer.

A callback runs between the parts of a step, or between steps, where the observed step does not look. After each one its writes are
found as they are in a run of Isotype's own; one that wrote is followed from its next call on, and in the observed step each one is.
What it sets of the optimizer's settings, as the learning rate, is looked at after each call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import TrainerCallback

from ..observe import Observation, WrittenBack
from ..training.snapshot import Snapshot
from .attachment import Attachment
from .first_steps import FirstSteps
from .methods import Methods
from .optimizer_settings import OptimizerSettings

# the weights are no training's yet
_BEFORE = frozenset(("on_init_end", "on_train_begin"))


class OwnCallbacks:
    """The callbacks of one training.

    seen   violations and what could not be seen, by callback
    found  called when there is more of it
    """

    def __init__(self, attached: Attachment, steps: FirstSteps, found: Callable[[], None]) -> None:
        self.attached, self.steps, self.found = attached, steps, found
        self.seen = Observation(0)
        self.methods = Methods(attached.trainer.callback_handler)
        self._write: set[tuple[int, str]] = set()

    def install(self) -> None:
        if "call_event" not in vars(self.attached.trainer.callback_handler):  # another tool's is left alone
            self.methods.wrap("call_event", self._call_event)

    def remove(self) -> None:
        self.methods.restore()

    def _call_event(self, original: Callable[..., Any], event: str, args: Any, state: Any, control: Any, **given: Any) -> Any:
        trainer, handler = self.attached.trainer, self.attached.trainer.callback_handler
        if event in _BEFORE or not trainer.is_in_train or not any(_is_own(callback, event) for callback in handler.callbacks):
            return original(event, args, state, control, **given)
        for callback in handler.callbacks:
            alone = copy.copy(handler)
            alone.callbacks = [callback]
            run = partial(type(handler).call_event, alone, event, args, state, control, **given)
            control = self._watched(callback, event, run) if _is_own(callback, event) else run()
        return control

    def _watched(self, callback: Any, event: str, run: Callable[[], Any]) -> Any:
        trainer, key, by = self.attached.trainer, (id(callback), event), f"{type(callback).__name__}.{event}"
        model, optimizer = trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        before = len(self.seen.violations), dict(self.seen.unobserved)
        settings = OptimizerSettings(optimizer)
        unseen = f"weights or states that {by} writes"
        if key in self._write or self.steps.seen_now:
            with self.steps.observer.set_apart(), WrittenBack(self.seen, model, optimizer, self.attached.precision, by):
                control = run()
            if key in self._write:
                self.seen.unobserved.pop(unseen, None)
        else:
            snapshot = Snapshot(model, optimizer)
            control = run()
            if snapshot.changed() is not None:
                self._write.add(key)
                self.seen.unobserved[unseen] = "its first call was not followed, and there was no other"
        settings.judge(self.seen, self.attached.precision.optimizer, by)
        if (len(self.seen.violations), self.seen.unobserved) != before:
            self.found()
        return control


def _is_own(callback: Any, event: str) -> bool:
    """Whether a class that is neither transformers' nor Isotype's handles this event."""
    if type(callback).__module__.partition(".")[0] in ("transformers", "isotype"):
        return False
    return getattr(getattr(callback, event, None), "__func__", None) is not getattr(TrainerCallback, event, None)

"""Calls a user's own code after a step, an evaluation, a save or a round of samples.

A callback may read everything, generate, log, write files and ask the run to stop. It must not change the weights, because the run folder
would then no longer describe the run; such a change is an error. Random state, the modules' modes, gradients and the process's settings are
restored after each call, so that the weights are bit-identical to those of a run without callbacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import RunError, UsageError
from .snapshot import Snapshot
from .undisturbed import modes_restored, process_settings_restored, random_state_restored


@dataclass(frozen=True)
class Moment:
    """The state of the run, as a callback gets it.

    step, total  optimizer steps done, and their number in the whole run
    row          the line of metrics.jsonl: loss, learning rate, ...; after samples `{"samples": [...]}`; after a save its folder
    model        with its adapter, under the run's precision; do not change its weights
    folder       the run's folder
    """

    step: int
    total: int
    row: Mapping[str, Any]
    model: nn.Module
    folder: Path
    _asked: list[bool] = field(default_factory=list, repr=False)

    def stop(self) -> None:
        """Asks the run to save and end after this step, as early stopping does. The run still writes its result."""
        self._asked.append(True)


class Callback:
    """Override what you need. An exception stops the run; the last checkpoint stays."""

    def on_step(self, moment: Moment) -> None:
        """After each step that is logged (`run.log_every`)."""

    def on_evaluation(self, moment: Moment) -> None: ...

    def on_save(self, moment: Moment) -> None:
        """After a checkpoint is completely written to the disk."""

    def on_samples(self, moment: Moment) -> None: ...


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Raises UsageError for what `tell` could not call: a class, an object that is no Callback, a method that does not take one Moment."""
    for callback in callbacks:
        if isinstance(callback, type):
            raise UsageError(f"callbacks: {callback.__name__} is a class", fix=f"give an object of it: callbacks=[{callback.__name__}()]")
        kind = type(callback).__name__
        if not isinstance(callback, Callback):
            raise UsageError(f"callbacks: {kind} is no isotype.Callback", fix=f"class {kind}(isotype.Callback): ...")
        for name in (name for name in vars(Callback) if name.startswith("on_")):
            try:
                inspect.signature(getattr(callback, name)).bind(None)
            except TypeError as error:
                raise UsageError(
                    f"callbacks: {kind}.{name} cannot be called with a Moment alone: {error}", fix=f"def {name}(self, moment): ..."
                ) from error


def tell(callbacks: Sequence[Callback], name: str, moment: Moment, optimizer: torch.optim.Optimizer) -> bool:
    """Calls `on_NAME` of each callback; returns whether one asked to stop. Gradients that a callback leaves are the caller's to free.

    Raises RunError CB001 when one changed a weight, whether it is trained, or a state of the optimizer.
    """
    for callback in callbacks:
        before = Snapshot(moment.model, optimizer)
        with random_state_restored(), process_settings_restored(), modes_restored(moment.model):
            getattr(callback, f"on_{name}")(moment)
        if (changed := before.changed()) is not None:
            raise RunError(
                f"step {moment.step}: {type(callback).__name__}.on_{name} changed {changed}", code="CB001",
                fix="a callback may read weights, not change them: work on a copy (copy.deepcopy), or make it part of the objective",
            )  # fmt: skip
    return bool(moment._asked)

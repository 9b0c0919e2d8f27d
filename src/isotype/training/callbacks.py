"""Runs a user's own code during training. A user can add callbacks, which are called after a step,
an evaluation, a save or a round of samples. A user can also add an objective, which is a function
that computes the loss.

A callback may read everything, generate, log, write files and ask the run to stop. If it changes
the weights, this is an error, because the run folder would no longer describe the run. After each
call, the random state, the modules' training or evaluation modes, the gradients, the gradient mode
and the default dtype are restored. So the weights are bit-identical to those of a run without
callbacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..errors import RunError, UsageError
from ..observe.continuity import BUFFER, STATE, Continuity
from .task import preserve_modes, preserve_random_state

Objective: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""A user's own loss in place of the task's: the summed losses of a micro-batch."""


@dataclass(frozen=True)
class Moment:
    """The state of the run. A callback receives it as its argument.

    step, total  the number of optimizer steps done so far, and the number of steps of the whole run
    row          the line of metrics.jsonl with the loss, the learning rate and other values; after
                 samples `{"samples": [...]}`; after a save the folder of the checkpoint
    model        the model with its adapter, under the run's precision; do not change its weights
    folder       the run's folder
    """

    step: int
    total: int
    row: Mapping[str, Any]
    model: nn.Module
    folder: Path
    _stop_requests: list[bool] = field(default_factory=list, repr=False)

    def stop(self) -> None:
        """Asks the run to save a checkpoint and to end after this step, as with early stopping. The
        run still writes its result.
        """
        self._stop_requests.append(True)


class Callback:
    """The base class of callbacks. Override the methods that you need. An exception in a callback
    stops the run; the last checkpoint is kept.
    """

    def on_step(self, moment: Moment) -> None:
        """Is called after each step that is logged (`run.log_every`)."""

    def on_evaluation(self, moment: Moment) -> None: ...

    def on_save(self, moment: Moment) -> None:
        """Is called after a checkpoint was completely written to the disk."""

    def on_samples(self, moment: Moment) -> None: ...


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Raises UsageError for a callback that `run_callbacks` could not call. Examples are a class in
    place of an object, an object that is not a `Callback`, and a method that does not accept
    exactly one argument of the type `Moment`.
    """
    for callback in callbacks:
        if isinstance(callback, type):
            raise UsageError(
                f"callbacks: {callback.__name__} is a class",
                fix=f"give an object of it: callbacks=[{callback.__name__}()]",
            )
        class_name = type(callback).__name__
        if not isinstance(callback, Callback):
            raise UsageError(
                f"callbacks: {class_name} is no isotype.Callback",
                fix=f"class {class_name}(isotype.Callback): ...",
            )
        for name in (name for name in vars(Callback) if name.startswith("on_")):
            try:
                inspect.signature(getattr(callback, name)).bind(None)
            except TypeError as error:
                raise UsageError(
                    f"callbacks: {class_name}.{name} cannot be called with a Moment alone: {error}",
                    fix=f"def {name}(self, moment): ...",
                ) from error


def run_callbacks(
    callbacks: Sequence[Callback], name: str, moment: Moment, optimizer: torch.optim.Optimizer
) -> bool:
    """Calls the method `on_NAME` of each callback. Returns whether a callback asked the run to
    stop. If a callback leaves gradients in the model, the caller must free them.

    Raises RunError CB001 if a callback changed a weight, a `requires_grad` flag or an optimizer
    state.
    """
    dtype = torch.get_default_dtype()
    for callback in callbacks:
        versions = _tensor_versions(moment.model, optimizer)
        continuity = Continuity(moment.model, optimizer)
        continuity.take_sample("the call")
        with (
            preserve_random_state(),
            preserve_modes(moment.model),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
            try:
                getattr(callback, f"on_{name}")(moment)
            finally:
                torch.set_default_dtype(dtype)
        if (
            changed := _find_change(versions, _tensor_versions(moment.model, optimizer), continuity)
        ) is not None:
            raise RunError(
                f"step {moment.step}: {type(callback).__name__}.on_{name} changed {changed}",
                code="CB001",
                fix=(
                    "a callback may read weights, not change them: work on a copy (copy.deepcopy),"
                    " or make it part of the objective"
                ),
            )
    return bool(moment._stop_requests)


def _find_change(
    previous: dict[str, tuple[int, ...]],
    current: dict[str, tuple[int, ...]],
    continuity: Continuity,
) -> str | None:
    """Returns the name of the first tensor that a callback changed. A parameter or an optimizer
    state has changed if it was written, replaced, frozen or unfrozen. A buffer has changed only if
    its values were rounded to a narrower dtype. Other values do not count as a change, because the
    model itself may write to its buffers when it generates text.
    """
    changed_name = next(
        (key for key in previous.keys() | current.keys() if previous.get(key) != current.get(key)),
        None,
    )
    if changed_name is not None:
        return changed_name
    # writes through `p.data` or NumPy, which PyTorch does not count
    differences = (
        difference
        for difference in continuity.differences()
        if difference.kind != BUFFER or difference.narrower
    )
    return next(
        (
            f"the optimizer's {difference.tensor}"
            if difference.kind == STATE
            else difference.tensor
            for difference in differences
        ),
        None,
    )


def _tensor_versions(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, tuple[int, ...]]:
    """Returns the identity and PyTorch's version counter of every parameter and optimizer state.
    For parameters, it also returns `requires_grad`.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    versions: dict[str, tuple[int, ...]] = {
        name: (id(p), p._version, p.requires_grad) for name, p in model.named_parameters()
    }
    for p, states in optimizer.state.items():
        for key, state in states.items():
            if isinstance(state, Tensor):
                versions[f"the optimizer's {key} of {names.get(id(p), 'a parameter')}"] = (
                    id(state),
                    state._version,
                )
    return versions


def objective_name(objective: Objective | None) -> str | None:
    """Returns the module and the name of a user's objective. Returns None if the task's own loss is
    used.
    """
    if objective is None:
        return None
    return (
        f"{objective.__module__}.{getattr(objective, '__qualname__', type(objective).__qualname__)}"
    )

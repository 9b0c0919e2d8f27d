"""Records what `attach` changed in a trainer; the record is printed once and used by `detach`. This
module also wraps methods of a trainer instance (no class is changed).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, MethodType
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from ..optimize import Manifest
from ..precision.accumulate import GradientAccumulator
from ..precision.precision import Precision
from ..precision.resolution import Resolved

# attributes of a trainer that hold further models, which it runs without gradients: TRL's reference
# model and teacher
READ_ONLY = ("ref_model", "teacher_model")


@dataclass(frozen=True)
class Claim:
    """A setting that is meant to decide the precision of a trainer.

    owner    where the setting is made, for example in the trainer's arguments
    value    the value of the setting
    outcome  the effect of the setting under the attached precision
    """

    owner: str
    value: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.owner:22s} {self.value:44s} {self.outcome}"


@dataclass
class Attachment:
    """Records what `attach` changed in a trainer. `print(attachment)` shows the settings that
    decide its precision, the replaced modules, and the modules that were not replaced.

    claims     the settings that decide the precision, each with its value and its effect
    manifests  for each model ("model", "ref_model", ...) what `optimize` replaced in it
    notes      further lines to print
    undo       functions that undo the changes, called in reverse order
    accumulator  holds the gradients if low-precision weights are trained
    optimizers   the trainer's optimizer and scheduler before `attach`
    """

    trainer: Any
    resolved: Resolved
    claims: list[Claim]
    manifests: dict[str, Manifest] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    undo: list[Any] = field(default_factory=list)
    accumulator: GradientAccumulator | None = None
    optimizers: tuple[Any, Any] = (None, None)

    @property
    def precision(self) -> Precision:
        return self.resolved.precision

    def install(self, part: Any) -> Any:
        """Installs a part. The part is removed when the trainer is detached, or when the
        installation of a later part fails.
        """
        self.undo.append(part.remove)
        part.install()
        return part

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns a parameter's summed gradient, from the accumulator or from `.grad`."""
        if self.accumulator is None:
            return parameter.grad
        return self.accumulator.gradient(parameter)

    def restore_optimizers(self) -> None:
        """Restores the trainer's optimizer and scheduler after a call of `train` that raised an
        error. The next call of `train` creates a new optimizer and scheduler from the trainer's
        arguments.
        """
        self.trainer.optimizer, self.trainer.lr_scheduler = self.optimizers
        self.trainer.accelerator._optimizers.clear()
        self.trainer.accelerator._schedulers.clear()

    @property
    def manifest(self) -> Manifest:
        """The manifest of the trained model."""
        return self.manifests["model"]

    def __str__(self) -> str:
        trainer_name = type(self.trainer).__name__
        lines = [
            f"isotype attached to {trainer_name}: precision {self.resolved.text}"
            f" ({self.resolved.preset_reason})"
        ]
        lines += [f"  claimed by  {claim}" for claim in self.claims]
        for name, manifest in self.manifests.items():
            lines += [
                f"  {name}: {line}" if i == 0 else f"    {line}"
                for i, line in enumerate(str(manifest).splitlines())
            ]
        return "\n".join([*lines, *(f"  note        {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the content for manifest.json and `--json`."""
        return {
            "trainer": f"{type(self.trainer).__module__}.{type(self.trainer).__name__}",
            "precision": self.resolved.text,
            "declared": self.resolved.to_dict(),
            "claims": [
                {"owner": claim.owner, "value": claim.value, "now": claim.outcome}
                for claim in self.claims
            ],
            "models": {name: manifest.to_dict() for name, manifest in self.manifests.items()},
            "notes": list(self.notes),
        }


def running_trainers() -> list[Any]:
    """Lists the trainers whose `train` is on the call stack, the innermost first."""
    trainers: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "train" and isinstance(
            trainer := frame.f_locals.get("self"), Trainer
        ):
            trainers.append(trainer)
        frame = frame.f_back
    return trainers


def is_running(trainer: Any) -> bool:
    """Returns True while the trainer's `train` runs. `is_in_train` is not enough, because it stays
    true after a call of `train` that raised an error.
    """
    return bool(trainer.is_in_train) and any(running is trainer for running in running_trainers())


def remove_accelerate_wrappers(trainer: Any) -> None:
    """Removes the wrappers that accelerate put around the model in an earlier `train` or
    `evaluate`. The next call of `train` or `evaluate` wraps the model again.
    """
    accelerator = trainer.accelerator
    model = trainer.model
    accelerator._models[:] = [
        prepared
        for prepared in accelerator._models
        if accelerator.unwrap_model(prepared) is not model
    ]
    unwrap_forward(model)
    trainer.model_wrapped = model
    trainer.is_in_train = False


def unwrap_forward(model: nn.Module) -> dict[str, Any]:
    """Restores the forward that a model had before accelerate wrapped it in autocast. Returns the
    attributes that were removed. To restore the wrapper, pass these attributes to
    `vars(model).update`.
    """
    if "_original_forward" not in model.__dict__ or "forward" not in model.__dict__:
        return {}
    wrapped = {name: model.__dict__.pop(name) for name in ("_original_forward", "forward")}
    if getattr(wrapped["_original_forward"], "__func__", None) is not type(model).forward:
        model.__dict__["forward"] = wrapped["_original_forward"]
    return wrapped


def collect_models(trainer: Any) -> dict[str, nn.Module]:
    """Returns the trained model and the models that the trainer only reads, by their names."""
    candidates = {
        "model": trainer.model,
        **{name: getattr(trainer, name, None) for name in READ_ONLY},
    }
    return {name: model for name, model in candidates.items() if isinstance(model, nn.Module)}


def trained_names(trainer: Any, name: str) -> set[str]:
    """Returns the names of the trained parameters in a model that `collect_models` returned. A
    reference model has the same names as the trained model; a teacher has no trained parameters.
    """
    if name == "teacher_model":
        return set()
    trained = {parameter for parameter, p in trainer.model.named_parameters() if p.requires_grad}
    return trained & {
        parameter for parameter, _ in collect_models(trainer)[name].named_parameters()
    }


_ABSENT = object()


class MethodWrappers:
    """Wraps methods of one trainer, and restores them in reverse order."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.originals: list[tuple[str, Any]] = []

    def wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        """Calls to `trainer.name` become `wrapper(original, *args, **kwargs)`, where `original` is
        the bound method.
        """
        trainer = self.trainer
        original = getattr(trainer, name)
        self.originals.append((name, trainer.__dict__.get(name, _ABSENT)))

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(trainer, name, MethodType(wrapped, trainer))

    def restore(self) -> None:
        for name, original in reversed(self.originals):
            if original is _ABSENT:
                delattr(self.trainer, name)
            else:
                setattr(self.trainer, name, original)
        self.originals.clear()


def user_override(trainer: Any, method: str) -> str | None:
    """Returns `Class.method at file:line` if a user's class defines this method; None if it is the
    method of transformers or TRL.
    """
    for cls in type(trainer).__mro__:
        if method in cls.__dict__:
            if cls.__module__.partition(".")[0] in ("transformers", "trl"):
                return None
            function = inspect.unwrap(cls.__dict__[method])
            code = getattr(function, "__code__", None)
            if code:
                location = f" at {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
            else:
                location = ""
            return f"{cls.__name__}.{method}{location}"
    return None

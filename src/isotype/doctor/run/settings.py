"""Reads precision settings from objects in the variables of the stack frames. The objects are
trainers, objects of accelerate and DeepSpeed, loss scalers and optimizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...dtypes import format_dtype
from .autocast import read_mixed_precision
from .frames import CallFrame

_ARGUMENT_NAMES = (
    "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "half_precision_backend", "tf32",
)  # fmt: skip
_DEEPSPEED_NAMES = ("bfloat16_enabled", "float16_enabled", "fp16_enabled")


@dataclass(frozen=True, slots=True)
class Setting:
    """One precision setting, such as `TrainingArguments.bf16`.

    location  the file and line of the function call in which the setting was found
    """

    name: str
    value: str
    location: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerFacts:
    """An optimizer with the dtypes of its parameters, gradients and states."""

    optimizer: torch.optim.Optimizer
    parameters: Counter[torch.dtype]
    gradients: Counter[torch.dtype]
    states: Counter[torch.dtype]

    @property
    def class_name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def has_odd_tensor(self) -> bool:
        """Whether a gradient or a state has another dtype than its parameter."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                values = [parameter.grad, *self.optimizer.state.get(parameter, {}).values()]
                tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dim() > 0]
                if any(tensor.dtype != parameter.dtype for tensor in tensors):
                    return True
        return False

    def __str__(self) -> str:
        return (
            f"{self.class_name}: parameters {_describe(self.parameters)}, gradients"
            f" {_describe(self.gradients)}, states {_describe(self.states)}"
        )


def _describe(counts: Counter[torch.dtype]) -> str:
    return " ".join(format_dtype(dtype) for dtype, _ in counts.most_common()) or "none"


def read_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerFacts:
    parameters: Counter[torch.dtype] = Counter()
    gradients: Counter[torch.dtype] = Counter()
    states: Counter[torch.dtype] = Counter()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameters[parameter.dtype] += 1
            if parameter.grad is not None:
                gradients[parameter.grad.dtype] += 1
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    states[value.dtype] += 1
    return OptimizerFacts(optimizer, parameters, gradients, states)


def find_optimizer(frames: Sequence[CallFrame]) -> OptimizerFacts | None:
    """Returns the optimizer from the innermost frame that has one in its variables."""
    for _, value in _iterate_values(reversed(frames)):
        if isinstance(value, torch.optim.Optimizer):
            return read_optimizer(value)
    return None


def collect_settings(frames: Sequence[CallFrame]) -> list[Setting]:
    """Returns all precision settings in the frames, without duplicates."""
    settings: dict[str, Setting] = {}
    for frame, value in _iterate_values(frames):
        for setting in _read_settings(frame, value):
            settings.setdefault(setting.name, setting)
    return list(settings.values())


def _iterate_values(frames: Any) -> Iterator[tuple[CallFrame, Any]]:
    """Yields the variables of the frames, and the values stored in attributes of `self`."""
    for frame in frames:
        for name, value in list(frame.variables.items()):
            yield frame, value
            if name in ("self", "trainer", "args"):
                stored = getattr(value, "__dict__", None)
                if isinstance(stored, dict):
                    for item in list(stored.values()):
                        yield frame, item


def is_prepared_model(frames: Sequence[CallFrame], model: object) -> bool:
    """True if an Accelerator in the frames has prepared this model for training."""
    for _, value in _iterate_values(frames):
        if type(value).__name__ == "Accelerator":
            models = getattr(value, "__dict__", {}).get("_models", ())
            if any(prepared is model for prepared in models):
                return True
    return False


def runs_under_autocast(frames: Sequence[CallFrame], model: nn.Module | None) -> bool:
    """False if the Accelerators and Trainers in the frames run other models under autocast, but not
    this one: a frozen encoder that was never prepared runs in the dtype of its weights.
    """
    trained: list[nn.Module] = []
    has_accelerator = has_arguments = False
    for _, value in _iterate_values(frames):
        class_names = {kind.__name__ for kind in type(value).__mro__}
        stored = getattr(value, "__dict__", {})
        if "Accelerator" in class_names:
            has_accelerator = True
            trained += [part for part in stored.get("_models", ()) if isinstance(part, nn.Module)]
        elif "Trainer" in class_names and isinstance(stored.get("model"), nn.Module):
            trained.append(stored["model"])
        has_arguments = has_arguments or "TrainingArguments" in class_names
    if not trained or model is None:
        return has_arguments or not has_accelerator
    return any(
        any(part is model for part in other.modules())
        or any(part is other for part in model.modules())
        for other in trained
    )


def find_arguments_without_autocast(frames: Sequence[CallFrame]) -> str:
    """Returns the class of a Trainer's arguments in the frames in which neither bf16 nor fp16 is
    set. Returns "" if there are none.
    """
    for _, value in _iterate_values(frames):
        class_names = [kind.__name__ for kind in type(value).__mro__]
        stored = getattr(value, "__dict__", None)
        if "TrainingArguments" in class_names and isinstance(stored, dict):
            is_set = stored.get("bf16") or stored.get("fp16")
            return "" if is_set else class_names[0]
    return ""


def _read_settings(frame: CallFrame, value: Any) -> Iterator[Setting]:
    class_names = [kind.__name__ for kind in type(value).__mro__]
    if "TrainingArguments" in class_names:
        for name in _ARGUMENT_NAMES:
            setting = value.__dict__.get(name)
            if setting:
                yield Setting(f"{class_names[0]}.{name}", str(setting), frame.location)
    elif (mixed_precision := read_mixed_precision(value)) is not None:
        yield Setting("Accelerator.mixed_precision", mixed_precision, frame.location)
    elif "GradScaler" in class_names and value.is_enabled():
        yield Setting("GradScaler", "enabled", frame.location)
    elif "DeepSpeedEngine" in class_names:
        config = getattr(value, "_config", None)
        for name in _DEEPSPEED_NAMES:
            if getattr(config, name, False):
                yield Setting(f"DeepSpeed.{name}", "True", frame.location)

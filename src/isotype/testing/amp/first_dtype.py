"""AC024: a module that stores a tensor in the dtype of its first call (a rotary table, a mask) and uses it again in the next call.

The same module is called in low precision and then in fp32, and again with both calls in fp32 on the same values. State that depends
on values (a cache, an average, a counter) is the same in both; what differs was kept in the first dtype.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ...finding import Severity
from .attempt import floating
from .fault import Fault, fault
from .numerics import Numerics
from .places import is_users

_OFF = 16 * torch.finfo(torch.float32).eps  # relative distance of two runs in fp32 that are the same but for a few orders of addition


def first_dtype_faults(numerics: Numerics) -> list[Fault]:
    """Modules only: a plain callable's state is its caller's."""
    subject = numerics.subject
    if not isinstance(subject.target, nn.Module):
        return []
    module = subject.target
    runs = [_second_call(module, numerics, first) for first in (None, torch.float32, torch.bfloat16)]
    if any(run is None for run in runs):
        return []
    never, wide, low = (run for run in runs if run is not None)
    if not _alike(never, wide) or _alike(wide, low):
        return []
    place = subject.place
    if place.file is None or not is_users(place.file):
        return []
    held = _held_in_first_dtype(module, numerics)
    named = f" ({', '.join(held)})" if held else ""
    return [
        fault(
            "AC024",
            f"{subject.label} keeps a table in the dtype of its first call{named}",
            place,
            "called with bf16 first, and then with fp32, its output in fp32 is rounded to bf16; called with fp32 both times it is not: a "
            "rehearsal, an evaluation or a generation in another dtype decides the precision of what is trained after it",
            "keep the table in fp32 and cast it where it is used (`cos.to(x.dtype)`), or ask for its dtype too before it is used again",
            Severity.WARNING,
        )
    ]


def _second_call(module: nn.Module, numerics: Numerics, first: torch.dtype | None) -> list[Tensor] | None:
    """The outputs in fp32 after a call in `first` on the same values; None where one of the calls fails."""
    try:
        own = copy.deepcopy(module).to(torch.bfloat16).to(torch.float32)
        if first is not None:
            own.to(first)
            _call(own, numerics, first)
            own.to(torch.float32)
        return [t.detach().double() for t in floating(_call(own, numerics, torch.float32))]
    except Exception:  # a module that refuses another dtype keeps nothing from it
        return None


def _call(module: nn.Module, numerics: Numerics, dtype: torch.dtype) -> Any:
    sample = numerics.sample
    leaves = [x.detach().bfloat16().to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in sample.leaves]
    args, kwargs = sample.call_arguments(leaves)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return module(*args, **kwargs)


def _alike(left: list[Tensor], right: list[Tensor]) -> bool:
    return [t.shape for t in left] == [t.shape for t in right] and all(
        float((a - b).norm()) <= _OFF * float(b.norm()) for a, b in zip(left, right)
    )


def _held_in_first_dtype(module: nn.Module, numerics: Numerics) -> list[str]:
    """Attributes, with their module's path, that hold a bf16 tensor after a call in bf16 and a cast of the module back to fp32."""
    own = copy.deepcopy(module).to(torch.bfloat16)
    _call(own, numerics, torch.bfloat16)
    own.to(torch.float32)
    return [
        f"{path}.{name}".strip(".")
        for path, inner in own.named_modules()
        for name, value in vars(inner).items()
        if not name.startswith(("_parameters", "_buffers", "_modules")) and any(t.dtype == torch.bfloat16 for t in _tensors(value))
    ]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []

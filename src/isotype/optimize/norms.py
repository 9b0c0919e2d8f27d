"""Norms: a module with one vector `weight`, no bias and no children, whose forward `rms_norm`
reproduces.
"""

from __future__ import annotations

from functools import partial
from inspect import signature

import torch
from torch import nn

from ..instance_method import Placement
from ..ops import rms_norm
from .forwards import USUAL_EPSILON, NormSettings, norm_forward
from .instances import put_found, same_in_both_modes, stand_in, taken

PART = "norm"


def is_candidate(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return (
        list(own) == ["weight"]
        and own["weight"].dim() == 1
        and not list(module.children())
        and "Norm" in type(module).__name__
    )


def epsilons(module: nn.Module) -> list[str | None]:
    """The attributes of the instance that have a small positive number."""
    found: list[str | None] = [
        name for name, v in vars(module).items() if isinstance(v, float) and 0 < v < 1e-2
    ]
    return found or [None]


def recognise(
    module: nn.Module, out_dtype: torch.dtype | None, *, remade: bool
) -> NormSettings | str:
    """The settings with which `rms_norm` gives this module's output on a probe, or why none do."""
    # as wide as the module: torch's own norm refuses any other width
    size = module.get_parameter("weight").shape[0]
    weight = nn.Parameter(torch.linspace(-1.0, 2.0, size, dtype=torch.float32), requires_grad=False)
    twin = stand_in(module, {}, {"weight": weight})
    # small enough that a wrong eps shows
    x = torch.linspace(-3e-3, 4e-3, 2 * size).view(2, size)
    for eps in epsilons(module):
        for unit_offset in (False, True):
            number = USUAL_EPSILON if eps is None else float(vars(module)[eps])
            ours = partial(rms_norm, x, weight, number, unit_offset=unit_offset)
            if same_in_both_modes(twin, partial(type(module).forward, twin, x), ours, x, weight):
                inputs = signature(type(module).forward).parameters.values()
                beside = [
                    one.name
                    for one in inputs
                    if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
                ][2:]
                # the probe has none, and with a gate it is another function: the model's own code
                # would run behind the name of the op
                if beside:
                    return f"its forward takes {beside[0]} beside its input"
                return NormSettings(eps, unit_offset, out_dtype, remade)
    return "its output is not RMSNorm's on a probe"


def place(
    path: str, module: nn.Module, out_dtype: torch.dtype | None, *, remade: bool = False
) -> Placement:
    """Puts `rms_norm` on the module at this path of the model, where it gives the module's output."""
    found = taken(module) or recognise(module, out_dtype, remade=remade)
    note = "1 + weight" if isinstance(found, NormSettings) and found.unit_offset else ""
    return put_found(PART, path, module, found, norm_forward, "rms_norm", note)

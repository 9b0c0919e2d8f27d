"""Norms: a module with one vector `weight`, no bias and no children, whose forward `rms_norm` reproduces."""

from __future__ import annotations

from functools import partial
from inspect import signature

import torch
from torch import nn

from ..instance_method import Placement, put
from ..ops import rms_norm
from .forwards import USUAL_EPSILON, NormSettings, norm_forward
from .instances import placement, same_in_both_modes, stand_in

PART = "norm"


def is_candidate(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return list(own) == ["weight"] and own["weight"].dim() == 1 and not list(module.children()) and "Norm" in type(module).__name__


def epsilons(module: nn.Module) -> list[str | None]:
    """The attributes of the instance that have a small positive number."""
    found: list[str | None] = [name for name, v in vars(module).items() if isinstance(v, float) and 0 < v < 1e-2]
    return found or [None]


def epsilon(module: nn.Module, name: str | None) -> float:
    return USUAL_EPSILON if name is None else float(vars(module)[name])


def recognise(module: nn.Module) -> NormSettings | None:
    """The settings with which `rms_norm` gives this module's output on a probe; None where no settings do."""
    # as wide as the module: torch's own norm refuses any other width
    size = module.get_parameter("weight").shape[0]
    weight = nn.Parameter(torch.linspace(-1.0, 2.0, size, dtype=torch.float32), requires_grad=False)
    twin = stand_in(module, {}, {"weight": weight})
    # small enough that a wrong eps shows
    x = torch.linspace(-3e-3, 4e-3, 2 * size).view(2, size)
    for eps in epsilons(module):
        for unit_offset in (False, True):
            ours = partial(rms_norm, x, weight, epsilon(module, eps), unit_offset=unit_offset)
            if same_in_both_modes(twin, partial(type(module).forward, twin, x), ours, x, weight):
                return NormSettings(eps, unit_offset, None)
    return None


def _further_inputs(module: nn.Module) -> list[str]:
    """What a norm's forward is given by name besides its input, as a gated norm's `gate`."""
    taken = signature(type(module).forward).parameters.values()
    return [one.name for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)][2:]


def place(path: str, module: nn.Module, out_dtype: torch.dtype | None, *, remade: bool = False) -> Placement:
    """Puts `rms_norm` on the module at this path of the model, where it gives the module's output."""
    found = recognise(module)
    if found is None:
        return placement(PART, path, module, None, "its output is not RMSNorm's on a probe")
    if beside := _further_inputs(module):
        # the probe has none, and with a gate it is another function: the model's own code would run behind the name of the op
        return placement(PART, path, module, None, f"its forward takes {beside[0]} beside its input")
    put(module, norm_forward, NormSettings(found.eps, found.unit_offset, out_dtype, remade))
    return placement(PART, path, module, "rms_norm", "1 + weight" if found.unit_offset else "")

"""Norms: a module with one vector `weight`, no bias and no children, whose forward `rms_norm` reproduces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import rms_norm
from ..placement import Placement
from .instances import placement, put, same, settings_of, stand_in

PART = "norm"
_SIZE = 16


@dataclass(frozen=True)
class NormSettings:
    eps: float
    unit_offset: bool
    out_dtype: torch.dtype | None


def is_candidate(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return list(own) == ["weight"] and own["weight"].dim() == 1 and not list(module.children()) and "Norm" in type(module).__name__


def epsilons(module: nn.Module) -> list[float]:
    """The small positive numbers among the instance's attributes, under any name."""
    found = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2]
    return found or [1e-6]


def recognise(module: nn.Module) -> NormSettings | None:
    """The settings with which `rms_norm` gives this module's output on a probe; None where no settings do."""
    weight = nn.Parameter(torch.linspace(-1.0, 2.0, _SIZE, dtype=torch.float32), requires_grad=False)
    twin = stand_in(module, {}, {"weight": weight})
    # small enough that a wrong eps shows
    x = torch.linspace(-3e-3, 4e-3, 2 * _SIZE).view(2, _SIZE)
    for eps in epsilons(module):
        for unit_offset in (False, True):
            if same(partial(type(module).forward, twin, x), partial(rms_norm, x, weight, eps, unit_offset=unit_offset)):
                return NormSettings(eps, unit_offset, None)
    return None


def norm_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    s: NormSettings = settings_of(self)
    if args or kwargs:
        own: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return own
    return rms_norm(hidden_states, self.weight, s.eps, unit_offset=s.unit_offset, out_dtype=s.out_dtype)


def place(path: str, module: nn.Module, out_dtype: torch.dtype | None) -> Placement:
    """Puts `rms_norm` on the module at this path of the model, where it gives the module's output."""
    found = recognise(module)
    if found is None:
        return placement(PART, path, module, None, "its output is not RMSNorm's on a probe")
    put(module, norm_forward, NormSettings(found.eps, found.unit_offset, out_dtype))
    return placement(PART, path, module, "rms_norm", "1 + weight" if found.unit_offset else "")

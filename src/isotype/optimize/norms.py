"""Norms: a module with one vector `weight`, no bias and no children, whose forward `rms_norm` reproduces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..instance_method import MARK, InstanceMethod, put
from ..ops import add_rms_norm, rms_norm
from ..ops.remade import remember
from ..placement import Placement
from .instances import placement, same_in_both_modes, stand_in

PART = "norm"


@dataclass(frozen=True)
class NormSettings:
    """eps     the attribute that has it, read at every call: it may be changed afterwards; None where it is written in the class's code
    remade  a LoRA layer or an attention that reads the output saves the norm's input in its place
    """

    eps: str | None
    unit_offset: bool
    out_dtype: torch.dtype | None
    remade: bool = False


def is_candidate(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return list(own) == ["weight"] and own["weight"].dim() == 1 and not list(module.children()) and "Norm" in type(module).__name__


_USUAL_EPSILON = 1e-6


def epsilons(module: nn.Module) -> list[str | None]:
    """The attributes of the instance that have a small positive number."""
    found: list[str | None] = [name for name, v in vars(module).items() if isinstance(v, float) and 0 < v < 1e-2]
    return found or [None]


def epsilon(module: nn.Module, name: str | None) -> float:
    return _USUAL_EPSILON if name is None else float(vars(module)[name])


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


def with_residual(norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual) by a call of the module, so that whoever observes it sees the call."""
    method = norm.__dict__.get("forward")
    ours = type(method) is InstanceMethod and method.function is norm_forward and not torch.compiler.is_dynamo_compiling()
    hooks = norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    if not ours or "weight" not in norm._parameters or (hooks and _changed_by_hooks(norm)):
        # no wrapper around it, on a weight that is its parameter and not made from others; a hook may change what the norm is given
        total = x if residual is None else residual + x
        return norm(total), total
    beside = [residual]
    normed: Tensor = norm(x, beside=beside)
    (made,) = beside
    return normed, x if made is None else made


def _changed_by_hooks(norm: nn.Module) -> bool:
    changing = (norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    return any(not getattr(hook, "observes", False) for hooks in changing for hook in hooks.values())


def norm_forward(self: Any, hidden_states: Tensor, *args: Any, beside: list[Tensor | None] | None = None, **kwargs: Any) -> Tensor:
    """beside  one tensor that is added to the input first, or None: the call leaves the sum there, whose gradient comes back too"""
    if args or kwargs:
        own: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return own
    s: NormSettings = self.__dict__[MARK][0]
    eps = _USUAL_EPSILON if s.eps is None else self.__dict__[s.eps]
    # read once: `torch.nn.utils.parametrize` makes it anew at every reading
    weight: Tensor = self._parameters["weight"] if beside is not None else self.weight
    if beside is not None:
        made, beside[0] = add_rms_norm(hidden_states, beside[0], weight, eps, unit_offset=s.unit_offset, out_dtype=s.out_dtype)
        return made
    if not s.remade:
        return rms_norm(hidden_states, weight, eps, unit_offset=s.unit_offset, out_dtype=s.out_dtype)
    norm = partial(rms_norm, eps=eps, unit_offset=s.unit_offset, out_dtype=s.out_dtype)
    return remember(norm(hidden_states, weight), norm, hidden_states, weight)


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

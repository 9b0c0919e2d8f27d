"""Runs a gated MLP's three layers in one function, where the result is the model's; checked at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.backend import reference_runs, results_are_kept
from ..ops.gated import Gated
from .attach import is_fused, projections, shared_dtypes
from .call import Call, bare_call_of, call_now
from .dropout import dropout_mask
from .mlp import lora_mlp
from .plain import bare_reason, has_hooks, is_lora, why_not_fused


def why_not_one(layers: list[Any]) -> str | None:
    """Why these layers (gate, up, down; or gate and up in one, down) do not run as one function now, or None. Lookups only."""
    adapted = 0
    for layer in layers:
        if has_hooks(layer):
            return "a hook on a layer"
        if is_lora(layer):
            if not is_fused(layer):
                return "a LoRA layer that is not fused"
            reason = why_not_fused(layer)
            adapted += 1
        else:
            reason = bare_reason(layer)
        if reason is not None:
            return reason
    return None if adapted else "no LoRA layer"


def run_gated(layers: list[Any], x: Tensor, kind: Gated) -> Tensor | None:
    """down(activation(gate(x)) * up(x)) in one function, or None where the layers have to be called: always PEFT's result."""
    if not x.dtype.is_floating_point or reference_runs() or results_are_kept():
        return None
    calls = _calls(layers, x)
    if calls is None:
        return None
    *inner, down = calls
    dtypes = shared_dtypes(x, inner)
    if dtypes is None or dtypes.out != dtypes.compute or down.decide(x, dtypes.out) != dtypes:
        return None
    made = projections(x, inner)
    keep = None
    if down.dropout:
        # the product that is dropped from is not made yet: of it only the shape and the device count
        keep = dropout_mask(torch.empty((*x.shape[:-1], down.features), dtype=torch.bool, device=x.device), down.dropout)
        keep = keep.reshape(-1, down.features)
    return lora_mlp(x, made, down.projection(keep), kind, dtypes)


def _calls(layers: list[Any], x: Tensor) -> list[Call] | None:
    """Of layers for which `why_not_one` has no reason, else None."""
    calls: list[Call] = []
    adapted = False
    for layer in layers:
        if has_hooks(layer):
            return None
        # asked at every call: `fuse_lora` puts its forward on LoRA layers only
        if is_fused(layer):
            call, adapted = call_now(layer, x), True
            if call is None:
                return None
        elif is_lora(layer) or bare_reason(layer) is not None:
            return None
        else:
            call = bare_call_of(layer)
        calls.append(call)
    return calls if adapted else None

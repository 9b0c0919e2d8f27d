"""Puts the fused op on PEFT's own layers, by instance, and takes it off again. No class is patched.

At every call a fused layer checks whether it is still plain and looks its weights up. If it is not plain, it runs PEFT's code. So an
adapter may be merged, disabled, switched, hooked or replaced at any time. The forward is a bound method; deepcopy binds it to the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..instance_method import InstanceMethod
from ..ops.backend import reference_runs, results_are_kept
from ..ops.recompute import hooks_read_here, is_recomputed
from ..placement import Placement
from . import siblings
from .call import Call, call_now, wants_fp32_branch
from .dropout import dropout_mask
from .dtypes import LoraDtypes
from .group import Projection, lora_group
from .linear import lora_linear
from .plain import forget_parts, has_hooks, kind_reason, lora_layers, why_not_fused

_FUSED = "_isotype_fused"


def fuse_lora(model: nn.Module, *, branch_fp32: bool = False) -> list[Placement]:
    """Attaches the fused op to every LoRA layer whose kind has one; a line for every LoRA layer, in the model's order.

    branch_fp32  computes the adapters' own products in fp32 beside narrow base products

    A layer that must run PEFT's code for now (adapter disabled, merged, several active) is attached too, and fuses when that ends.
    """
    placements = []
    for path, layer in lora_layers(model):
        reason = kind_reason(layer)
        if reason is None and not is_fused(layer):
            if "forward" in vars(layer):
                reason = "the layer's forward has been replaced by another library"
            else:
                vars(layer)[_FUSED] = InstanceMethod(forward, layer)
                vars(layer)[_FUSED].put()
        if reason is None:
            wants_fp32_branch(layer, branch_fp32)
        reason = reason or why_not_fused(layer)
        placements.append(Placement("lora", path, type(layer.base_layer).__name__, None if reason else "lora_linear", reason or ""))
    if placements:
        for path, module in model.named_modules():
            siblings.link(module, path, is_fused)
    return placements


def unfuse_lora(model: nn.Module) -> int:
    """Undoes `fuse_lora` and returns the number of layers. Other layers, and wrappers that other libraries added since, are unchanged."""
    fused = [layer for _, layer in lora_layers(model) if _FUSED in vars(layer)]
    for layer in fused:
        vars(layer).pop(_FUSED).take_back()
        wants_fp32_branch(layer, False)
        siblings.unlink(layer)
        forget_parts(layer)
    return len(fused)


def is_fused(layer: nn.Module) -> bool:
    """Whether calling this layer calls the forward that `fuse_lora` attached, with no wrapper around it."""
    own = layer.__dict__
    method = own.get("forward")
    return own.get(_FUSED, layer) is method and method.stands


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A LoRA layer's forward: fused while the layer is plain, else PEFT's own."""
    if args or kwargs or not x.dtype.is_floating_point or reference_runs() or results_are_kept():
        return _peft_forward(self, x, *args, **kwargs)
    call = call_now(self, x)
    if call is None:
        return _peft_forward(self, x)
    if has_hooks(self) and is_recomputed():
        hooks_read_here()
    ready = siblings.take(self, x, call.tensors)
    if ready is not None:
        return ready
    together = _together(self, x, call)
    if together is not None:
        return together
    assert call.a is not None
    assert call.b is not None
    numbers: dict[str, Any] = {"scale": call.scale, "dropout": call.dropout, "branch_fp32": call.branch_fp32}
    return lora_linear(x, call.weight, call.a, call.b, call.bias, quant_state=call.quant_state, compute_dtype=call.compute_dtype, **numbers)


def _together(layer: Any, x: Tensor, call: Call) -> Tensor | None:
    """Computes this layer and its siblings in one product, and stores their outputs for their calls. None where they cannot share one."""
    group = siblings.group_of(layer)
    if group is None:
        return None
    rest, calls = group.followers, [call]
    for other in rest:
        siblings.forget(other)
        its_call = call_now(other, x) if is_fused(other) else None
        if its_call is None:
            return None
        calls.append(its_call)
    dtypes = shared_dtypes(x, calls)
    at = siblings.common_call(group, x)
    if dtypes is None or at is None:
        return None
    y, *others = lora_group(x, projections(x, calls), dtypes)
    for other, its_call, output in zip(rest, calls[1:], others):
        siblings.leave(other, x, output, its_call.tensors, at)
    return y


def shared_dtypes(x: Tensor, calls: list[Call]) -> LoraDtypes | None:
    """The dtypes with which these calls can share the products of x; None where they differ, or one computes its adapter branch in fp32."""
    features = x.shape[-1]
    first, *rest = calls
    kind = first.kind
    for call in calls:
        if call.features != features:
            return None
    dtypes = first.decide(x)
    for call in rest:
        # of one kind the dtypes are the same
        if call.kind != kind and call.decide(x) != dtypes:
            return None
    return None if dtypes.wide else dtypes


def projections(x: Tensor, calls: list[Call]) -> list[Projection]:
    """The calls' tensors, each with its dropout drawn in the order in which PEFT's layers would draw them."""
    return [call.projection(dropout_mask(x, call.dropout).reshape(-1, x.shape[-1]) if call.dropout else None) for call in calls]


def _peft_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Runs PEFT's code. bitsandbytes must not repack the weight in place: it never undoes that, and later gradients would be wrong."""
    base = layer.base_layer
    own: Callable[..., Tensor] = type(layer).forward
    repacks = getattr(base, "support_avx512bf16_for_cpu", False)
    if not repacks:
        return own(layer, x, *args, **kwargs)
    base.support_avx512bf16_for_cpu = False
    try:
        return own(layer, x, *args, **kwargs)
    finally:
        base.support_avx512bf16_for_cpu = repacks

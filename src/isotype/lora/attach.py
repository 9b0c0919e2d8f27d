"""Puts the fused op on PEFT's own layers, by instance, and takes it off again. No class is patched.

A fused layer asks at every call whether it is still plain, looks its weights up then, and otherwise runs PEFT's code: merging,
disabling, switching, hooking or swapping an adapter later needs no word to anyone. Its forward is a bound method, which a
deepcopy binds anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..instance_method import InstanceMethod
from ..ops.backend import reference_runs
from ..ops.recompute import hooks_read_here, is_recomputed
from . import siblings
from .call import Call, call_of, dropout_mask, wants_fp32_branch
from .group import Projection, lora_group
from .linear import lora_linear
from .plain import forget_parts, has_hooks, kind_reason, lora_layers, why_not_fused

_FUSED = "_isotype_fused"


@dataclass(frozen=True, slots=True)
class LoraPlacement:
    """One LoRA layer of the model.

    module   its path in the model
    kind     its base layer's class
    op       the op that runs there; None where PEFT's own code does
    reason   why PEFT's own code runs
    """

    module: str
    kind: str
    op: str | None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.module}: {self.op}" if self.op else f"{self.module}: PEFT's own code: {self.reason}"


def fuse_lora(model: nn.Module, *, branch_fp32: bool = False) -> list[LoraPlacement]:
    """Attaches the fused op to every LoRA layer whose kind has one; a line for every LoRA layer, in the model's order.

    branch_fp32  computes the adapters' own products in fp32 beside narrow base products

    A layer that PEFT's own code runs for now (adapter disabled, merged, several active) is attached too and fuses when that ends.
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
        placements.append(LoraPlacement(path, type(layer.base_layer).__name__, None if reason else "lora_linear", reason or ""))
    if placements:
        for module in model.modules():
            siblings.link(module, is_fused)
    return placements


def unfuse_lora(model: nn.Module) -> int:
    """Undoes `fuse_lora` and gives the number of layers; those it did not touch, and what others have put around it, stay as they are."""
    fused = [layer for _, layer in lora_layers(model) if _FUSED in vars(layer)]
    for layer in fused:
        vars(layer).pop(_FUSED).take_back()
        wants_fp32_branch(layer, False)
        siblings.unlink(layer)
        forget_parts(layer)
    return len(fused)


def is_fused(layer: nn.Module) -> bool:
    """Whether the forward that `fuse_lora` has attached to this layer is the one that is called, with nothing around it."""
    return vars(layer).get(_FUSED, layer) is vars(layer).get("forward")


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A LoRA layer's forward: fused while the layer is plain, else PEFT's own."""
    if args or kwargs or not x.is_floating_point() or reference_runs() or why_not_fused(self) is not None:
        return _peft_forward(self, x, *args, **kwargs)
    if is_recomputed() and has_hooks(self):
        hooks_read_here()
    call = call_of(self, x)
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
    """This layer's output, with its siblings' left for their own calls; None where they do not belong to one product now."""
    rest = siblings.followers(layer)
    if not rest:
        return None
    calls = [call]
    for other in rest:
        siblings.forget(other)
        if not is_fused(other) or why_not_fused(other) is not None:
            return None
        calls.append(call_of(other, x))
    if not belong_together(x, calls):
        return None
    y, *others = lora_group(x, projections(x, calls), call.decide(x))
    for other, its_call, output in zip(rest, calls[1:], others):
        siblings.leave(other, x, output, its_call.tensors)
    return y


def belong_together(x: Tensor, calls: list[Call]) -> bool:
    """Whether the layers of these calls can share x's products: one decision of dtypes, none with a branch of its own in fp32."""
    dtypes = calls[0].decide(x)
    return not dtypes.wide and all(c.decide(x) == dtypes for c in calls[1:]) and all(c.features == x.shape[-1] for c in calls)


def projections(x: Tensor, calls: list[Call]) -> list[Projection]:
    """The calls' tensors, each with its dropout drawn in the order in which PEFT's layers would draw them."""
    return [call.projection(dropout_mask(x.shape, x.device, call.dropout)) for call in calls]


def _peft_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """PEFT's code. bitsandbytes must not repack the weight in place on the way: it never unpacks it, and later gradients are wrong."""
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

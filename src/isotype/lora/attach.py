"""Puts the fused op on PEFT's own layers, by instance, and takes it off again. No class is patched.

A fused layer asks at every call whether it is still plain, looks its weights up then, and otherwise runs PEFT's code: merging,
disabling, switching, hooking or swapping an adapter later needs no word to anyone. Its forward is a bound method, which a
deepcopy binds anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..ops.backend import reference_runs
from . import siblings
from .dtypes import LoraDtypes, decide
from .group import Projection, lora_group
from .linear import lora_linear
from .quantised import forward_4bit, is_4bit, state_reason


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


def fuse_lora(model: nn.Module) -> list[LoraPlacement]:
    """Attaches the fused op to every LoRA layer whose kind has one; a line for every LoRA layer, in the model's order.

    A layer that PEFT's own code runs for now (adapter disabled, merged, several active) is attached too and fuses when that ends.
    """
    placements = []
    for path, layer in lora_layers(model):
        reason = kind_reason(layer)
        if reason is None and not is_fused(layer):
            if "forward" in vars(layer):
                reason = "the layer's forward has been replaced by another library"
            else:
                layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]
        reason = reason or why_not_fused(layer)
        placements.append(LoraPlacement(path, type(layer.base_layer).__name__, None if reason else "lora_linear", reason or ""))
    if placements:
        for module in model.modules():
            siblings.link(module, is_fused)
    return placements


def unfuse_lora(model: nn.Module) -> int:
    """Undoes `fuse_lora` exactly and gives the number of layers; those it did not touch stay as they are."""
    fused = [layer for _, layer in lora_layers(model) if is_fused(layer)]
    for layer in fused:
        del layer.forward
        siblings.unlink(layer)
    return len(fused)


def is_fused(layer: nn.Module) -> bool:
    """Whether `fuse_lora` has attached its forward to this layer."""
    return getattr(vars(layer).get("forward"), "__func__", None) is forward


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, layer) for every LoRA layer of any kind; nothing where PEFT was never imported."""
    import sys

    if "peft" not in sys.modules:
        return
    from peft.tuners.lora.layer import LoraLayer

    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield path, module


def kind_reason(layer: Any) -> str | None:
    """Why this kind of layer has no fused op, or None."""
    from peft.tuners import lora

    base = layer.base_layer
    # exact types: a subclass may compute something else
    if type(layer) is lora.Linear and type(base) is nn.Linear:
        return "the weight is stored transposed (fan_in_fan_out)" if layer.fan_in_fan_out else None
    if type(layer) is getattr(lora, "Linear4bit", None) and type(base).__name__ in ("Linear4bit", "LinearNF4", "LinearFP4"):
        return None if is_4bit(base) else "not bitsandbytes' own 4-bit layer"
    if type(base).__name__ == "Linear8bitLt":
        # on a GPU that layer also rounds activations to 8 bits: a product of the widened weight would be another result
        return "an 8-bit layer's product also quantises activations"
    return f"no fused op for {type(layer).__name__} over {type(base).__name__}"


def why_not_fused(layer: Any) -> str | None:
    """Why PEFT's own code runs at this moment, or None. Asked at every call: lookups only."""
    if layer._disable_adapters:
        return "the adapter is disabled"
    if layer.merged_adapters:
        return "the adapter is merged into the weight"
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    if len(active) != 1:
        return "several adapters are active" if active else "no active adapter"
    adapter = active[0]
    if adapter in layer.lora_variant:
        return f"a variant of LoRA ({type(layer.lora_variant[adapter]).__name__})"
    a, b, dropout, base = layer.lora_A[adapter], layer.lora_B[adapter], layer.lora_dropout[adapter], layer.base_layer
    if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None:
        return "the adapter's own layers are not plain nn.Linear"
    if b.bias is not None:
        return "lora_B has a bias (lora_bias)"
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"a dropout of another kind ({type(dropout).__name__})"
    for part in (base, a, b, dropout):
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return f"a hook on {'the base layer' if part is base else 'a part of the adapter'}"
        if "forward" in vars(part) and getattr(vars(part)["forward"], "__func__", None) is not forward_4bit:
            return f"another forward on {'the base layer' if part is base else 'a part of the adapter'}"
    return weight_reason(base)


def weight_reason(base: nn.Module) -> str | None:
    """Why this base layer's weight, as it is now, has no fused product; or None."""
    weight = base.weight
    if type(base) is nn.Linear:
        return None if type(weight) in (nn.Parameter, Tensor, FakeTensor) else f"the weight is a {type(weight).__name__}"
    return state_reason(base)


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A LoRA layer's forward: fused while the layer is plain, else PEFT's own."""
    if args or kwargs or not x.is_floating_point() or reference_runs() or why_not_fused(self) is not None:
        return _peft_forward(self, x, *args, **kwargs)
    projection, scale, dropout = _call(self, x)
    if dropout == 0.0:
        ready = siblings.take(self, x, projection[:4])
        if ready is not None:
            return ready
        together = _together(self, x, projection, scale)
        if together is not None:
            return together
    weight, bias, a, b, quant_state = projection
    compute = None if quant_state is None else self.base_layer.compute_dtype
    return lora_linear(x, weight, a, b, bias, scale=scale, dropout=dropout, quant_state=quant_state, compute_dtype=compute)


def _call(layer: Any, x: Tensor) -> tuple[Projection, float, float]:
    """(tensors, scale, dropout's probability) of a plain layer at this moment."""
    adapter = next(name for name in layer.active_adapters if name in layer.lora_A)
    base, dropout = layer.base_layer, layer.lora_dropout[adapter]
    quantised = type(base) is not nn.Linear
    if quantised and not base.compute_type_is_set:
        # bitsandbytes' layer takes the first input's dtype for good where none was given
        base.set_compute_type(x)
        base.compute_type_is_set = True
    state = base.weight.quant_state if quantised else None
    projection = Projection(base.weight, base.bias, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, state)
    return projection, float(layer.scaling[adapter]), dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0


def _decide(layer: Any, x: Tensor, projection: Projection) -> LoraDtypes:
    quantised = projection.quant_state is not None
    weight_dtype = (layer.base_layer.compute_dtype or x.dtype) if quantised else projection.weight.dtype
    return decide(x, weight_dtype, torch.promote_types(projection.a.dtype, projection.b.dtype), quantised=quantised)


def _together(layer: Any, x: Tensor, projection: Projection, scale: float) -> Tensor | None:
    """This layer's output, with its siblings' left for their own calls; None where they do not belong to one product now."""
    rest = siblings.followers(layer)
    if not rest:
        return None
    calls = [(projection, scale, 0.0)]
    for other in rest:
        siblings.forget(other)
        if not is_fused(other) or why_not_fused(other) is not None:
            return None
        calls.append(_call(other, x))
    dtypes = _decide(layer, x, projection)
    if dtypes.wide or any(call_scale != scale or dropout for _, call_scale, dropout in calls):
        return None
    if any(_decide(other, x, call[0]) != dtypes for other, call in zip(rest, calls[1:])):
        return None
    if len({p.a.shape[1] for p, _, _ in calls}) != 1 or x.shape[-1] != projection.a.shape[1]:
        return None
    y, *others = lora_group(x, [call[0] for call in calls], scale, dtypes)
    for other, call, output in zip(rest, calls[1:], others):
        siblings.leave(other, x, output, call[0][:4])
    return y


def _peft_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """PEFT's code. bitsandbytes must not repack the weight in place on the way: it never unpacks it, and later gradients are wrong."""
    base = layer.base_layer
    repacks = getattr(base, "support_avx512bf16_for_cpu", False)
    if not repacks:
        return type(layer).forward(layer, x, *args, **kwargs)
    base.support_avx512bf16_for_cpu = False
    try:
        return type(layer).forward(layer, x, *args, **kwargs)
    finally:
        base.support_avx512bf16_for_cpu = repacks

"""Which layers the fused ops compute exactly as PEFT does, and why others run PEFT's code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as every_module

from .quantised import PackedLinear, forward_4bit, is_4bit, is_packed, state_reason

# the dictionaries in which PyTorch keeps the hooks of `register_module_forward_hook` and the like
_OF_ALL_MODULES = HOOKS_OF_ALL, PRE_HOOKS_OF_ALL, _, _ = (
    every_module._global_forward_hooks,
    every_module._global_forward_pre_hooks,
    every_module._global_backward_hooks,
    every_module._global_backward_pre_hooks,
)
# what a fused op computes in place of a plain layer
_LINEAR = nn.Linear.forward
# kinds of a plain nn.Linear's weight
DENSE = (nn.Parameter, Tensor, FakeTensor)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, layer) for every LoRA layer of any kind; nothing where PEFT was never imported."""
    for path, module in model.named_modules():
        if is_lora(module):
            yield path, module


def is_lora(layer: nn.Module) -> bool:
    """Whether this is a LoRA layer of PEFT's, of any kind."""
    loaded = sys.modules.get("peft.tuners.lora.layer")
    return loaded is not None and isinstance(layer, loaded.LoraLayer)


def is_stacked(layer: Any) -> bool:
    """Whether this is PEFT's wrapper of one stack of experts, a parameter of three dimensions: `optimize.experts` computes those."""
    if not hasattr(layer, "parameter_name") or not is_lora(layer):
        return False
    dims: int = getattr(layer, "_param_ndim", None) or layer.get_param().dim()
    return dims == 3


def kind_reason(layer: Any) -> str | None:
    """Why this kind of layer has no fused op, or None."""
    from peft.tuners import lora

    base = layer.base_layer
    # exact types: a subclass may compute something else
    if type(layer) is lora.Linear and type(base) in (nn.Linear, PackedLinear):
        return "the weight is stored transposed (fan_in_fan_out)" if layer.fan_in_fan_out else None
    if type(layer) is getattr(lora, "ParamWrapper", None) and type(base) is nn.Linear and layer.parameter_name == "weight":
        # a linear layer that PEFT adapts by its parameter, where it renames the layer itself: A and B are those of any other
        return None
    if type(layer) is getattr(lora, "Linear4bit", None) and type(base).__name__ in ("Linear4bit", "LinearNF4", "LinearFP4"):
        return None if is_4bit(base) else "not bitsandbytes' own 4-bit layer"
    if type(base).__name__ == "Linear8bitLt":
        # on a GPU that layer also rounds activations to 8 bits: a product of the widened weight would be another result
        return "an 8-bit layer's product also quantises activations"
    return f"no fused op for {type(layer).__name__} over {type(base).__name__}"


def active_adapter(layer: Any) -> str | None:
    """The one adapter of this layer that is active; None where there are several or none."""
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    return active[0] if len(active) == 1 else None


def parts_of(layer: Any) -> tuple[str, Any, Any, Any, Any]:
    """(adapter, A, B, dropout, base layer) of a layer with one active adapter."""
    adapter = active_adapter(layer)
    assert adapter is not None
    return adapter, layer.lora_A[adapter], layer.lora_B[adapter], layer.lora_dropout[adapter], layer.base_layer


def why_not_fused(layer: Any) -> str | None:
    """Why PEFT's own code runs in a layer of a fused kind as it is now, or None."""
    if layer._disable_adapters:
        return "the adapter is disabled"
    if layer.merged_adapters:
        return "the adapter is merged into the weight"
    return parts_reason(layer)


def parts_reason(layer: Any) -> str | None:
    """The same, apart from PEFT's two switches, which every call asks."""
    adapter = active_adapter(layer)
    if adapter is None:
        several = any(one in layer.lora_A for one in layer.active_adapters)
        return "several adapters are active" if several else "no active adapter"
    if adapter in layer.lora_variant:
        return f"a variant of LoRA ({type(layer.lora_variant[adapter]).__name__})"
    if isinstance(layer.scaling[adapter], Tensor) and layer.scaling[adapter].requires_grad:
        return "the adapter's scale is trained"
    _, a, b, dropout, base = parts_of(layer)
    if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None:
        return "the adapter's own layers are not plain nn.Linear"
    if b.bias is not None:
        return "lora_B has a bias (lora_bias)"
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"a dropout of another kind ({type(dropout).__name__})"
    for part in (base, a, b, dropout):
        if has_hooks(part):
            return f"a hook on {'the base layer' if part is base else 'a part of the adapter'}"
        if replaced(part):
            return f"another forward on {'the base layer' if part is base else 'a part of the adapter'}"
    return weight_reason(base)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook waits for the call of this module: its own, or one that is registered for every module of the process."""
    every = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks, *_OF_ALL_MODULES)
    # hooks of the observer change no result: an observed step runs the same code as every other step
    return any(not getattr(hook, "observes", False) for hooks in every for hook in hooks.values())


def replaced(part: nn.Module) -> bool:
    """Whether another forward runs there than the layer's; ours over a 4-bit layer computes what the layer would."""
    if type(part) is nn.Linear and nn.Linear.forward is not _LINEAR:
        return True
    return "forward" in vars(part) and getattr(vars(part)["forward"], "__func__", None) is not forward_4bit


def bare_reason(layer: nn.Module) -> str | None:
    """Why a layer without an adapter cannot be a member of a fused function, or None."""
    quantised = is_packed(layer)
    if type(layer) is not nn.Linear and not quantised:
        return f"a {type(layer).__name__}"
    if replaced(layer):
        return "another forward on a layer"
    if quantised and not layer.compute_type_is_set:
        return "a 4-bit layer that has not yet fixed its compute dtype"
    return weight_reason(layer)


def weight_reason(base: nn.Module) -> str | None:
    """Why this base layer's weight, as it is now, has no fused product; or None. The weight may be sharded until its layer is called."""
    # the attribute would make it: each reading of one under `spectral_norm` is a step of its power iteration
    weight = base._parameters.get("weight")
    if weight is None:
        return "the weight is no parameter of the layer"
    if type(base) is nn.Linear:
        return None if type(weight) in DENSE or hasattr(weight, "full_tensor") else f"the weight is a {type(weight).__name__}"
    return state_reason(base)

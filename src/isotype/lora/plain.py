"""Decides whether the fused ops compute a layer exactly as PEFT does: once for the manifest, and again at every call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as every_module

from .quantised import forward_4bit, is_4bit, state_reason

_PLAIN = "_isotype_plain"
# the dictionaries in which PyTorch keeps the hooks of `register_module_forward_hook` and the like
_OF_ALL_MODULES = _FORWARD_HOOKS, _FORWARD_PRE_HOOKS, _BACKWARD_HOOKS, _BACKWARD_PRE_HOOKS = (
    every_module._global_forward_hooks,
    every_module._global_forward_pre_hooks,
    every_module._global_backward_hooks,
    every_module._global_backward_pre_hooks,
)
# what a fused op computes in place of a plain layer; a program may give that class another forward at any time
_LINEAR = nn.Linear.forward
# kinds of a plain nn.Linear's weight
_DENSE = (nn.Parameter, Tensor, FakeTensor)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, layer) for every LoRA layer of any kind; nothing where PEFT was never imported."""
    for path, module in model.named_modules():
        if is_lora(module):
            yield path, module


def is_lora(layer: nn.Module) -> bool:
    """Whether this is a LoRA layer of PEFT's, of any kind."""
    loaded = sys.modules.get("peft.tuners.lora.layer")
    return loaded is not None and isinstance(layer, loaded.LoraLayer)


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


class Plain:
    """A layer that was found plain, with the parts that it consists of; a copy or a pickle of the layer does not take it along.

    A part that was replaced, hooked, switched or merged since ends it: `holds` compares objects and calls nothing, since it is asked nine
    times a layer.
    """

    __slots__ = ("a", "active", "adapter", "b", "base", "base_forward", "dropout")

    def __init__(self, layer: Any) -> None:
        self.active = layer._active_adapter
        self.adapter = next(adapter for adapter in layer.active_adapters if adapter in layer.lora_A)
        self.a, self.b = layer.lora_A[self.adapter], layer.lora_B[self.adapter]
        self.dropout, self.base = layer.lora_dropout[self.adapter], layer.base_layer
        self.base_forward = vars(self.base).get("forward")
        # an adapter may be appended to a list in place
        self.active = list(self.active) if isinstance(self.active, list) else self.active

    def holds(self, layer: Any) -> bool:
        modules, adapter, base = layer._modules, self.adapter, self.base
        try:
            if (
                _FORWARD_HOOKS
                or _FORWARD_PRE_HOOKS
                or _BACKWARD_HOOKS
                or _BACKWARD_PRE_HOOKS
                or nn.Linear.forward is not _LINEAR
                or layer._disable_adapters
                or layer.merged_adapters
                or layer._active_adapter != self.active
                or adapter in layer.lora_variant
                or is_trained(layer.scaling[adapter])
                or modules["lora_A"]._modules[adapter] is not self.a
                or modules["lora_B"]._modules[adapter] is not self.b
                or modules["lora_dropout"]._modules[adapter] is not self.dropout
                or modules["base_layer"] is not base
                or self.a._parameters["bias"] is not None
                or self.b._parameters["bias"] is not None
            ):
                return False
            for part in (base, self.a, self.b, self.dropout):
                own = part.__dict__
                if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
                    return False
                if "forward" in own and (part is not base or own["forward"] is not self.base_forward):
                    return False
            if self.base_forward is not None and "forward" not in base.__dict__:
                return False
            weight, _, _ = base._parameters["weight"], self.a._parameters["weight"], self.b._parameters["weight"]
        except KeyError:
            # a part was taken out, or became something else than a parameter
            return False
        return type(weight) in _DENSE if type(base) is nn.Linear else state_reason(base) is None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def plain_parts(layer: Any) -> tuple[str, Any, Any, Any, Any]:
    """(adapter, A, B, dropout, base layer) of a layer for which `why_not_fused` has just given None."""
    if torch.compiler.is_compiling():
        adapter = next(adapter for adapter in layer.active_adapters if adapter in layer.lora_A)
        return adapter, layer.lora_A[adapter], layer.lora_B[adapter], layer.lora_dropout[adapter], layer.base_layer
    found: Plain = layer.__dict__[_PLAIN]
    return found.adapter, found.a, found.b, found.dropout, found.base


def forget_parts(layer: nn.Module) -> None:
    vars(layer).pop(_PLAIN, None)


def why_not_fused(layer: Any) -> str | None:
    """Why PEFT's own code runs at this moment, or None. Asked at every call: lookups only."""
    if torch.compiler.is_compiling():
        # a graph has guards of its own
        return _look(layer)
    return None if plain_now(layer) is not None else _look(layer)


def plain_now(layer: Any) -> Plain | None:
    """The parts of a layer that is plain at this moment; None where PEFT's own code runs. Outside compiled graphs."""
    known: Plain | None = layer.__dict__.get(_PLAIN)
    if known is None or not known.holds(layer):
        known = Plain(layer) if _look(layer) is None else None
        # past nn.Module's own __setattr__
        layer.__dict__[_PLAIN] = known
    return known


def _look(layer: Any) -> str | None:
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
    if is_trained(layer.scaling[adapter]):
        return "the adapter's scale is trained"
    a, b, dropout, base = layer.lora_A[adapter], layer.lora_B[adapter], layer.lora_dropout[adapter], layer.base_layer
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


def is_trained(scale: Any) -> bool:
    """Whether an adapter's scale is a tensor that is given a gradient: the fused ops take a number."""
    return type(scale) is not float and isinstance(scale, Tensor) and scale.requires_grad


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook waits for the call of this module: its own, or one that is registered for every module of the process."""
    of_all = _FORWARD_HOOKS or _FORWARD_PRE_HOOKS or _BACKWARD_HOOKS or _BACKWARD_PRE_HOOKS
    # asked for every layer: nearly always all are empty
    if not (of_all or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return False
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
    quantised = is_4bit(layer)
    if type(layer) is not nn.Linear and not quantised:
        return f"a {type(layer).__name__}"
    if replaced(layer):
        return "another forward on a layer"
    if quantised and not layer.compute_type_is_set:
        return "a 4-bit layer that has not yet fixed its compute dtype"
    return weight_reason(layer)


def weight_reason(base: nn.Module) -> str | None:
    """Why this base layer's weight, as it is now, has no fused product; or None."""
    # the attribute would make it: each reading of one under `spectral_norm` is a step of its power iteration
    weight = base._parameters.get("weight")
    if weight is None:
        return "the weight is no parameter of the layer"
    if type(base) is nn.Linear:
        return None if type(weight) in _DENSE else f"the weight is a {type(weight).__name__}"
    return state_reason(base)

"""Puts the fused op on PEFT's own layers, by instance, and takes it off again. No class is patched.

It goes where a layer is computed exactly as PEFT computes it; the others run PEFT's code, and the
manifest has the reason.

What a layer is was decided when it was placed (`Plan`), and is asked again once a step
(`look_again`). A call asks PEFT's own state alone: whether the adapter is disabled or merged, and
which one is active. Tensors, scale and dropout are read at the call. The forward is a bound method;
deepcopy binds it to the copy.

Layers with the same input are a group: the first computes all of them, and each of the others hands
its own result out if its input is the same tensor, else it computes its own. No attention or MLP
class is changed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as every_module

from ..errors import UsageError
from ..instance_method import InstanceMethod, Placement
from ..ops.backend import autocast_dtype
from ..ops.recomputed_layer import layers_running, mark_layer_hooked
from .dora import apply_dora
from .group import lora_group
from .linear import LoraDtypes, Projection, apply_linear, decide
from .quantised import (
    NotCopied,
    PackedLinear,
    fix_compute_dtype,
    forward_4bit,
    is_4bit,
    is_packed,
    state_reason,
)

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
    return ((path, module) for path, module in model.named_modules() if is_lora(module))


def is_lora(layer: nn.Module) -> bool:
    """Whether this is a LoRA layer of PEFT's."""
    loaded = sys.modules.get("peft.tuners.lora.layer")
    return loaded is not None and isinstance(layer, loaded.LoraLayer)


def is_stacked(layer: Any) -> bool:
    """Whether this is PEFT's wrapper of one stack of experts, a parameter of three dimensions:
    `optimize.experts` computes those.
    """
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
        if layer.fan_in_fan_out:
            return "the weight is stored transposed (fan_in_fan_out)"
        return None
    if (
        type(layer) is getattr(lora, "ParamWrapper", None)
        and type(base) in (nn.Linear, PackedLinear)
        and layer.parameter_name == "weight"
    ):
        # a linear layer that PEFT adapts by its parameter, where it renames the layer itself: A and
        # B are those of any other
        return None
    if type(layer) is getattr(lora, "Linear4bit", None) and type(base).__name__ in (
        "Linear4bit",
        "LinearNF4",
        "LinearFP4",
    ):
        if is_4bit(base):
            return None
        return "not bitsandbytes' own 4-bit layer"
    if type(base).__name__ == "Linear8bitLt":
        # on a GPU that layer also rounds activations to 8 bits: a product of the widened weight
        # would be another result
        return "an 8-bit layer's product also quantises activations"
    return f"no fused op for {type(layer).__name__} over {type(base).__name__}"


def active_adapter(layer: Any) -> str | None:
    """The one adapter of this layer that is active."""
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    return active[0] if len(active) == 1 else None


def parts_of(layer: Any) -> tuple[str, Any, Any, Any, Any]:
    """(adapter, A, B, dropout, base layer) of a layer with one active adapter."""
    adapter = active_adapter(layer)
    assert adapter is not None
    return (
        adapter,
        layer.lora_A[adapter],
        layer.lora_B[adapter],
        layer.lora_dropout[adapter],
        layer.base_layer,
    )


def why_not_fused(layer: Any, *, dora: bool = False) -> str | None:
    """Why PEFT's own code runs in a layer of a fused kind as it is now, or None. dora: as of
    `parts_reason`.
    """
    if layer._disable_adapters:
        return "the adapter is disabled"
    if layer.merged_adapters:
        return "the adapter is merged into the weight"
    return parts_reason(layer, dora=dora)


def parts_reason(layer: Any, *, dora: bool = False) -> str | None:
    """The same, apart from PEFT's two switches, which every call asks.

    dora  DoRA's variant is none: `dora.apply_dora` computes it
    """
    adapter = active_adapter(layer)
    if adapter is None:
        several = any(one in layer.lora_A for one in layer.active_adapters)
        if several:
            return "several adapters are active"
        return "no active adapter"
    is_dora = dora and type(layer.lora_variant.get(adapter)).__name__ == "DoraLinearVariant"
    if adapter in layer.lora_variant and not is_dora:
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
    if is_dora and type(dropout) is nn.Dropout and dropout.p:
        return "DoRA with dropout, which needs a base product of its own"
    for part in (base, a, b, dropout):
        if has_hooks(part):
            return f"a hook on {'the base layer' if part is base else 'a part of the adapter'}"
        if replaced(part):
            return (
                "another forward on"
                f" {'the base layer' if part is base else 'a part of the adapter'}"
            )
    return weight_reason(base)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook waits for the call of this module: its own, or one that is registered for
    every module of the process.
    """
    every = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        *_OF_ALL_MODULES,
    )
    # hooks of the observer change no result: an observed step runs the same code as every other
    # step
    return any(every) and any(
        not getattr(hook, "observes", False) for hooks in every for hook in hooks.values()
    )


def replaced(part: nn.Module) -> bool:
    """Whether another forward runs there than the layer's; ours over a 4-bit layer computes what
    the layer would.
    """
    if type(part) is nn.Linear and nn.Linear.forward is not _LINEAR:
        return True
    return (
        "forward" in vars(part)
        and getattr(vars(part)["forward"], "__func__", None) is not forward_4bit
    )


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
    """Why this base layer's weight, as it is now, has no fused product; or None. The weight may be
    sharded until its layer is called.
    """
    # the attribute would make it: each reading of one under `spectral_norm` is a step of its power
    # iteration
    weight = base._parameters.get("weight")
    if weight is None:
        return "the weight is no parameter of the layer"
    if type(base) is nn.Linear:
        if type(weight) in DENSE or hasattr(weight, "full_tensor"):
            return None
        return f"the weight is a {type(weight).__name__}"
    return state_reason(base)


FUSED, _PLAN, _GROUP, _READY, _BRANCH = (
    f"_isotype_{word}" for word in ("fused", "plan", "group", "ready", "branch_fp32")
)

# Children of one module that transformers' and diffusers' families call with one tensor, the first
# of them first.
GROUPS = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"),
    ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"),
)  # fmt: skip
# the same of cross-attention, whose Q reads another tensor, and how families name it: it is often
# of the self-attention's own class
CROSS_GROUPS = (("k_proj", "v_proj"), ("to_k", "to_v"), ("add_k_proj", "add_v_proj"))
_CROSS = re.compile("cross|^encoder_attn|^encoder_decoder", re.IGNORECASE)


def fuse_lora(model: nn.Module, *, branch_fp32: bool = False) -> list[Placement]:
    """Attaches the fused op to every LoRA layer whose kind has one; a line for every LoRA layer but
    those of experts, in the model's order.

    branch_fp32  computes the adapters' own products in fp32 beside narrow base products

    A layer that must run PEFT's code for now (adapter disabled, merged, several active) is attached
    too, and fuses when that ends.
    """
    placements = []
    for path, layer in lora_layers(model):
        if is_stacked(layer):
            continue
        reason = kind_reason(layer)
        if reason is None and not is_fused(layer) and "forward" in vars(layer):
            reason = "the layer's forward has been replaced by another library"
        elif reason is None and not is_fused(layer):
            vars(layer)[FUSED] = InstanceMethod(forward, layer)
            vars(layer)[FUSED].put()
        if reason is None:
            # past nn.Module's own __setattr__
            vars(layer)[_BRANCH] = branch_fp32
            look_again(layer)
            reason = why_not_fused(layer, dora=True)
        op = None if reason else "lora_dora" if runs_dora(layer) else "lora_linear"
        placements.append(
            Placement("lora", path, type(layer.base_layer).__name__, op, reason or "")
        )
    if placements:
        for path, module in model.named_modules():
            _link(module, path)
    return placements


def unfuse_lora(model: nn.Module) -> int:
    """Undoes `fuse_lora` and returns the number of layers. Other layers, and wrappers that other
    libraries added since, are unchanged.
    """
    fused = [layer for _, layer in lora_layers(model) if FUSED in vars(layer)]
    for layer in fused:
        vars(layer).pop(FUSED).take_back()
        for word in (_PLAN, _GROUP, _READY, _BRANCH):
            vars(layer).pop(word, None)
    return len(fused)


def runs_dora(layer: Any) -> bool:
    """Whether a fused layer runs DoRA's function."""
    plan = layer.__dict__.get(_PLAN)
    return plan is not None and plan.dora


def is_fused(layer: nn.Module) -> bool:
    """Whether calling this layer calls the forward that `fuse_lora` attached, with no wrapper
    around it.
    """
    return FUSED in layer.__dict__ and layer.__dict__.get("forward") is layer.__dict__[FUSED]


def _link(parent: nn.Module, path: str) -> None:
    """Records in the first layer of a group which siblings follow it, where every one is fused.
    With LoRA dropout a product that is shared in vain draws masks that PEFT's layers do not draw.
    """
    crosses = getattr(parent, "is_cross_attention", False) or _CROSS.search(path.rpartition(".")[2])
    for names in CROSS_GROUPS if crosses else GROUPS:
        layers: list[Any] = [getattr(parent, name, None) for name in names]
        if (
            all(layer is not None and is_fused(layer) for layer in layers)
            and len({layer.in_features for layer in layers}) == 1
        ):
            # in a tuple they are no children of the first
            vars(layers[0])[_GROUP] = tuple(layers[1:])


# --- what a layer is


class Plan(NotCopied):
    """What a LoRA layer was found to be.

    active  PEFT's names of its active adapters, as they were
    reason  why PEFT's own code runs while the adapter is on, or None; the parts are known without a
            reason only
    dora    whether the reason is DoRA, which has a function of its own, and no other
    """

    __slots__ = ("a", "active", "adapter", "b", "base", "dora", "dropout", "forward", "reason")

    def __init__(self, layer: Any) -> None:
        # an adapter may be appended to a list in place
        if isinstance(layer._active_adapter, list):
            self.active = list(layer._active_adapter)
        else:
            self.active = layer._active_adapter
        self.reason = parts_reason(layer)
        self.dora = self.reason is not None and parts_reason(layer, dora=True) is None
        if self.reason is None or self.dora:
            self.adapter, self.a, self.b, self.dropout, self.base = parts_of(layer)
            self.forward = self.base.__dict__.get("forward")


def look_again(layer: Any) -> Plan:
    """Decides anew what a fused layer is: when it is placed, once a step, and where PEFT's own
    state has changed.
    """
    plan = layer.__dict__[_PLAN] = Plan(layer)
    return plan


def projection(
    layer: Any, x: Tensor, *, graph: bool = False, dora: bool = False
) -> Projection | None:
    """The tensors of a fused layer whose input is x, read now; None where PEFT's own code runs now.

    graph  a graph is made, which has guards of its own
    dora   also of a layer with DoRA, whose magnitudes are none of them
    """
    if layer._disable_adapters or layer.merged_adapters:
        return None
    if graph:
        if parts_reason(layer) is not None:
            return None
        adapter, a, b, dropout, base = parts_of(layer)
    else:
        plan: Plan | None = layer.__dict__.get(_PLAN)
        if plan is None or layer._active_adapter != plan.active:
            plan = look_again(layer)
        if plan.reason is None or plan.dora:
            # an adapter may be deleted and added again under the same name; accelerate's forward
            # loads a weight for each call
            same = (
                layer._modules["lora_A"]._modules.get(plan.adapter) is plan.a
                and plan.base.__dict__.get("forward") is plan.forward
            )
            plan = plan if same else look_again(layer)
        if plan.reason is not None and not (dora and plan.dora):
            return None
        adapter = plan.adapter
        a = plan.a
        b = plan.b
        dropout = plan.dropout
        base = plan.base
    parameters = base._parameters
    weight = parameters["weight"]
    bias = parameters["bias"]
    a_RK = a._parameters["weight"]
    b_OR = b._parameters["weight"]
    state = None
    dtype = weight.dtype
    if type(base) is not nn.Linear:
        if state_reason(base) is not None:
            return None
        if not base.compute_type_is_set:
            fix_compute_dtype(base, x)
        state = weight.quant_state
        dtype = base.compute_dtype
    elif type(weight) not in DENSE:
        return None
    if type(a_RK) not in DENSE or type(b_OR) not in DENSE:
        return None
    p = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    kind = (dtype, state is None, a_RK.dtype, b_OR.dtype, layer.__dict__[_BRANCH])
    values = (weight, bias, a_RK, b_OR, state, float(layer.scaling[adapter]), p, kind)
    return Projection(*values) if graph else _projection(values)


# Projection(*values), without a call in Python
_projection: Callable[[Any], Projection] = partial(tuple.__new__, Projection)


def bare_projection(layer: Any) -> Projection:
    """Of a linear layer without an adapter."""
    if type(layer) is nn.Linear:
        state = None
        dtype = layer.weight.dtype
    else:
        state = layer.weight.quant_state
        dtype = layer.compute_dtype
    return Projection(
        layer.weight,
        layer.bias,
        None,
        None,
        state,
        1.0,
        0.0,
        (dtype, state is None, None, None, False),
    )


# --- a call


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A LoRA layer's forward: fused while the layer is plain, else PEFT's own."""
    if args or kwargs or not x.dtype.is_floating_point:
        return _peft_forward(self, x, *args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        # a graph's compiler finds what projections share
        call = projection(self, x, graph=True)
        if call is None:
            return _peft_forward(self, x)
        return apply_linear(x, call, decided(call, x, x.dtype))
    ready = self.__dict__.pop(_READY, None)
    if ready is not None and ready[0] is x and not self._disable_adapters:
        _, output, version, grad = ready
        if grad is torch.is_grad_enabled() and (x.is_inference() or version == x._version):
            made: Tensor = output
            return made
    if torch._C._are_functorch_transforms_active():
        return _peft_forward(self, x)
    call = projection(self, x)
    if call is None:
        call = projection(self, x, dora=True)
        if call is None:
            return _peft_forward(self, x)
        magnitude = self.lora_magnitude_vector[self.__dict__[_PLAN].adapter].weight
        return apply_dora(x, call, magnitude, dtypes_of(call, x, x.dtype))
    if layers_running and self._forward_hooks and has_hooks(self):
        mark_layer_hooked()
    followers = self.__dict__.get(_GROUP)
    if followers is not None:
        together = _together(followers, x, call)
        if together is not None:
            return together
    return apply_linear(x, call, dtypes_of(call, x, x.dtype), now=True)


def _together(followers: Sequence[Any], x: Tensor, first: Projection) -> Tensor | None:
    """Computes a layer and its siblings in one product, and stores their outputs for their calls.
    None where they cannot share one.
    """
    calls = [first]
    for other in followers:
        own = other.__dict__
        own.pop(_READY, None)
        if FUSED in own and own.get("forward") is own[FUSED]:
            call = projection(other, x)
        else:
            call = None
        if call is None:
            return None
        calls.append(call)
    dtypes = shared_dtypes(x, calls)
    if dtypes is None:
        return None
    y, *others = lora_group(x, calls, dtypes)
    version = 0 if x.is_inference() else x._version
    grad = torch.is_grad_enabled()
    for other, output in zip(followers, others):
        # past nn.Module's own __setattr__, which takes 2 us
        other.__dict__[_READY] = _Ready((x, output, version, grad))
    return y


class _Ready(NotCopied, tuple[Any, ...]):
    """(x, a layer's output for it, x's version, whether gradients were on)."""


# Decisions that were taken: a model asks for the same few, several times a layer
_known: dict[tuple[Any, ...], LoraDtypes] = {}


def dtypes_of(call: Projection, x: Tensor, x_dtype: torch.dtype) -> LoraDtypes:
    """The dtypes of this projection for an input of `x_dtype` on x's device."""
    device = x.device.type
    if device == "meta":
        cast = autocast_dtype(x)
    else:
        if torch.is_autocast_enabled(device):
            cast = torch.get_autocast_dtype(device)
        else:
            cast = None
    key = (x_dtype, cast, device, call.kind)
    found = _known.get(key)
    if found is None:
        found = _known[key] = decided(call, x, x_dtype)
    return found


def decided(call: Projection, x: Tensor, x_dtype: torch.dtype) -> LoraDtypes:
    """`dtypes_of`, not kept: where a graph is made."""
    weight_dtype, dense, a_dtype, b_dtype, branch_fp32 = call.kind
    adapter = None if call.a is None else torch.promote_types(a_dtype, b_dtype)
    return decide(
        x,
        weight_dtype or x_dtype,
        adapter,
        quantised=not dense,
        branch_fp32=branch_fp32,
        x_dtype=x_dtype,
    )


def shared_dtypes(
    x: Tensor, calls: Sequence[Projection], dtypes_of: Callable[..., LoraDtypes] = dtypes_of
) -> LoraDtypes | None:
    """The dtypes with which these can share the products of x; None where they differ, or one
    computes its adapter branch in fp32.
    """
    first = calls[0]
    features = x.shape[-1]
    dtypes = dtypes_of(first, x, x.dtype)
    for call in calls:
        if call.kind != first.kind and dtypes_of(call, x, x.dtype) != dtypes:
            return None
        if features != (call.a.shape[1] if call.a is not None else call.features):
            return None
    return None if dtypes.wide else dtypes


def refuse_unfused(why: str) -> None:
    """Raises UsageError for an adapter on a packed parameter: PEFT would add its change to the
    packed bytes.
    """
    raise UsageError(
        f"an adapter on packed experts: {why}: not offered",
        fix="one adapter, active and not merged; or isotype merge",
    )


def _peft_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Runs PEFT's code. bitsandbytes must not repack the weight in place: it never undoes that, and
    later gradients would be wrong.
    """
    base = layer.base_layer
    if (
        type(base) is PackedLinear
        and hasattr(layer, "parameter_name")
        and not layer._disable_adapters
    ):
        refuse_unfused(why_not_fused(layer) or "this call")
    own: Any = type(layer).forward
    repacks = getattr(base, "support_avx512bf16_for_cpu", False)
    if not repacks:
        made: Tensor = own(layer, x, *args, **kwargs)
        return made
    base.support_avx512bf16_for_cpu = False
    try:
        made = own(layer, x, *args, **kwargs)
    finally:
        base.support_avx512bf16_for_cpu = repacks
    return made

"""Makes instances of PEFT's LoRA layers run the fused LoRA op, and makes them run PEFT's code
again. No class is patched.

A layer is fused only if the op computes exactly what PEFT computes. Other layers run PEFT's code,
and the manifest (the list of what `optimize` replaced) states the reason.

A `LayerPlan` records whether a layer can be fused, and refers to the layer's modules. The plan is
created when the op is attached, and is created again once per step (`refresh_plan`). Each call
reads from PEFT whether the adapter is disabled or merged, which adapter is active, and the tensors,
scale and dropout. The attached forward is a bound method. A deepcopy of the layer gets a forward
that is bound to the copy.

Layers with the same input are called siblings. The sibling that is called first computes the
outputs of all siblings and stores them. If another sibling is then called with the same input
tensor, it returns its stored output. With another input tensor, it computes its output itself. No
attention or MLP class is changed.
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
from torch.nn.modules import module as module_globals

from ..errors import UsageError
from ..instance_method import InstanceMethod, Placement
from ..ops.backend import autocast_dtype, can_bypass_dispatcher
from ..ops.recomputed_layer import mark_layer_hooked, running_checkpointed_layers
from ..ops.widened_products import differentiable_linear
from .dora import apply_dora
from .few_rows import RowLayers, can_run_row_layers
from .group import lora_group
from .linear import LoraDtypes, Projection, apply_linear, resolve_dtypes
from .products import (
    MAX_FEW_ROWS,
    can_call_few_rows,
    can_call_kernels_directly,
    can_run_few_rows,
    few_rows_product,
    kept_row_layers,
)
from .quantised import (
    NotCopied,
    PackedLinear,
    fix_compute_dtype,
    forward_4bit,
    is_4bit,
    is_packed,
    packed_state_blocker,
)
from .served import Pack, ServedWeight, apply_served

# the dictionaries in which PyTorch stores hooks for all modules (`register_module_forward_hook` and
# similar functions)
_GLOBAL_HOOKS = GLOBAL_FORWARD_HOOKS, GLOBAL_FORWARD_PRE_HOOKS, _, _ = (
    module_globals._global_forward_hooks,
    module_globals._global_forward_pre_hooks,
    module_globals._global_backward_hooks,
    module_globals._global_backward_pre_hooks,
)
# the forward that a fused op replaces; if nn.Linear has another forward, nn.Linear was patched
_NN_LINEAR_FORWARD = nn.Linear.forward
# types of the weight of a plain nn.Linear
DENSE_WEIGHT_TYPES = (nn.Parameter, Tensor, FakeTensor)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (path, layer) for every LoRA layer of any kind, or nothing if PEFT was never imported."""
    return ((path, module) for path, module in model.named_modules() if is_lora(module))


def is_lora(layer: nn.Module) -> bool:
    """Whether this is a LoRA layer of PEFT."""
    peft_layers = sys.modules.get("peft.tuners.lora.layer")
    return peft_layers is not None and isinstance(layer, peft_layers.LoraLayer)


def is_expert_stack(layer: Any) -> bool:
    """Whether this is PEFT's wrapper of a three-dimensional parameter. Such a parameter is a stack
    with the weights of several experts. `optimize.experts` handles such layers.
    """
    if not hasattr(layer, "parameter_name") or not is_lora(layer):
        return False
    dims: int = getattr(layer, "_param_ndim", None) or layer.get_param().dim()
    return dims == 3


def layer_kind_blocker(layer: Any) -> str | None:
    """Returns None if there is a fused op for this kind of layer. Otherwise returns the reason why
    there is none.
    """
    from peft.tuners import lora

    base_layer = layer.base_layer
    # exact types: a subclass may compute something else
    if type(layer) is lora.Linear and type(base_layer) in (nn.Linear, PackedLinear):
        if layer.fan_in_fan_out:
            return "the weight is stored transposed (fan_in_fan_out)"
        return None
    if (
        type(layer) is getattr(lora, "ParamWrapper", None)
        and type(base_layer) in (nn.Linear, PackedLinear)
        and layer.parameter_name == "weight"
    ):
        # PEFT adapts this linear layer through its parameter; A and B are the same as in any other
        # layer
        return None
    if type(layer) is getattr(lora, "Linear4bit", None) and type(base_layer).__name__ in (
        "Linear4bit",
        "LinearNF4",
        "LinearFP4",
    ):
        if is_4bit(base_layer):
            return None
        return "not bitsandbytes' own 4-bit layer"
    if type(base_layer).__name__ == "Linear8bitLt":
        # on a GPU this layer also rounds activations to 8 bits, so a product with the dequantised
        # weight would have another result
        return "an 8-bit layer's product also quantises activations"
    return f"no fused op for {type(layer).__name__} over {type(base_layer).__name__}"


def active_adapter(layer: Any) -> str | None:
    """Returns the name of the layer's active adapter. Returns None if no adapter or several
    adapters are active.
    """
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    if len(active) != 1:
        return None
    name: str = active[0]
    return name


def adapter_parts(layer: Any) -> tuple[str, Any, Any, Any, Any]:
    """Returns (adapter name, A, B, dropout, base layer) of a layer with one active adapter."""
    adapter = active_adapter(layer)
    assert adapter is not None
    return (
        adapter,
        layer.lora_A[adapter],
        layer.lora_B[adapter],
        layer.lora_dropout[adapter],
        layer.base_layer,
    )


def fusion_blocker(layer: Any, *, allow_dora: bool = False) -> str | None:
    """Returns the reason why a layer of a supported kind currently runs PEFT's code, or None if it
    runs the fused op.

    allow_dora  as in `adapter_blocker`
    """
    if layer._disable_adapters:
        return "the adapter is disabled"
    if layer.merged_adapters:
        return "the adapter is merged into the weight"
    return adapter_blocker(layer, allow_dora=allow_dora)


def adapter_blocker(layer: Any, *, allow_dora: bool = False) -> str | None:
    """Returns the same reason as `fusion_blocker`, but does not check whether the adapter is
    disabled or merged. Each call of the layer checks these two conditions itself.

    allow_dora  whether DoRA is accepted, since `dora.apply_dora` can compute it
    """
    adapter = active_adapter(layer)
    if adapter is None:
        if any(name in layer.lora_A for name in layer.active_adapters):
            return "several adapters are active"
        return "no active adapter"
    is_dora = allow_dora and type(layer.lora_variant.get(adapter)).__name__ == "DoraLinearVariant"
    if adapter in layer.lora_variant and not is_dora:
        return f"a variant of LoRA ({type(layer.lora_variant[adapter]).__name__})"
    if isinstance(layer.scaling[adapter], Tensor) and layer.scaling[adapter].requires_grad:
        return "the adapter's scale is trained"
    _, a, b, dropout, base = adapter_parts(layer)
    if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None:
        return "the adapter's own layers are not plain nn.Linear"
    if b.bias is not None:
        return "lora_B has a bias (lora_bias)"
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"a dropout of another kind ({type(dropout).__name__})"
    if is_dora and type(dropout) is nn.Dropout and dropout.p:
        return "DoRA with dropout, which needs a base product of its own"
    for part in (base, a, b, dropout):
        part_name = "the base layer" if part is base else "a part of the adapter"
        if has_hooks(part):
            return f"a hook on {part_name}"
        if has_replaced_forward(part):
            return f"another forward on {part_name}"
    return weight_blocker(base)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of this module runs a hook. The hook may be registered on this module or for
    all modules of the process.
    """
    hook_tables = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        *_GLOBAL_HOOKS,
    )
    # the hooks of isotype.observe change no result, so they do not count: an observed step runs the
    # same code as any other step
    return any(hook_tables) and any(
        not getattr(hook, "is_observer", False) for hooks in hook_tables for hook in hooks.values()
    )


def has_replaced_forward(part: nn.Module) -> bool:
    """Whether the forward of the layer's class was replaced on this layer. The function returns
    False for `forward_4bit` and `linear_for_few_rows`, since these replacements compute the same
    result.
    """
    if type(part) is nn.Linear and nn.Linear.forward is not _NN_LINEAR_FORWARD:
        return True
    return "forward" in vars(part) and getattr(vars(part)["forward"], "__func__", None) not in (
        forward_4bit,
        linear_for_few_rows,
    )


def unadapted_layer_blocker(layer: nn.Module) -> str | None:
    """Returns the reason why a layer without an adapter cannot be part of a fused function, or None
    if it can.
    """
    is_quantised = is_packed(layer)
    if type(layer) is not nn.Linear and not is_quantised:
        return f"a {type(layer).__name__}"
    if has_replaced_forward(layer):
        return "another forward on a layer"
    if is_quantised and not layer.compute_type_is_set:
        return "a 4-bit layer that has not yet fixed its compute dtype"
    return weight_blocker(layer)


def weight_blocker(base: nn.Module) -> str | None:
    """Returns the reason why the fused op cannot use the current weight of this base layer, or None
    if it can. The op can use a sharded weight, since the weight is gathered when the layer is
    called.
    """
    # `base.weight` would evaluate a parametrisation. With `spectral_norm`, each read of the weight
    # is a step of its power iteration
    weight = base._parameters.get("weight")
    if weight is None:
        return "the weight is no parameter of the layer"
    if type(base) is nn.Linear:
        if type(weight) in DENSE_WEIGHT_TYPES or hasattr(weight, "full_tensor"):
            return None
        return f"the weight is a {type(weight).__name__}"
    return packed_state_blocker(base)


# names of a fused layer's attributes: the fused forward, the LayerPlan, the layers that share the
# layer's input, the output that another layer computed for this one, and whether the adapter branch
# is requested in fp32
FUSED = "_isotype_fused"
_PLAN = "_isotype_plan"  # keys in a layer's `__dict__`: how the layer is computed
# the layers that get the same input, such as k_proj and v_proj for q_proj
_SIBLINGS = "_isotype_siblings"
_SHARED_OUTPUT = "_isotype_shared_output"  # the output that a sibling computed for this layer
_BRANCH_FP32 = "_isotype_branch_fp32"  # whether the user wants the adapter branch in fp32
# the attribute with the ServedWeight of a layer that is trained for a served format
_SERVED = "_isotype_served"

# groups of names of child modules. Models of transformers and diffusers call the modules of a group
# with the same input, in this order
GROUPS = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"),
    ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"),
)  # fmt: skip
# the groups of cross-attention, where Q reads another tensor than K and V. Self-attention and
# cross-attention often have the same class, so cross-attention is recognised by its path
CROSS_GROUPS = (("k_proj", "v_proj"), ("to_k", "to_v"), ("add_k_proj", "add_v_proj"))
_CROSS = re.compile("cross|^encoder_attn|^encoder_decoder", re.IGNORECASE)


def fuse_lora(model: nn.Module, *, branch_fp32: bool = False) -> list[Placement]:
    """Attaches the fused op to every LoRA layer of a supported kind. Returns one `Placement` for
    each LoRA layer except those of experts, in the model's order.

    branch_fp32  computes the matrix products with A and B in fp32, even if the matrix product with
                 the base weight is computed in bf16 or fp16

    The op is also attached to a layer whose adapter is disabled or merged, or that has several
    active adapters. While the adapter is in such a state, the layer runs PEFT's code.
    """
    placements = []
    for path, layer in lora_layers(model):
        if is_expert_stack(layer):
            continue
        reason = layer_kind_blocker(layer)
        if reason is None and not is_fused(layer) and "forward" in vars(layer):
            reason = "the layer's forward has been replaced by another library"
        elif reason is None and not is_fused(layer):
            vars(layer)[FUSED] = InstanceMethod(lora_forward, layer)
            vars(layer)[FUSED].install()
        if reason is None:
            # through vars(), since nn.Module's __setattr__ is slow
            vars(layer)[_BRANCH_FP32] = branch_fp32
            refresh_plan(layer)
            reason = fusion_blocker(layer, allow_dora=True)
        op = None
        if not reason:
            op = "lora_dora" if is_dora_layer(layer) else "lora_linear"
        placements.append(
            Placement("lora", path, type(layer.base_layer).__name__, op, reason or "")
        )
    if placements:
        for path, module in model.named_modules():
            _link_siblings(module, path)
    return placements


def unfuse_lora(model: nn.Module) -> int:
    """Undoes `fuse_lora` and returns the number of layers that were restored. It does not change
    other layers, and keeps wrappers that other libraries added later.
    """
    fused = [layer for _, layer in lora_layers(model) if FUSED in vars(layer)]
    for layer in fused:
        vars(layer).pop(FUSED).uninstall()
        for attribute in (_PLAN, _SIBLINGS, _SHARED_OUTPUT, _BRANCH_FP32, _SERVED):
            vars(layer).pop(attribute, None)
    return len(fused)


def is_dora_layer(layer: Any) -> bool:
    """Whether a fused layer runs the function for DoRA."""
    plan = layer.__dict__.get(_PLAN)
    return plan is not None and plan.is_dora


def is_fused(layer: nn.Module) -> bool:
    """Whether the layer's forward is the one that `fuse_lora` attached, and no other code has
    wrapped it.
    """
    return FUSED in layer.__dict__ and layer.__dict__.get("forward") is layer.__dict__[FUSED]


def _link_siblings(parent: nn.Module, path: str) -> None:
    """If every layer of a group (such as Q, K and V) is fused, stores on each layer the other
    layers of the group.

    The layer that is called first computes the outputs of all layers of its group. It is not always
    the first one in `GROUPS`: the MLPs of ERNIE-Image and Falcon-H1 call `up_proj` before
    `gate_proj`. With LoRA dropout, a group also draws random numbers for an output that is never
    used, which PEFT's layers would not draw.
    """
    is_cross_attention = getattr(parent, "is_cross_attention", False) or _CROSS.search(
        path.rpartition(".")[2]
    )
    for names in CROSS_GROUPS if is_cross_attention else GROUPS:
        # a module's __getattr__ raises an error for each name that it lacks, which is slow
        layers: list[Any] = [parent._modules.get(name) for name in names]
        if (
            all(layer is not None and is_fused(layer) for layer in layers)
            and len({layer.in_features for layer in layers}) == 1
        ):
            for layer in layers:
                # a tuple, since a module stored as an attribute would become a child of the layer
                vars(layer)[_SIBLINGS] = tuple(other for other in layers if other is not layer)


# --- layers that are trained for a served format


def serve_layer(layer: Any, pack: Pack) -> None:
    """Makes a fused LoRA layer multiply by a rounded weight. `pack` is the function that rounds it.
    Raises UsageError for a layer that runs PEFT's code.
    """
    reason = "it has no fused op" if not is_fused(layer) else fusion_blocker(layer)
    if reason is not None:
        raise UsageError(f"adapter.serve_as: a layer runs PEFT's code: {reason}", fix=SERVE_FIX)
    vars(layer)[_SERVED] = ServedWeight(pack)


def set_serving(model: nn.Module, *, is_active: bool) -> None:
    """Sets whether the layers that have a rounded weight (`ServedWeight`) multiply by it."""
    for _, layer in lora_layers(model):
        served = served_weight(layer)
        if served is not None:
            served.is_active = is_active
            vars(layer).pop(_SHARED_OUTPUT, None)


def served_weight(layer: nn.Module) -> ServedWeight | None:
    """Returns the `ServedWeight` of a layer, or None if the layer does not multiply by a rounded
    weight.
    """
    served: ServedWeight | None = vars(layer).get(_SERVED)
    return served


def observed_formats(model: nn.Module) -> list[tuple[str, str, str]]:
    """For each layer that multiplied by a rounded weight, returns its kind (role), its path, and
    the format of the rounded weight.
    """
    formats = []
    for path, layer in lora_layers(model):
        served = served_weight(layer)
        if served is not None and served.is_active and served.format_name:
            formats.append(("served", path, served.format_name))
    return formats


SERVE_FIX = "leave adapter.serve_as out"


def _run_served(layer: Any, x: Tensor, served: ServedWeight) -> Tensor:
    projection = read_projection(layer, x, for_served=True)
    if projection is None:
        reason = fusion_blocker(layer) or "its tensors have other types"
        raise UsageError(f"adapter.serve_as: a layer cannot be computed: {reason}", fix=SERVE_FIX)
    return apply_served(x, projection, served, cached_dtypes(projection, x, x.dtype))


# --- the plan of a layer


class LayerPlan(NotCopied):
    """States whether a LoRA layer can be fused, and refers to the layer's modules.

    active_adapters  PEFT's names of the active adapters when the plan was created
    reason           the reason why the layer runs PEFT's code although its adapter is enabled, or
                     None. The fields with the layer's modules are set if the reason is None, and
                     also if `is_dora` is true
    is_dora          whether the only reason is that the adapter uses DoRA. The layer then runs the
                     function for DoRA
    """

    __slots__ = (
        "a",
        "active_adapters",
        "adapter",
        "b",
        "base",
        "dropout",
        "forward",
        "is_dora",
        "reason",
    )

    def __init__(self, layer: Any) -> None:
        # a copy, since adapters may be appended to the list in place
        if isinstance(layer._active_adapter, list):
            self.active_adapters = list(layer._active_adapter)
        else:
            self.active_adapters = layer._active_adapter
        self.reason = adapter_blocker(layer)
        self.is_dora = self.reason is not None and adapter_blocker(layer, allow_dora=True) is None
        if self.reason is None or self.is_dora:
            self.adapter, self.a, self.b, self.dropout, self.base = adapter_parts(layer)
            self.forward = self.base.__dict__.get("forward")


def refresh_plan(layer: Any) -> LayerPlan:
    """Creates a new plan (`LayerPlan`) for a fused layer. It is called when the op is attached,
    once per step, and after PEFT changes the layer.
    """
    plan = layer.__dict__[_PLAN] = LayerPlan(layer)
    return plan


def read_projection(
    layer: Any,
    x: Tensor,
    *,
    in_graph: bool = False,
    allow_dora: bool = False,
    for_served: bool = False,
) -> Projection | None:
    """Reads the tensors of a fused layer whose input is x. Returns None if PEFT's code has to run,
    or if the layer multiplies by a weight that is rounded to the format of the exported file.

    in_graph    whether Dynamo is tracing the call. The plan is then not used, since the guards of
                the compiled graph check the same conditions
    allow_dora  also reads a layer with DoRA, but not its magnitude vector
    for_served  also reads a layer that multiplies by a rounded weight
    """
    if layer._disable_adapters or layer.merged_adapters:
        return None
    is_served = getattr(layer.__dict__.get(_SERVED), "is_active", False)
    if is_served and not for_served:
        return None
    if in_graph:
        if adapter_blocker(layer) is not None:
            return None
        adapter, a, b, dropout, base = adapter_parts(layer)
    else:
        plan: LayerPlan | None = layer.__dict__.get(_PLAN)
        if plan is None or layer._active_adapter != plan.active_adapters:
            plan = refresh_plan(layer)
        if plan.reason is None or plan.is_dora:
            # an adapter may be deleted and added again under the same name; accelerate replaces the
            # forward to load a weight for each call
            is_current = (
                layer._modules["lora_A"]._modules.get(plan.adapter) is plan.a
                and plan.base.__dict__.get("forward") is plan.forward
            )
            if not is_current:
                plan = refresh_plan(layer)
        if plan.reason is not None and not (allow_dora and plan.is_dora):
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
        if packed_state_blocker(base) is not None:
            return None
        if not base.compute_type_is_set:
            fix_compute_dtype(base, x)
        state = weight.quant_state
        dtype = base.compute_dtype
    elif type(weight) not in DENSE_WEIGHT_TYPES:
        return None
    if type(a_RK) not in DENSE_WEIGHT_TYPES or type(b_OR) not in DENSE_WEIGHT_TYPES:
        return None
    p = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    kind = (dtype, state is None, a_RK.dtype, b_OR.dtype, layer.__dict__[_BRANCH_FP32])
    values = (weight, bias, a_RK, b_OR, state, float(layer.scaling[adapter]), p, kind)
    if in_graph:
        return Projection(*values)
    return _make_projection(values)


# gives the same result as Projection(*values), without a Python call
_make_projection: Callable[[Any], Projection] = partial(tuple.__new__, Projection)


def read_unadapted_projection(layer: Any) -> Projection:
    """Reads the tensors of a linear layer without an adapter."""
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


def lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a fused LoRA layer. It runs the fused op if the layer's current state allows
    it, and otherwise PEFT's forward.
    """
    if args or kwargs or not x.dtype.is_floating_point:
        return _run_peft_forward(self, x, *args, **kwargs)
    served = self.__dict__.get(_SERVED)
    if served is not None and served.is_active and not self._disable_adapters:
        return _run_served(self, x, served)
    if torch.compiler.is_dynamo_compiling():
        # each layer is computed alone, since the compiler finds products that layers share
        projection = read_projection(self, x, in_graph=True)
        if projection is None:
            return _run_peft_forward(self, x)
        return apply_linear(x, projection, projection_dtypes(projection, x, x.dtype))
    siblings = self.__dict__.get(_SIBLINGS)
    shared = self.__dict__.pop(_SHARED_OUTPUT, None)
    if shared is not None:
        if shared[0] is x and not self._disable_adapters:
            _, output, version, grad = shared
            if grad is torch.is_grad_enabled() and (x.is_inference() or version == x._version):
                shared_output: Tensor = output
                return shared_output
        # the layers of this group get different inputs, or their state has changed
        siblings = None
    if torch._C._are_functorch_transforms_active():
        return _run_peft_forward(self, x)
    if kept_row_layers() is not None:
        token_output = _project_few_rows(self, x)
        if token_output is not None:
            return token_output
    projection = read_projection(self, x)
    if projection is None:
        projection = read_projection(self, x, allow_dora=True)
        if projection is None:
            return _run_peft_forward(self, x)
        magnitude = self.lora_magnitude_vector[self.__dict__[_PLAN].adapter].weight
        return apply_dora(x, projection, magnitude, cached_dtypes(projection, x, x.dtype))
    if running_checkpointed_layers and self._forward_hooks and has_hooks(self):
        mark_layer_hooked()
    if siblings is not None:
        y = _compute_with_siblings(siblings, x, projection)
        if y is not None:
            return y
    return apply_linear(x, projection, cached_dtypes(projection, x, x.dtype), is_eager=True)


def _compute_with_siblings(
    siblings: Sequence[Any], x: Tensor, first_projection: Projection
) -> Tensor | None:
    """Computes a layer and its siblings in one function, and stores the outputs of the siblings
    until the siblings are called. Returns None if one function cannot compute all of them.
    """
    projections = [first_projection]
    for sibling in siblings:
        attributes = sibling.__dict__
        attributes.pop(_SHARED_OUTPUT, None)
        if FUSED in attributes and attributes.get("forward") is attributes[FUSED]:
            projection = read_projection(sibling, x)
        else:
            projection = None
        if projection is None:
            return None
        projections.append(projection)
    dtypes = shared_dtypes(x, projections)
    if dtypes is None:
        return None
    y, *sibling_outputs = lora_group(x, projections, dtypes)
    store_outputs(siblings, x, sibling_outputs)
    return y


def store_outputs(layers: Sequence[Any], x: Tensor, outputs: Sequence[Tensor]) -> None:
    """Stores the outputs of layers for x, until each layer is called. A layer uses its output if it
    is called with the same tensor.
    """
    version = 0 if x.is_inference() else x._version
    grad_enabled = torch.is_grad_enabled()
    for layer, output in zip(layers, outputs):
        # through __dict__, since nn.Module's __setattr__ takes 2 us
        layer.__dict__[_SHARED_OUTPUT] = _SharedOutput((x, output, version, grad_enabled))


def find_siblings(module: nn.Module) -> tuple[Any, ...] | None:
    """Returns the first child of a module that has siblings, with the siblings, or None."""
    for child in module.children():
        siblings = child.__dict__.get(_SIBLINGS)
        if siblings:
            return child, *siblings
    return None


class _SharedOutput(NotCopied, tuple[Any, ...]):
    """The stored output of a layer, as (x, the layer's output for x, the version of x, whether
    gradients were enabled).
    """


# --- the few rows of a generated token


class ReadLayer:
    """What was read of a layer within a call of `generate`. `is_current` makes the same checks as
    `read_projection`, and also compares the tensors. `RowLayers` compares their addresses.

    plan  None for a layer without an adapter
    """

    __slots__ = ("adapters", "base", "forward", "layer", "plan", "projection")

    def __init__(self, layer: Any, projection: Projection) -> None:
        self.layer = layer
        self.projection = projection
        self.forward = layer.__dict__.get("forward")
        self.plan: LayerPlan | None = None
        self.base = layer
        self.adapters: Any = None
        if projection.a is not None:
            plan: LayerPlan = layer.__dict__[_PLAN]
            self.plan = plan
            self.base = plan.base
            self.adapters = layer._modules["lora_A"]._modules

    def is_current(self) -> bool:
        layer = self.layer
        weight, bias, a, b, _, scale, _, _ = self.projection
        parameters = self.base._parameters
        plan = self.plan
        is_same = (
            parameters["weight"] is weight
            and parameters["bias"] is bias
            and layer.__dict__.get("forward") is self.forward
        )
        if plan is None or not is_same:
            return is_same
        served = layer.__dict__.get(_SERVED)
        return (
            not layer._disable_adapters
            and not layer.merged_adapters
            and layer._active_adapter == plan.active_adapters
            and self.adapters.get(plan.adapter) is plan.a
            and plan.a._parameters["weight"] is a
            and plan.b._parameters["weight"] is b
            and plan.base.__dict__.get("forward") is plan.forward
            and layer.scaling[plan.adapter] == scale
            and (type(plan.dropout) is nn.Identity or not plan.dropout.training)
            and (served is None or not served.is_active)
        )


def find_row_layers(
    kept: dict[Any, Any], key: Any, x: Tensor, read: Callable[[Any, Tensor], Any]
) -> Any:
    """Returns what `read(key, x)` returned in an earlier call of the same `generate`, if it can
    compute this call and is still current. Otherwise the layers are read again. Returns None if the
    call has to be computed in another way. If the layers could not be read once, they are not read
    again in the same `generate`.
    """
    layers = kept.get(key, _UNREAD)
    if layers is None:
        return None
    if layers is _UNREAD:
        if not can_bypass_dispatcher(x) or x.numel() > x.shape[-1] * MAX_FEW_ROWS:
            return None
    elif not layers.is_usable(x):
        return None
    elif layers.is_current():
        return layers
    layers = kept[key] = read(key, x)
    if layers is None or not layers.is_usable(x):
        return None
    return layers


_UNREAD = object()


def _project_few_rows(layer: Any, x: Tensor) -> Tensor | None:
    """Computes a layer and its siblings with the kernel for a few rows, and stores the outputs of
    the siblings. Returns None if the kernel cannot compute them.
    """
    kept = kept_row_layers()
    assert kept is not None
    row_layers: RowLayers | None = find_row_layers(kept, layer, x, _read_with_siblings)
    if row_layers is None:
        return None
    y, *sibling_outputs = row_layers.project(x)
    if sibling_outputs:
        store_outputs(layer.__dict__[_SIBLINGS], x, sibling_outputs)
    return y


def linear_for_few_rows(layer: nn.Linear, x: Tensor) -> Tensor:
    """Computes the forward of a linear layer without an adapter. For a few rows in bf16 on a CPU,
    it uses the C++ kernel, and also in fp32 within a call of `generate`. On a CPU without bf16
    instructions, it uses `differentiable_linear`.
    """
    weight = layer.weight
    kept = kept_row_layers()
    if kept is not None and x.dtype is torch.float32:
        row_layers: RowLayers | None = find_row_layers(kept, layer, x, _read_linear)
        if row_layers is not None:
            return row_layers.project(x)[0]
    if x.numel() <= MAX_FEW_ROWS * x.shape[-1] and not torch.is_grad_enabled():
        x_TK = x.reshape(-1, x.shape[-1])
        if can_call_few_rows(
            x_TK, calls_kernels_directly=can_call_kernels_directly(x.dtype, x)
        ) and can_run_few_rows(x_TK, weight, layer.bias):
            y_TN = few_rows_product(x_TK, weight, layer.bias)
            return y_TN.view(*x.shape[:-1], weight.shape[0])
    return differentiable_linear(x, weight, layer.bias)


def _read_linear(layer: nn.Linear, x: Tensor) -> RowLayers | None:
    projection = read_unadapted_projection(layer)
    if not can_run_row_layers(x, [projection], shared_dtypes(x, [projection])):
        return None
    return RowLayers([ReadLayer(layer, projection)], [projection], x.dtype)


def _read_with_siblings(layer: Any, x: Tensor) -> RowLayers | None:
    return read_row_layers((layer, *layer.__dict__.get(_SIBLINGS, ())), x)


def read_row_layers(
    layers: Sequence[Any], x: Tensor, *, allow_unadapted: bool = False
) -> RowLayers | None:
    """Reads layers that have the same input x. Returns None if the kernel for a few rows cannot
    compute them all.

    allow_unadapted  also reads linear layers without an adapter
    """
    projections = []
    for layer in layers:
        if is_running_fused(layer):
            projection = read_projection(layer, x)
            if projection is None:
                return None
        elif allow_unadapted and not is_lora(layer) and unadapted_layer_blocker(layer) is None:
            projection = read_unadapted_projection(layer)
        else:
            return None
        projections.append(projection)
    if not can_run_row_layers(x, projections, shared_dtypes(x, projections)):
        return None
    states = [ReadLayer(layer, projection) for layer, projection in zip(layers, projections)]
    return RowLayers(states, projections, x.dtype)


def is_running_fused(layer: Any) -> bool:
    """Whether the layer's forward is the one that `fuse_lora` attached."""
    attributes = layer.__dict__
    return FUSED in attributes and attributes.get("forward") is attributes[FUSED]


# results of `projection_dtypes`; a model needs only a few, but several times per layer
_dtypes_cache: dict[tuple[Any, ...], LoraDtypes] = {}


def cached_dtypes(projection: Projection, x: Tensor, x_dtype: torch.dtype) -> LoraDtypes:
    """Returns the dtypes of this projection for an input of `x_dtype` on the device of x, from a
    cache.
    """
    device = x.device.type
    if device == "meta":
        cast_dtype = autocast_dtype(x)
    else:
        if torch.is_autocast_enabled(device):
            cast_dtype = torch.get_autocast_dtype(device)
        else:
            cast_dtype = None
    key = (x_dtype, cast_dtype, device, projection.dtype_key)
    dtypes = _dtypes_cache.get(key)
    if dtypes is None:
        dtypes = _dtypes_cache[key] = projection_dtypes(projection, x, x_dtype)
    return dtypes


def projection_dtypes(projection: Projection, x: Tensor, x_dtype: torch.dtype) -> LoraDtypes:
    """Computes the same result as `cached_dtypes`, but without a cache, for compiled graphs."""
    weight_dtype, is_dense, a_dtype, b_dtype, branch_fp32 = projection.dtype_key
    adapter_dtype = None
    if projection.a is not None:
        adapter_dtype = torch.promote_types(a_dtype, b_dtype)
    return resolve_dtypes(
        x,
        weight_dtype or x_dtype,
        adapter_dtype,
        is_quantised=not is_dense,
        branch_fp32=branch_fp32,
        x_dtype=x_dtype,
    )


def shared_dtypes(
    x: Tensor, projections: Sequence[Projection], resolve: Callable[..., LoraDtypes] = cached_dtypes
) -> LoraDtypes | None:
    """Returns the dtypes in which all these projections of x are computed. Returns None if one
    function cannot compute all of them: if their dtypes differ, or if one of them computes its
    adapter branch in fp32.
    """
    first = projections[0]
    features = x.shape[-1]
    dtypes = resolve(first, x, x.dtype)
    for projection in projections:
        if projection.dtype_key != first.dtype_key and resolve(projection, x, x.dtype) != dtypes:
            return None
        # the property `in_features` is read only without an adapter, since it costs a Python call
        a_RK = projection.a
        in_features = projection.in_features if a_RK is None else a_RK.shape[1]
        if features != in_features:
            return None
    if dtypes.widens_branch:
        return None
    return dtypes


def refuse_packed_adapter(reason: str) -> None:
    """Raises UsageError if PEFT's code would run for an adapter on a packed parameter, since PEFT
    would add the adapter's update to the packed bytes.
    """
    raise UsageError(
        f"an adapter on packed experts: {reason}: not offered",
        fix="one adapter, active and not merged; or isotype merge",
    )


def _run_peft_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Runs PEFT's forward. While it runs, bitsandbytes is prevented from repacking the weight in
    place. bitsandbytes never undoes such a repacking, and later gradients would be wrong.
    """
    base = layer.base_layer
    if (
        type(base) is PackedLinear
        and hasattr(layer, "parameter_name")
        and not layer._disable_adapters
    ):
        refuse_packed_adapter(fusion_blocker(layer) or "this call")
    peft_forward: Any = type(layer).forward
    is_repacking = getattr(base, "support_avx512bf16_for_cpu", False)
    if not is_repacking:
        output: Tensor = peft_forward(layer, x, *args, **kwargs)
        return output
    base.support_avx512bf16_for_cpu = False
    try:
        output = peft_forward(layer, x, *args, **kwargs)
    finally:
        base.support_avx512bf16_for_cpu = is_repacking
    return output

"""Contains the forwards that `optimize` installs on the modules that it changes. In each step, a
check in this file tests that nobody has changed these modules since.

There is one forward for each kind of module: norms, decoder layers, gated MLPs and rotary
functions. `norms`, `layers`, `gated` and `rotary` find the modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from ..errors import UsageError
from ..instance_method import INSTALLED_KEY, InstanceMethod, get_forward_settings, get_method
from ..lora.attach import (
    GLOBAL_FORWARD_HOOKS,
    GLOBAL_FORWARD_PRE_HOOKS,
    find_row_layers,
    find_siblings,
    has_hooks,
    is_fused,
    read_row_layers,
    refresh_plan,
)
from ..lora.decode import MlpHalf, NormedRows, ReadNorm, are_norm_kernels_usable
from ..lora.dora import forget_row_squares
from ..lora.mlp import MlpRowLayers, run_gated_mlp
from ..lora.products import kept_row_layers
from ..ops import add_rms_norm, gelu_mul, rms_norm, rope, silu_mul
from ..ops.gated import Gated
from ..ops.recomputable import mark_recomputable
from ..ops.recomputed_layer import mark_layer_hooked, running_checkpointed_layers
from ..precision.apply import is_cast_hook

# key in a model's `__dict__` for the modules in which an op was installed
PLACED_KEY = "_isotype_placed"
# arguments with the keys and values of earlier tokens; `cache` since transformers 5.24
CACHES = ("cache", "past_key_values", "layer_past")
logger = logging.get_logger(__name__)


def check_placed(model: nn.Module) -> None:
    """`optimize` replaces the forwards of module instances, not of classes. This function checks
    that nobody has replaced the forward of one of these classes since. The training loop and an
    attached trainer call it in each step.

    If a hook or another child module is added to a LoRA layer, the layer runs PEFT's code from then
    on. When the hook or the child is removed, the layer runs the fused code again.

    Raises  UsageError if the forward of a class was replaced after `optimize`
    """
    forget_row_squares()
    for module in vars(model).get(PLACED_KEY, ()):
        method = get_method(module)
        if method is not None and not method.is_current:
            raise UsageError(
                f"{type(module).__name__}.{method.name} was replaced after isotype.optimize(),"
                " which no longer computes it",
                fix=(
                    "isotype.restore(model) before a class is patched, and isotype.optimize(model)"
                    " after it"
                ),
            )
        if is_fused(module):
            refresh_plan(module)


# --- norms

USUAL_EPSILON = 1e-6  # of a norm whose class has no attribute for it


@dataclass(frozen=True)
class NormSettings:
    """The settings with which a norm calls the op `rms_norm`.

    eps_attribute  the name of the attribute that contains epsilon; every call reads it again,
                   because it may change. None if epsilon is a constant in the code of the class
    unit_offset    whether the output is multiplied by 1 + weight instead of the weight
    out_dtype      the dtype of the output; None for the dtype of the input
    saves_input    whether the next layer (a LoRA layer or attention) saves the input of the norm
                   for backward, instead of the norm's output
    """

    eps_attribute: str | None
    unit_offset: bool
    out_dtype: torch.dtype | None
    saves_input: bool = False


def norm_forward(
    self: Any,
    hidden_states: Tensor,
    *args: Any,
    residual_slot: list[Tensor | None] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Replaces the forward of a norm.

    residual_slot  a list with one item, which is a tensor or None. The call adds the tensor to the
                   input, computes the norm of the sum, and stores the sum in the list. Backward
                   then adds the gradient of the sum
    """
    if args or kwargs:
        normed: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return normed
    settings: NormSettings = self.__dict__[INSTALLED_KEY][0]
    eps = USUAL_EPSILON if settings.eps_attribute is None else self.__dict__[settings.eps_attribute]
    # the weight is read once, because a parametrised weight (`torch.nn.utils.parametrize`) is
    # computed anew for every access
    weight: Tensor = self._parameters["weight"] if residual_slot is not None else self.weight
    if residual_slot is not None:
        normed, residual_slot[0] = add_rms_norm(
            hidden_states,
            residual_slot[0],
            weight,
            eps,
            unit_offset=settings.unit_offset,
            out_dtype=settings.out_dtype,
        )
        return normed
    if not settings.saves_input:
        return rms_norm(
            hidden_states,
            weight,
            eps,
            unit_offset=settings.unit_offset,
            out_dtype=settings.out_dtype,
        )
    norm = partial(
        rms_norm, eps=eps, unit_offset=settings.unit_offset, out_dtype=settings.out_dtype
    )
    return mark_recomputable(norm(hidden_states, weight), norm, hidden_states, weight)


def read_norm(norm: nn.Module, dtype: torch.dtype) -> ReadNorm | None:
    """Reads a norm for `lora.decode`. Returns None if its forward is not `norm_forward`, or if a
    hook may change its result for an input of this dtype.
    """
    method = norm.__dict__.get("forward")
    if type(method) is not InstanceMethod or method.function is not norm_forward:
        return None
    settings: NormSettings = get_forward_settings(norm)
    hooks: Any = norm._forward_hooks
    may_change = bool(norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)
    for hook in hooks.values():
        if not is_cast_hook(hook) or hook.cast_dtype is not dtype:
            may_change = True
    if (
        may_change
        or settings.out_dtype not in (None, dtype)
        or not are_norm_kernels_usable(norm._parameters.get("weight"))
    ):
        return None
    attribute = settings.eps_attribute
    return ReadNorm(
        norm,
        eps=USUAL_EPSILON if attribute is None else norm.__dict__[attribute],
        eps_attribute=attribute,
        unit_offset=settings.unit_offset,
    )


def norm_with_residual(
    norm: nn.Module, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns (norm(x + residual), x + residual). The norm is computed by a call of the module, so
    that hooks on the module run.
    """
    method = norm.__dict__.get("forward")
    is_norm_op = (
        type(method) is InstanceMethod
        and method.function is norm_forward
        and not torch.compiler.is_dynamo_compiling()
    )
    hooks = norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    if not is_norm_op or "weight" not in norm._parameters or (hooks and hooks_change_input(norm)):
        # the op needs an unwrapped norm whose weight is an ordinary parameter; a hook may change
        # the norm's input
        total = x if residual is None else residual + x
        return norm(total), total
    residual_slot = [residual]
    normed: Tensor = norm(x, residual_slot=residual_slot)
    (total_sum,) = residual_slot
    return normed, x if total_sum is None else total_sum


def hooks_change_input(norm: nn.Module) -> bool:
    """Whether a hook may change the norm's input or its gradients."""
    changing = (norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    return any(
        not getattr(hook, "is_observer", False) for hooks in changing for hook in hooks.values()
    )


# --- decoder layers with two halves


@dataclass(frozen=True)
class Half:
    """Names the child modules that one half of a decoder layer calls. The half computes x + scale *
    after(part(before(x))), where `before` and `after` are norms and each of them may be missing.
    """

    norm_before: str | None
    part: str
    norm_after: str | None

    @property
    def children(self) -> tuple[str, ...]:
        return tuple(
            name for name in (self.norm_before, self.part, self.norm_after) if name is not None
        )


@dataclass(frozen=True)
class LayerSettings:
    """Describes a decoder layer.

    attention, mlp     the two halves of the layer
    scale              the name of the attribute with the factor of the outputs of attention and
                       MLP; None if there is no factor
    mlp_returns_tuple  whether the MLP returns a tuple, of which the first element is used
    names              the parameters of the forward after the hidden states
    defaults           their default values
    """

    attention: Half
    mlp: Half
    scale: str | None
    mlp_returns_tuple: bool
    names: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]


def layer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replaces the forward of a decoder layer. It calls `run_layer` and uses gradient checkpointing
    in the same way as the forward of the class. Calls with other arguments run the forward of the
    class.
    """
    settings: LayerSettings = get_forward_settings(self)
    is_recomputed = (
        self.training and not _is_checkpointed_by_call() and bool(self.gradient_checkpointing)
    )
    if len(args) > len(settings.names) or (is_recomputed and self._can_checkpoint_with_cache):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    arguments = {**dict(settings.defaults), **dict(zip(settings.names, args)), **kwargs}
    if not is_recomputed:
        return run_layer(self, settings, arguments, hidden_states)
    drop_cache(arguments)
    return self._gradient_checkpointing_func(
        partial(run_layer, self, settings, arguments), hidden_states
    )


@cache
def _is_checkpointed_by_call() -> bool:
    """Whether transformers applies gradient checkpointing to a layer's `__call__`, as version 5.17
    does, and not to its `forward`.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" in vars(GradientCheckpointingLayer)


def drop_cache(arguments: dict[str, Any]) -> None:
    """Removes the key-value cache from a layer's arguments. With gradient checkpointing, the layer
    runs twice and would add its keys and values to the cache twice. It warns once, as the layers of
    transformers do.
    """
    removed = [name for name in CACHES if arguments.get(name) is not None]
    arguments.update(dict.fromkeys(removed))
    if arguments.get("use_cache"):
        removed.append("use_cache")
        arguments["use_cache"] = False
    if removed:
        logger.warning_once(
            "Caching is incompatible with gradient checkpointing: training continues without"
            f" {', '.join(removed)}."
        )


def run_layer(
    self: nn.Module, settings: LayerSettings, arguments: dict[str, Any], x: Tensor
) -> Tensor:
    half = settings.attention
    children = cast(Any, self._modules)
    attention = children[half.part]
    mlp = children[settings.mlp.part]
    residual: Tensor | None
    if half.norm_before is None:
        normed = x
        residual = x
    else:
        norm = children[half.norm_before]
        normed_or_none = normed_input(norm, attention, x)
        if normed_or_none is None:
            normed, residual = norm_with_residual(norm, x, None)
        else:
            normed = normed_or_none
            residual = x
    if running_checkpointed_layers and has_hooks(attention):
        mark_layer_hooked()
    x = attention(hidden_states=normed, **arguments)[0]
    del normed
    x = x if half.norm_after is None else children[half.norm_after](x)
    token_output = mlp_half(self, x, residual)
    if token_output is not None:
        return token_output
    half = settings.mlp
    if half.norm_before is None or settings.scale is not None:
        # no norm reads this sum, or a factor scales one of its terms
        x = _add_scaled(self, settings, residual, x)
        residual = None
    if half.norm_before is None:
        normed = x
        total = x
    else:
        normed, total = norm_with_residual(children[half.norm_before], x, residual)
    if running_checkpointed_layers and has_hooks(mlp):
        mark_layer_hooked()
    output = mlp(normed)[0] if settings.mlp_returns_tuple else mlp(normed)
    output = output if half.norm_after is None else children[half.norm_after](output)
    return _add_scaled(self, settings, total, output)


def _add_scaled(self: nn.Module, settings: LayerSettings, residual: Tensor, term: Tensor) -> Tensor:
    """Computes residual + scale * term and rounds the result once. The model's own code rounds
    twice: scale * term, and then the sum.
    """
    if settings.scale is None:
        total: Tensor = residual + term
    else:
        total = torch.add(residual, term, alpha=getattr(self, settings.scale))
    return total


# --- gated MLPs

ACTIVATIONS: dict[Gated, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu_mul": (F.silu, silu_mul),
    "gelu_mul exact": (F.gelu, gelu_mul),
    "gelu_mul tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda gate, up: gelu_mul(gate, up, approximate="tanh"),
    ),
}


@dataclass(frozen=True)
class GatedSettings:
    """Names the child modules of a gated MLP.

    gate, down, activation  the names of the child modules
    up                      None if one layer computes both gate and up
    op                      the op that computes the activation and the product with up
    function                the activation function that was recognised; if the module later has
                            another one, the forward of the class runs
    """

    gate: str
    up: str | None
    down: str
    activation: str
    op: Gated
    function: Any


def gated_forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    settings: GatedSettings = self.__dict__[INSTALLED_KEY][0]
    children = self._modules
    # the activation may have been replaced, or have hooks that the op would not call
    activation: Any = children.get(settings.activation) or self.__dict__.get(settings.activation)
    is_other_activation = activation is not settings.function
    if (
        not is_other_activation
        and isinstance(activation, nn.Module)
        and (activation._forward_hooks or GLOBAL_FORWARD_HOOKS or GLOBAL_FORWARD_PRE_HOOKS)
    ):
        is_other_activation = has_hooks(activation)
    if args or kwargs or is_other_activation:
        output: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return output
    layers = (
        (children[settings.gate], children[settings.down])
        if settings.up is None
        else (children[settings.gate], children[settings.up], children[settings.down])
    )
    fused_output = run_gated_mlp(layers, hidden_states, settings.op)
    if fused_output is None:
        return compute_gated(self, hidden_states, settings)
    return fused_output


def compute_gated(module: nn.Module, x: Tensor, settings: GatedSettings) -> Tensor:
    if settings.up is None:
        gate, up = getattr(module, settings.gate)(x).chunk(2, dim=-1)
    else:
        gate = getattr(module, settings.gate)(x)
        up = getattr(module, settings.up)(x)
    down: Callable[[Tensor], Tensor] = getattr(module, settings.down)
    if gate.dtype != up.dtype:
        # an adapter on one of the two layers may widen its output; PyTorch's product promotes
        # dtypes
        return down(getattr(module, settings.activation)(gate) * up)
    return down(ACTIVATIONS[settings.op][1](gate, up))


# --- the few rows of a generated token


def normed_input(norm: nn.Module, attention: nn.Module, x: Tensor) -> Tensor | None:
    """Computes the norm before attention, together with the projections of attention. Returns None
    if the norm has to be called.
    """
    kept = kept_row_layers()
    if kept is None or torch.compiler.is_dynamo_compiling():
        return None
    rows: NormedRows | None = find_row_layers(kept, (norm, attention), x, _read_normed_rows)
    if rows is None:
        return None
    return rows.compute(x)


def _read_normed_rows(key: tuple[Any, Any], x: Tensor) -> NormedRows | None:
    norm, attention = key
    layers = find_siblings(attention)
    norm_reading = read_norm(norm, x.dtype)
    if norm_reading is None or layers is None:
        return None
    rows = read_row_layers(layers, x)
    if rows is None:
        return None
    return NormedRows(norm_reading, layers, rows)


def mlp_half(layer: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor | None:
    """Computes t + mlp(norm(t)) with t = residual + x. Returns None if the modules have to be
    called.

    x  the output of attention
    """
    kept = kept_row_layers()
    if kept is None or residual is None or torch.compiler.is_dynamo_compiling():
        return None
    if residual.dtype is not x.dtype or residual.shape != x.shape:
        return None
    half: MlpHalf | None = find_row_layers(kept, layer, x, _read_mlp_half)
    if half is None:
        return None
    return half.compute(x, residual)


def _read_mlp_half(layer: nn.Module, x: Tensor) -> MlpHalf | None:
    settings: LayerSettings = get_forward_settings(layer)
    children = cast(Any, layer._modules)
    half = settings.mlp
    mlp = children[half.part]
    method = mlp.__dict__.get("forward")
    is_plain_half = (
        half.norm_before is not None
        and half.norm_after is None
        and settings.scale is None
        and not settings.mlp_returns_tuple
    )
    if (
        not is_plain_half
        or type(method) is not InstanceMethod
        or method.function is not gated_forward
    ):
        return None
    gated: GatedSettings = get_forward_settings(mlp)
    names = (gated.gate, gated.up, gated.down)
    norm_reading = read_norm(children[half.norm_before], x.dtype)
    layers = MlpRowLayers.read([mlp._modules[name] for name in names if name is not None], x)
    if norm_reading is None or layers is None or layers.down.columns != [x.shape[-1]]:
        return None
    return MlpHalf(
        norm_reading,
        mlp,
        layers,
        gated_op=gated.op,
        activation_name=gated.activation,
        activation=gated.function,
    )


# --- rotary functions

# how a table of cos or sin has the values of the pairs: all values once, and then again ("runs");
# each value twice ("values"); or each value once
TableForm = Literal["runs", "values", "once"]
# which two dimensions a function rotates together: d and d + R (halves), 2d and 2d + 1
# (neighbours), or 2d and 2d + 1 with the result in the order of halves
Pairs = Literal["halves", "neighbours", "neighbours to halves"]


def narrow_table(table: Tensor, form: TableForm) -> Tensor:
    """Reduces a table of cos or sin to one value for each pair of rotated dimensions."""
    if form == "once":
        return table
    if form == "values":
        return table[..., ::2]
    return table[..., : table.shape[-1] // 2]


def narrow_tables(cos: Tensor, sin: Tensor, form: TableForm) -> tuple[Tensor, Tensor]:
    """Reduces both tables. All layers get the same tables of a generated token, so within a call of
    `generate` the reduced tables are kept until other tables are passed.
    """
    kept = None if torch.compiler.is_dynamo_compiling() else kept_row_layers()
    if kept is None:
        return narrow_table(cos, form), narrow_table(sin, form)
    tables = kept.rotary_tables
    if tables is None or tables[0] is not cos or tables[1] is not sin or tables[2] != form:
        narrow_cos = narrow_table(cos, form).contiguous()
        narrow_sin = narrow_table(sin, form).contiguous()
        tables = kept.rotary_tables = (cos, sin, form, narrow_cos, narrow_sin)
    return tables[3], tables[4]


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, form: TableForm
) -> tuple[Tensor, Tensor]:
    if pairs == "neighbours to halves":
        # the form of DeepSeek-V3: one copy reorders neighbours to halves
        q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    cos, sin = narrow_tables(cos, sin, form)
    return rope(q, k, cos, sin, interleaved=pairs == "neighbours")


def wrap_rotary(original: Callable[..., Any], pairs: Pairs, form: TableForm) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)[:4]

    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        # the original computes any other call: with more arguments (unsqueeze_dim, position ids of
        # older models), or without keys
        if len(args) != 4 or kwargs:
            if len(args) > 4 or set(kwargs) != set(names[len(args) :]):
                return original(*args, **kwargs)
            args = (*args, *(kwargs[name] for name in names[len(args) :]))
        q, k, cos, sin = args
        if k is None or cos.dim() != 3 or q.dim() != 4 or cos.requires_grad or sin.requires_grad:
            return original(q, k, cos, sin)
        return rotate(q, k, cos, sin, pairs, form)

    return apply_rotary_pos_emb


# --- input embeddings


class TrainingStateHook:
    """A forward hook of the input embeddings. It stores the state of the random generators in
    training. The hook is on the embeddings, because every forward calls them. TRL's fused loss does
    not call the head. The hook is an object and not a function, so that deepcopy copies it.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __call__(self, embeddings: nn.Module, args: Any, output: Any) -> None:
        # reading the generator would break a compiled graph; the samples of a compiled model use
        # the generators of training
        if not torch.compiler.is_compiling() and embeddings.training and torch.is_grad_enabled():
            self.stream.training_state = torch.get_rng_state()

"""What runs in the modules in which `optimize` has placed an op, and the question once a step
whether they are what they were.

One forward a kind of module: norm, decoder layer, gated MLP, rotation. `norms`, `layers`, `gated`
and `rotary` find the modules for them.
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
from ..instance_method import SETTINGS_KEY, InstanceMethod, get_method, get_settings
from ..lora.attach import (
    GLOBAL_FORWARD_HOOKS,
    GLOBAL_FORWARD_PRE_HOOKS,
    has_hooks,
    is_fused,
    refresh_plan,
)
from ..lora.mlp import run_gated_mlp
from ..ops import add_rms_norm, gelu_mul, rms_norm, rope, silu_mul
from ..ops.gated import Gated
from ..ops.recomputable import mark_recomputable
from ..ops.recomputed_layer import layers_running, mark_layer_hooked

PLACED = "_isotype_placed"
CACHES = ("past_key_values", "layer_past")
logger = logging.get_logger(__name__)


def check_placed(model: nn.Module) -> None:
    """Whether the model is still what `optimize` placed ops in: asked once a step, by the training
    loop and by an attached trainer.

    A LoRA layer that has got a hook or another part inside runs PEFT's code from now on, or the
    fused code again.
    Raises  UsageError where a class was given another forward since
    """
    for module in vars(model).get(PLACED, ()):
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

USUAL_EPSILON = 1e-6


@dataclass(frozen=True)
class NormSettings:
    """eps     the attribute that has it, read at every call: it may be changed afterwards; None
               where it is written in the class's code
    remade  a LoRA layer or an attention that reads the output saves the norm's input in its place
    """

    eps: str | None
    unit_offset: bool
    out_dtype: torch.dtype | None
    remade: bool = False


def norm_forward(
    self: Any,
    hidden_states: Tensor,
    *args: Any,
    beside: list[Tensor | None] | None = None,
    **kwargs: Any,
) -> Tensor:
    """beside  one tensor that is added to the input first, or None: the call leaves the sum there,
    whose gradient comes back too
    """
    if args or kwargs:
        own: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return own
    s: NormSettings = self.__dict__[SETTINGS_KEY][0]
    eps = USUAL_EPSILON if s.eps is None else self.__dict__[s.eps]
    # read once: `torch.nn.utils.parametrize` makes it anew at every reading
    weight: Tensor = self._parameters["weight"] if beside is not None else self.weight
    if beside is not None:
        made, beside[0] = add_rms_norm(
            hidden_states, beside[0], weight, eps, unit_offset=s.unit_offset, out_dtype=s.out_dtype
        )
        return made
    if not s.remade:
        return rms_norm(
            hidden_states, weight, eps, unit_offset=s.unit_offset, out_dtype=s.out_dtype
        )
    norm = partial(rms_norm, eps=eps, unit_offset=s.unit_offset, out_dtype=s.out_dtype)
    return mark_recomputable(norm(hidden_states, weight), norm, hidden_states, weight)


def with_residual(norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual) by a call of the module, so that whoever observes it sees
    the call.
    """
    method = norm.__dict__.get("forward")
    ours = (
        type(method) is InstanceMethod
        and method.function is norm_forward
        and not torch.compiler.is_dynamo_compiling()
    )
    hooks = norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    if not ours or "weight" not in norm._parameters or (hooks and changed_before(norm)):
        # no wrapper around it, on a weight that is its parameter and not made from others; a hook
        # may change what the norm is given
        total = x if residual is None else residual + x
        return norm(total), total
    beside = [residual]
    normed: Tensor = norm(x, beside=beside)
    (made,) = beside
    return normed, x if made is None else made


def changed_before(norm: nn.Module) -> bool:
    """Whether a hook may change what the norm is given, or its gradients."""
    changing = (norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    return any(
        not getattr(hook, "observes", False) for hooks in changing for hook in hooks.values()
    )


# --- decoder layers of two halves


@dataclass(frozen=True)
class Half:
    """Names of children: x + scale * after(part(before(x))), where either norm may be missing."""

    before: str | None
    part: str
    after: str | None

    @property
    def children(self) -> tuple[str, ...]:
        return tuple(name for name in (self.before, self.part, self.after) if name is not None)


@dataclass(frozen=True)
class LayerSettings:
    """Both halves, and the forward's parameters after the hidden states with their defaults.

    scale      the attribute with the number that both halves are multiplied by; None for 1
    mlp_first  the MLP gives a tuple, whose first element counts
    """

    attention: Half
    mlp: Half
    scale: str | None
    mlp_first: bool
    names: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]


def layer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The form, with gradient checkpointing as the class's forward has it; that one, where it was
    called in another way.
    """
    s: LayerSettings = get_settings(self)
    recomputed = self.training and not _call_recomputes() and bool(self.gradient_checkpointing)
    if len(args) > len(s.names) or (recomputed and self._can_checkpoint_with_cache):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    given = {**dict(s.defaults), **dict(zip(s.names, args)), **kwargs}
    if not recomputed:
        return whole(self, s, given, hidden_states)
    without_cache(given)
    return self._gradient_checkpointing_func(partial(whole, self, s, given), hidden_states)


@cache
def _call_recomputes() -> bool:
    """Whether transformers puts checkpointing around a layer's call, as 5.17 does, and not around
    its `forward`.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" in vars(GradientCheckpointingLayer)


def without_cache(given: dict[str, Any]) -> None:
    """A recompute would fill the cache a second time. transformers' layers take it away too, and
    say so once.
    """
    taken = [name for name in CACHES if given.get(name) is not None] + (
        ["use_cache"] if given.get("use_cache") else []
    )
    if taken:
        given.update({name: False if name == "use_cache" else None for name in taken})
        logger.warning_once(
            "Caching is incompatible with gradient checkpointing: training goes on without"
            f" {', '.join(taken)}."
        )


def whole(self: nn.Module, s: LayerSettings, given: dict[str, Any], x: Tensor) -> Tensor:
    half = s.attention
    children = cast(Any, self._modules)
    attention = children[half.part]
    mlp = children[s.mlp.part]
    residual: Tensor | None
    if half.before is None:
        normed = x
        residual = x
    else:
        normed, residual = with_residual(children[half.before], x, None)
    if layers_running and has_hooks(attention):
        mark_layer_hooked()
    x = attention(hidden_states=normed, **given)[0]
    del normed
    x = x if half.after is None else children[half.after](x)
    half = s.mlp
    if half.before is None or s.scale is not None:
        # no norm reads this sum, or its terms are not added as they are
        x = _sum(self, s, residual, x)
        residual = None
    if half.before is None:
        normed = x
        total = x
    else:
        normed, total = with_residual(children[half.before], x, residual)
    if layers_running and has_hooks(mlp):
        mark_layer_hooked()
    made = mlp(normed)[0] if s.mlp_first else mlp(normed)
    made = made if half.after is None else children[half.after](made)
    return _sum(self, s, total, made)


def _sum(self: nn.Module, s: LayerSettings, residual: Tensor, term: Tensor) -> Tensor:
    """residual + scale * term, rounded once: the class's own code rounds the product too."""
    if s.scale is None:
        made: Tensor = residual + term
    else:
        made = torch.add(residual, term, alpha=getattr(self, s.scale))
    return made


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
    """Names of the children; `up` is None where one layer makes both halves.

    function  the activation that was probed: another one is the class's to call
    """

    gate: str
    up: str | None
    down: str
    activation: str
    op: Gated
    function: Any


def gated_forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    s: GatedSettings = self.__dict__[SETTINGS_KEY][0]
    children = self._modules
    # an activation that was exchanged, or has hooks that the op would not call
    activation: Any = children.get(s.activation) or self.__dict__.get(s.activation)
    another = activation is not s.function
    if (
        not another
        and isinstance(activation, nn.Module)
        and (activation._forward_hooks or GLOBAL_FORWARD_HOOKS or GLOBAL_FORWARD_PRE_HOOKS)
    ):
        another = has_hooks(activation)
    if args or kwargs or another:
        own: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return own
    layers = (
        (children[s.gate], children[s.down])
        if s.up is None
        else (children[s.gate], children[s.up], children[s.down])
    )
    together = run_gated_mlp(layers, hidden_states, s.op)
    if together is None:
        return compute_gated(self, hidden_states, s)
    return together


def compute_gated(module: nn.Module, x: Tensor, s: GatedSettings) -> Tensor:
    if s.up is None:
        gate, up = getattr(module, s.gate)(x).chunk(2, dim=-1)
    else:
        gate = getattr(module, s.gate)(x)
        up = getattr(module, s.up)(x)
    down: Callable[[Tensor], Tensor] = getattr(module, s.down)
    if gate.dtype != up.dtype:
        # an adapter on one of the two may widen it: the module's own product promotes
        return down(getattr(module, s.activation)(gate) * up)
    return down(ACTIVATIONS[s.op][1](gate, up))


# --- rotary functions


Form = Literal["runs", "values", "once"]
# which dimensions a function turns together: d and d + R, 2d and 2d + 1, or those of the second
# into the order of the first
Pairs = Literal["halves", "neighbours", "neighbours to halves"]


def narrow(table: Tensor, form: Form) -> Tensor:
    """One value a pair."""
    if form == "once":
        return table
    if form == "values":
        return table[..., ::2]
    return table[..., : table.shape[-1] // 2]


def rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, form: Form
) -> tuple[Tensor, Tensor]:
    if pairs == "neighbours to halves":
        # DeepSeek-V3's: one copy into the order of halves
        q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return rope(q, k, narrow(cos, form), narrow(sin, form), interleaved=pairs == "neighbours")


def replacement(original: Callable[..., Any], pairs: Pairs, form: Form) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)[:4]

    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        # any other call is the original's: with more arguments (unsqueeze_dim, position ids of
        # older models), or without keys
        if len(args) != 4 or kwargs:
            if len(args) > 4 or set(kwargs) != set(names[len(args) :]):
                return original(*args, **kwargs)
            args = (*args, *(kwargs[name] for name in names[len(args) :]))
        q, k, cos, sin = args
        if k is None or cos.dim() != 3 or q.dim() != 4 or cos.requires_grad or sin.requires_grad:
            return original(q, k, cos, sin)
        return rotated(q, k, cos, sin, pairs, form)

    return apply_rotary_pos_emb


# --- input embeddings


class SeesTraining:
    """Forward hook of the input embeddings, which every forward calls (TRL's fused loss never calls
    the head). An object, for deepcopy.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __call__(self, embeddings: nn.Module, args: Any, output: Any) -> None:
        # reading the generator would break a compiled graph; a compiled model's samples then come
        # from training's generators
        if not torch.compiler.is_compiling() and embeddings.training and torch.is_grad_enabled():
            self.stream.trained = torch.get_rng_state()

"""Decoder layers of the form x + attention(norm(x)), then x + mlp(norm(x)): known by their children and a probe, whatever their names.

Such a layer's two sums are ours: each norm hands its input's gradient on together with the residual's (`add_rms_norm`), and under
checkpointing each half can be recomputed by itself (`split_at_middle`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..lora.plain import has_hooks
from ..ops.recompute import hooks_read_here
from ..placement import Placement
from . import norms
from .attention import implementation_of
from .instances import foreign, placement, put, same, settings_of, stand_in, taken
from .regions import region

logger = logging.get_logger(__name__)
PART = "layer"
_SPLIT = "_isotype_split"
_CACHES = ("past_key_values", "layer_past")


@dataclass(frozen=True)
class LayerSettings:
    """Names of the children, and the forward's parameters after the hidden states with their defaults."""

    first: str
    attention: str
    second: str
    mlp: str
    names: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]


def children_of(module: nn.Module) -> tuple[list[str], str, str] | None:
    """(both norms, attention, mlp), or None where there are others: a dropout that drops nothing does not count."""
    named = {n: c for n, c in module.named_children() if not isinstance(c, nn.Identity) and not (type(c) is nn.Dropout and c.p == 0.0)}
    both = [n for n, c in named.items() if norms.is_candidate(c)]
    attention = [n for n, c in named.items() if implementation_of(c) is not None]
    rest = [n for n in named if n not in both and n not in attention]
    if len(both) != 2 or len(attention) != 1 or len(rest) != 1 or next(module.parameters(recurse=False), None) is not None:
        return None
    return both, attention[0], rest[0]


def is_candidate(module: nn.Module) -> bool:
    """Whether the module is one of the layers that transformers can checkpoint, with the children of the form."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # where the class wraps `forward`, not the call: that wrapper's part is `layer_forward`'s too
    wraps = "__call__" not in vars(GradientCheckpointingLayer)
    return wraps and isinstance(module, GradientCheckpointingLayer) and children_of(module) is not None


class _Attention(nn.Module):
    """Stands for the attention in the probe, and notes what each call was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
        self.calls.append(given)
        return hidden_states.cos() * 0.7 + 0.2, None


class _Rows(nn.Module):
    """Stands for a norm or an MLP: a function of its own."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return (x * (1.0 + self.shift)).sin() + self.shift


def recognise(module: nn.Module) -> LayerSettings | str:
    """The settings with which the form is this module, or why none are."""
    found = children_of(module)
    forward = inspect.unwrap(type(module).forward)
    _, first_argument, *parameters = inspect.signature(forward).parameters.values()
    kinds = {p.kind for p in (first_argument, *parameters)}
    if found is None or inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        return "its forward has other children or arguments"
    both, attention, mlp = found
    plain = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    if any(p.default is inspect.Parameter.empty for p in plain):
        return "its forward has other children or arguments"
    names = tuple(p.name for p in plain if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
    x = torch.linspace(-2.0, 3.0, 12, dtype=torch.float64).view(1, 2, 6)
    for first, second in permutations(both):
        settings = LayerSettings(first, attention, second, mlp, names, tuple((p.name, p.default) for p in plain))
        stub = _Attention()
        stubs: dict[str, nn.Module] = {attention: stub, mlp: _Rows(0.5), first: _Rows(0.1), second: _Rows(0.3)}
        twin = stand_in(module, stubs, {})
        vars(twin)["training"] = False
        # the class's own forward hands on what it was given under the same names
        given: dict[str, Any] = {name: object() for name in names} | {name: p for name, p in settings.defaults if name in _CACHES}
        if same(partial(forward, twin, x, **given), partial(_probe, twin, x, settings)) and stub.calls[0] == given:
            return settings
    return "its output is not x + attention(norm(x)), x + mlp(norm(x)) on a probe"


def _probe(twin: nn.Module, x: Tensor, s: LayerSettings) -> Tensor:
    x = x + _child(twin, s.attention).forward(hidden_states=_child(twin, s.first)(x))[0]
    made: Tensor = x + _child(twin, s.mlp)(_child(twin, s.second)(x))
    return made


def _child(module: nn.Module, name: str) -> Any:
    return module._modules[name]


def layer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The form, with gradient checkpointing as the class's forward has it; that one, where it was called in another way."""
    s: LayerSettings = settings_of(self)
    recomputed = self.training and bool(self.gradient_checkpointing)
    if len(args) > len(s.names) or (recomputed and self._can_checkpoint_with_cache):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    given = {**dict(s.defaults), **dict(zip(s.names, args)), **kwargs}
    if not recomputed:
        return region(self, _whole)(self, s, given, hidden_states)
    without_cache(given)
    split: Callable[..., Tensor] | None = vars(self).get(_SPLIT)
    if split is None:
        return self._gradient_checkpointing_func(partial(region(self, _whole), self, s, given), hidden_states)
    middle = split(partial(_first_half, self, s, given), hidden_states)
    return split(partial(_second_half, self, s), middle)


def without_cache(given: dict[str, Any]) -> None:
    """A recompute would fill the cache a second time. transformers' layers take it away too, and say so once."""
    taken = [name for name in _CACHES if given.get(name) is not None] + (["use_cache"] if given.get("use_cache") else [])
    if taken:
        given.update({name: False if name == "use_cache" else None for name in taken})
        logger.warning_once(f"Caching is incompatible with gradient checkpointing: training goes on without {', '.join(taken)}.")


def _whole(self: nn.Module, s: LayerSettings, given: dict[str, Any], x: Tensor) -> Tensor:
    return _mlp(self, s, *_attended(self, s, given, x))


def _first_half(self: nn.Module, s: LayerSettings, given: dict[str, Any], x: Tensor) -> Tensor:
    attended, residual = _attended(self, s, given, x)
    return residual + attended


def _second_half(self: nn.Module, s: LayerSettings, x: Tensor) -> Tensor:
    return _mlp(self, s, x, None)


def _attended(self: nn.Module, s: LayerSettings, given: dict[str, Any], x: Tensor) -> tuple[Tensor, Tensor]:
    attention = _child(self, s.attention)
    normed, residual = norms.with_residual(_child(self, s.first), x, None)
    if has_hooks(attention):
        hooks_read_here()
    return attention(hidden_states=normed, **given)[0], residual


def _mlp(self: nn.Module, s: LayerSettings, x: Tensor, residual: Tensor | None) -> Tensor:
    mlp = _child(self, s.mlp)
    normed, total = norms.with_residual(_child(self, s.second), x, residual)
    if has_hooks(mlp):
        hooks_read_here()
    made: Tensor = total + mlp(normed)
    return made


def place(path: str, module: nn.Module) -> Placement:
    """Puts `layer_forward` on the module at this path of the model, where it gives the module's output."""
    reason = taken(module)
    if reason is not None:
        return placement(PART, path, module, None, reason)
    found = recognise(module)
    if isinstance(found, str):
        return placement(PART, path, module, None, found)
    for name in (found.first, found.attention, found.second, found.mlp):
        if reason := foreign(_child(module, name)):
            return placement(PART, path, module, None, f"{name}: {reason}")
    put(module, layer_forward, found)
    return placement(PART, path, module, "add_rms_norm")


def has_halves(module: nn.Module) -> bool:
    """Whether the layer runs as the form now, so that it can be recomputed half by half."""
    return isinstance(settings_of(module), LayerSettings)


def split_at_middle(layer: nn.Module, call: Callable[..., Tensor] | None) -> None:
    """Under checkpointing the layer runs as call(first half, x), then call(second half, its result); None: as one call again."""
    vars(layer).pop(_SPLIT, None)
    if call is not None:
        vars(layer)[_SPLIT] = call

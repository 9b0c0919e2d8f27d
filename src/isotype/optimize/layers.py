"""Replaces the forward of decoder layers that have two halves, x + attention(x) and then x +
mlp(x). A layer is recognised by its child modules and by its output for a small test input, not by
names.

Norms are before attention and MLP (Llama), after them (OLMo 2), or both (Gemma 2). The outputs of
attention and MLP may be multiplied by a factor (Granite). The new forward computes each sum
together with the norm that follows it (`add_rms_norm`). Backward then adds the gradients of the sum
and of the norm in one pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from ..instance_method import Placement
from . import norms
from .attention import attention_implementation
from .forwards import CACHES, Half, LayerSettings, layer_forward, run_layer
from .instances import (
    ProbeLayer,
    computes_same_in_train_and_eval,
    foreign_kernel_reason,
    make_probe_copy,
    place_replacement,
    replacement_blocker,
)

PART_NAME = "layer"  # the value of `Placement.part`


@dataclass(frozen=True)
class Children:
    """The names of the child modules of a decoder layer, `norms` in the order of the module."""

    norms: tuple[str, ...]
    attention: str
    mlp: str


def find_children(module: nn.Module) -> Children | str:
    """Finds the norms, the attention and the MLP of a decoder layer. If the layer has child modules
    of other kinds, returns a text that says so. `nn.Identity` modules and dropouts with p = 0 are
    ignored.
    """
    children = {
        name: child
        for name, child in module.named_children()
        if not isinstance(child, nn.Identity) and not (type(child) is nn.Dropout and child.p == 0.0)
    }
    norm_names = [name for name, child in children.items() if norms.is_candidate(child)]
    attention = [
        name for name, child in children.items() if attention_implementation(child) is not None
    ]
    other_names = [name for name in children if name not in norm_names and name not in attention]
    if next(module.parameters(recurse=False), None) is not None:
        return "it has parameters of its own"
    if len(attention) != 1:
        return f"it has {len(attention)} attention layers, not one"
    if len(norm_names) not in (2, 4):
        return (
            f"it has {len(norm_names)} norm{'s' * (len(norm_names) != 1)} with one vector of weights and"
            " without bias; the op needs two or four"
        )
    if len(other_names) != 1:
        return f"it has other children: {', '.join(other_names) or 'no MLP'}"
    return Children(tuple(norm_names), attention[0], other_names[0])


def is_candidate(module: nn.Module) -> bool:
    """Whether this is a layer that transformers can checkpoint and that has an attention layer as
    child.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer) and any(
        attention_implementation(child) is not None for child in module.children()
    )


class _AttentionStub(nn.Module):
    """Replaces attention for a test and records the arguments of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        self.calls.append(kwargs)
        return hidden_states.cos() * 0.7 + 0.2, None


def enumerate_forms(
    children: Children, module: nn.Module
) -> Iterator[tuple[Half, Half, str | None]]:
    """Yields every possible assignment of these child modules to the two halves of a layer."""
    numbers = [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and not name.startswith("_")
    ]
    for scale in (None, *numbers):
        for order in permutations(children.norms):
            for attention_norms, mlp_norms in _norm_orders(order):
                yield (
                    Half(attention_norms[0], children.attention, attention_norms[1]),
                    Half(mlp_norms[0], children.mlp, mlp_norms[1]),
                    scale,
                )


def _norm_orders(
    names: Sequence[str],
) -> Iterator[tuple[tuple[str | None, str | None], tuple[str | None, str | None]]]:
    """Yields the possible pairs (norm before, norm after) of both halves. The norms always keep the
    given order.
    """
    if len(names) == 4:
        yield (names[0], names[1]), (names[2], names[3])
    else:
        yield (names[0], None), (names[1], None)
        yield (None, names[0]), (None, names[1])


def recognise(module: nn.Module) -> LayerSettings | str:
    """Returns the settings with which `run_layer` computes the same output as this module. If no
    settings give the same output, returns a text with the reason.
    """
    children = find_children(module)
    if isinstance(children, str):
        return children
    forward = inspect.unwrap(type(module).forward)
    _, first_argument, *parameters = inspect.signature(forward).parameters.values()
    kinds = {p.kind for p in (first_argument, *parameters)}
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        return "its forward has arguments of other kinds"
    plain = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    names = tuple(p.name for p in plain if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
    defaults = tuple((p.name, p.default) for p in plain if p.default is not inspect.Parameter.empty)
    x = torch.linspace(-2.0, 3.0, 12, dtype=torch.float64).view(1, 2, 6)
    for mlp_returns_tuple in (False, True):
        stub = _AttentionStub()
        stubs: dict[str, nn.Module] = {
            name: ProbeLayer(0.1 + 0.2 * i) for i, name in enumerate(children.norms)
        }
        probe = make_probe_copy(
            module,
            {
                **stubs,
                children.attention: stub,
                children.mlp: ProbeLayer(0.55, returns_tuple=mlp_returns_tuple),
            },
            {},
        )
        # the class's forward must pass its arguments to attention under the same names
        arguments: dict[str, Any] = {name: object() for name in names} | {
            name: p for name, p in defaults if name in CACHES
        }
        try:
            with torch.no_grad():
                forward(probe, x, **arguments)
        except Exception:
            # the forward unpacks the MLP's output, or it does not run on a probe
            continue
        if stub.calls[0] != arguments:
            continue
        original_forward = partial(forward, probe, x, **arguments)
        for attention, mlp, scale in enumerate_forms(children, module):
            settings = LayerSettings(attention, mlp, scale, mlp_returns_tuple, names, defaults)
            if computes_same_in_train_and_eval(
                probe, original_forward, partial(run_layer, probe, settings, {}, x), x
            ):
                return settings
    return (
        "for random inputs, its output differs from x + attention(x), then x + mlp(x), with norms"
        " before, after or around both"
    )


def place_layer(path: str, module: nn.Module) -> Placement:
    """Installs `layer_forward` on a decoder layer, if it computes the same output as the layer."""
    settings = replacement_blocker(module) or recognise(module)
    if not isinstance(settings, str):
        children = (*settings.attention.children, *settings.mlp.children)
        reasons = (
            f"{name}: {reason}"
            for name in children
            if (reason := foreign_kernel_reason(module.get_submodule(name)))
        )
        settings = next(reasons, settings)
    if not isinstance(settings, str) and settings.mlp.norm_before is None:
        return place_replacement(
            PART_NAME,
            path,
            module,
            layer_forward,
            "halves",
            settings_or_reason=settings,
            note="norms stand after attention and MLP: none reads a sum",
        )
    return place_replacement(
        PART_NAME, path, module, layer_forward, "add_rms_norm", settings_or_reason=settings
    )

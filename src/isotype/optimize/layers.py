"""Decoder layers of two halves, x + attention(x) and then x + mlp(x), known by their children and a
probe, whatever their names.

A norm stands before attention and MLP (Llama), after them (OLMo 2), or both (Gemma 2); what they
give may be multiplied by a number of the layer (Granite). Such a layer's two sums are ours: a norm
before a half hands its input's gradient on together with the residual's (`add_rms_norm`).
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
from .attention import implementation_of
from .forwards import CACHES, Half, LayerSettings, layer_forward, whole
from .instances import Rows, foreign, put_found, same_in_both_modes, stand_in, taken

PART = "layer"


@dataclass(frozen=True)
class Children:
    norms: tuple[str, ...]
    attention: str
    mlp: str


def children_of(module: nn.Module) -> Children | str:
    """The children of the form, or why they are not: a dropout that drops nothing does not count."""
    named = {
        n: c
        for n, c in module.named_children()
        if not isinstance(c, nn.Identity) and not (type(c) is nn.Dropout and c.p == 0.0)
    }
    every = [n for n, c in named.items() if norms.is_candidate(c)]
    attention = [n for n, c in named.items() if implementation_of(c) is not None]
    rest = [n for n in named if n not in every and n not in attention]
    if next(module.parameters(recurse=False), None) is not None:
        return "it has parameters of its own"
    if len(attention) != 1:
        return f"it has {len(attention)} attention layers, not one"
    if len(every) not in (2, 4):
        return (
            f"it has {len(every)} norm{'s' * (len(every) != 1)} of one vector of weights and no"
            " bias, not two or four"
        )
    if len(rest) != 1:
        return f"it has other children: {', '.join(rest) or 'no MLP'}"
    return Children(tuple(every), attention[0], rest[0])


def is_candidate(module: nn.Module) -> bool:
    """Whether the module is one of the layers that transformers can checkpoint, with an attention
    layer of its own.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer) and any(
        implementation_of(c) is not None for c in module.children()
    )


class _Attention(nn.Module):
    """Stands for the attention in the probe, and notes what each call was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
        self.calls.append(given)
        return hidden_states.cos() * 0.7 + 0.2, None


def forms(children: Children, module: nn.Module) -> Iterator[tuple[Half, Half, str | None]]:
    """Every way in which these children can be the form."""
    numbers = [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and not name.startswith("_")
    ]
    for scale in (None, *numbers):
        for found in permutations(children.norms):
            for one, two in _orders(found):
                yield (
                    Half(one[0], children.attention, one[1]),
                    Half(two[0], children.mlp, two[1]),
                    scale,
                )


def _orders(
    found: Sequence[str],
) -> Iterator[tuple[tuple[str | None, str | None], tuple[str | None, str | None]]]:
    """(before, after) of both halves for these norms in this order."""
    if len(found) == 4:
        yield (found[0], found[1]), (found[2], found[3])
    else:
        yield (found[0], None), (found[1], None)
        yield (None, found[0]), (None, found[1])


def recognise(module: nn.Module) -> LayerSettings | str:
    """The settings with which the form is this module, or why none are."""
    found = children_of(module)
    if isinstance(found, str):
        return found
    forward = inspect.unwrap(type(module).forward)
    _, first_argument, *parameters = inspect.signature(forward).parameters.values()
    kinds = {p.kind for p in (first_argument, *parameters)}
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        return "its forward has arguments of other kinds"
    plain = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    names = tuple(p.name for p in plain if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
    defaults = tuple((p.name, p.default) for p in plain if p.default is not inspect.Parameter.empty)
    x = torch.linspace(-2.0, 3.0, 12, dtype=torch.float64).view(1, 2, 6)
    for mlp_first in (False, True):
        stub = _Attention()
        stubs: dict[str, nn.Module] = {
            name: Rows(0.1 + 0.2 * i) for i, name in enumerate(found.norms)
        }
        twin = stand_in(
            module, {**stubs, found.attention: stub, found.mlp: Rows(0.55, first=mlp_first)}, {}
        )
        # the class's own forward hands on what it was given under the same names
        given: dict[str, Any] = {name: object() for name in names} | {
            name: p for name, p in defaults if name in CACHES
        }
        try:
            with torch.no_grad():
                forward(twin, x, **given)
        except Exception:
            # it takes apart what the MLP gives, or it does not run on a probe
            continue
        if stub.calls[0] != given:
            continue
        own = partial(forward, twin, x, **given)
        for attention, mlp, scale in forms(found, module):
            settings = LayerSettings(attention, mlp, scale, mlp_first, names, defaults)
            if same_in_both_modes(twin, own, partial(whole, twin, settings, {}, x), x):
                return settings
    return (
        "its output is not x + attention(x), then x + mlp(x) with norms before, after or around"
        " both, on a probe"
    )


def place(path: str, module: nn.Module) -> Placement:
    """Puts `layer_forward` on the module at this path of the model, where it gives the module's
    output.
    """
    found = taken(module) or recognise(module)
    if not isinstance(found, str):
        children = (*found.attention.children, *found.mlp.children)
        reasons = (
            f"{name}: {reason}"
            for name in children
            if (reason := foreign(module.get_submodule(name)))
        )
        found = next(reasons, found)
    if not isinstance(found, str) and found.mlp.before is None:
        return put_found(
            PART,
            path,
            module,
            found,
            layer_forward,
            "halves",
            "norms stand after attention and MLP: none reads a sum",
        )
    return put_found(PART, path, module, found, layer_forward, "add_rms_norm")

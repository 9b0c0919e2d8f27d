"""Recognises and replaces gated MLPs. These are modules whose forward computes
down(activation(gate(x)) * up(x)). The names of their layers do not matter. The layers `gate` and
`up` have H input features and I output features, and `down` has I input features and H output
features.
"""

from __future__ import annotations

from functools import partial
from itertools import permutations

import torch
from torch import nn

from ..instance_method import Placement, install_forward
from ..lora.attach import is_lora
from ..lora.mlp import mlp_fusion_blocker
from .forwards import ACTIVATIONS, GatedSettings, compute_gated, gated_forward
from .instances import (
    computes_same_in_train_and_eval,
    make_placement,
    make_probe_copy,
    replacement_blocker,
)

PART_NAME = "gated mlp"  # the value of `Placement.part`
_HIDDEN = 6  # sizes of a probe: hidden features and inner features
_INNER = 10


def linear_sizes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Maps the name of each child that is a linear layer to (in features, out features). This
    includes PEFT's layers and quantised layers.
    """
    return {
        name: (inner, outer)
        for name, child in module.named_children()
        if isinstance(inner := getattr(child, "in_features", None), int)
        and isinstance(outer := getattr(child, "out_features", None), int)
    }


def activation_names(module: nn.Module) -> list[str]:
    """Returns the names of the children and attributes that may be the activation. These are all
    that can be called and have no weights.
    """
    children = [
        name
        for name, child in module.named_children()
        if not list(child.parameters()) and name not in linear_sizes(module)
    ]
    return children + [
        name
        for name, v in vars(module).items()
        if callable(v) and not name.startswith("_") and name != "forward"
    ]


def is_candidate(module: nn.Module) -> bool:
    if (
        len(linear_sizes(module)) not in (2, 3)
        or not activation_names(module)
        or next(module.parameters(recurse=False), None) is not None
    ):
        return False
    return len({down for _, _, down in candidates(module)}) == 1


def candidates(module: nn.Module) -> list[tuple[str, str | None, str]]:
    """Lists the possible assignments (gate, up, down) of the linear layers, according to their
    sizes.
    """
    sizes = linear_sizes(module)
    if len(sizes) == 2:
        return [(a, None, b) for a, b in permutations(sizes, 2) if sizes[a][1] == 2 * sizes[b][0]]
    return [
        (a, b, c) for a, b, c in permutations(sizes, 3) if sizes[a] == sizes[b] == sizes[c][::-1]
    ]


def recognise(module: nn.Module) -> GatedSettings | str:
    """Returns the settings with which a gated op computes the same output as this module for a
    small test input. If no settings give the same output, returns a text with the reason.
    """
    x = torch.linspace(-2.0, 3.0, 2 * _HIDDEN, dtype=torch.float64).view(1, 2, _HIDDEN)
    for gate, up, down in candidates(module):
        generator = torch.Generator().manual_seed(0)
        probe_children: dict[str, nn.Module] = {
            gate: nn.Linear(_HIDDEN, _INNER),
            down: nn.Linear(_INNER, _HIDDEN),
        }
        if up is None:
            probe_children[gate] = nn.Linear(_HIDDEN, 2 * _INNER)
        else:
            probe_children[up] = nn.Linear(_HIDDEN, _INNER)
        for layer in probe_children.values():
            layer.to(torch.float64)
            for p in layer.parameters():
                p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        probe = make_probe_copy(module, probe_children, {})
        for activation in activation_names(module):
            for op in ACTIVATIONS:
                settings = GatedSettings(
                    gate, up, down, activation, op, getattr(module, activation)
                )
                if computes_same_in_train_and_eval(
                    probe,
                    partial(type(module).forward, probe, x),
                    partial(compute_gated, probe, x, settings),
                    x,
                ):
                    return settings
    return "for random inputs, its output differs from that of a gated product"


def place_gated_mlp(path: str, module: nn.Module) -> Placement:
    """Replaces the forward of a gated MLP by the op, if it computes the same output as the module."""
    settings = replacement_blocker(module) or recognise(module)
    if isinstance(settings, str):
        return make_placement(PART_NAME, path, module, None, settings)
    install_forward(module, gated_forward, settings)
    layers = [
        getattr(module, name)
        for name in (settings.gate, settings.up, settings.down)
        if name is not None
    ]
    reason = mlp_fusion_blocker(layers)
    if reason is None:
        return make_placement(PART_NAME, path, module, "lora_mlp", settings.op)
    notes = ["gate and up from one layer"] if settings.up is None else []
    if any(map(is_lora, layers)):
        notes.append(f"not with its LoRA layers in one function: {reason}")
    return make_placement(PART_NAME, path, module, settings.op, "; ".join(notes))

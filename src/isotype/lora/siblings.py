"""Layers with the same input: the first computes all of them, and the others return its results if they are given the same tensor.

No attention or MLP class is changed, and the result is always correct: a sibling that is given another tensor, is in another mode, or whose
weights have changed since, computes its own result.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.autocast import autocast_dtype

# Children of one module that transformers' and diffusers' families call with one tensor, the first of them first.
GROUPS = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"),
    ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"),
)  # fmt: skip
CROSS_GROUPS = (("k_proj", "v_proj"), ("to_k", "to_v"), ("add_k_proj", "add_v_proj"))
"""The same of cross-attention, whose Q reads another tensor."""
_CROSS = re.compile("cross|^encoder_attn|^encoder_decoder", re.IGNORECASE)
"""How families name a layer's cross-attention, which is often of the self-attention's own class."""

_FOLLOWERS, _READY = "_isotype_followers", "_isotype_ready"


def link(parent: nn.Module, path: str, is_member: Any) -> None:
    """Records in the first layer of a group which siblings follow it, where every one is a member.

    path  of `parent` in the model. With LoRA dropout a product that is shared in vain draws masks that PEFT's layers do not draw
    """
    crosses = getattr(parent, "is_cross_attention", False) or _CROSS.search(path.rpartition(".")[2])
    for names in CROSS_GROUPS if crosses else GROUPS:
        layers: list[Any] = [getattr(parent, name, None) for name in names]
        if all(layer is not None and is_member(layer) for layer in layers) and len({layer.in_features for layer in layers}) == 1:
            # past nn.Module's own __setattr__; in a tuple they are no children of the first
            vars(layers[0])[_FOLLOWERS] = tuple(layers[1:])


def unlink(layer: nn.Module) -> None:
    vars(layer).pop(_FOLLOWERS, None)
    vars(layer).pop(_READY, None)


def followers(layer: nn.Module) -> tuple[Any, ...]:
    # past nn.Module's own lookup, which raises where there are none
    found: tuple[Any, ...] = layer.__dict__.get(_FOLLOWERS, ())
    return found


class _Ready:
    """An output that is stored for a sibling; it is not part of a copy or a pickle of the model."""

    def __init__(self, x: Tensor, y: Tensor, moment: tuple[Any, ...]) -> None:
        self.x, self.y, self.moment = x, y, moment

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _taken(layer: Any) -> _Ready | None:
    """What was left for this layer, which is then forgotten."""
    found: _Ready | None
    if torch.compiler.is_compiling():
        # what was left within the graph is known to Dynamo by the attribute
        found = getattr(layer, _READY, None)
        if found is not None:
            delattr(layer, _READY)
    else:
        found = layer.__dict__.pop(_READY, None)
    return found


def leave(layer: Any, x: Tensor, y: Tensor, tensors: tuple[Tensor | None, ...]) -> None:
    """Stores `y` for the sibling's own call."""
    ready = _Ready(x, y, _moment(x, tensors))
    if torch.compiler.is_compiling():
        setattr(layer, _READY, ready)
    else:
        # past nn.Module's own __setattr__ and __delattr__, which take 2 us each
        layer.__dict__[_READY] = ready


def forget(layer: Any) -> None:
    """Drops stored outputs that were never used."""
    _taken(layer)


def take(layer: Any, x: Tensor, tensors: tuple[Tensor | None, ...]) -> Tensor | None:
    """Returns and removes the output that was stored for this call, or None."""
    ready = _taken(layer)
    if ready is None:
        return None
    return ready.y if ready.x is x and ready.moment == _moment(x, tensors) else None


def _moment(x: Tensor, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Everything besides x's identity that a result depends on."""
    mode = torch.is_grad_enabled(), autocast_dtype(x)
    if torch.compiler.is_compiling():
        # within one graph nothing changes in between, and versions cannot be asked for
        return mode
    try:
        versions = [0 if t is None else t._version for t in (x, *tensors)]
    except RuntimeError:
        # an inference tensor counts no versions and cannot be written outside inference mode
        versions = [0 if t is None or t.is_inference() else t._version for t in (x, *tensors)]
    return (*mode, *versions, *map(id, tensors))

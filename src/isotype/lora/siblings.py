"""Layers with the same input: the first computes all of them, and the others return its results if they are given the same tensor.

No attention or MLP class is changed. A sibling that is given another tensor, is in another mode, or whose weights have changed since,
computes its own result. Some writes are counted by no tensor (`.data`, NumPy, inference mode), so that results are left only where nobody's
code but the model's runs between the calls: one run of the attention's or MLP's own forward, or of a function of its library, calls all of
them, that forward has no such writes, and no hook waits between.
"""

from __future__ import annotations

import re
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..calling_frame import calling_frame, code_of, forward_above
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

_GROUP, _READY = "_isotype_group", "_isotype_ready"
# libraries whose attention may be computed beside its class, as by a processor of diffusers
_LIBRARIES = frozenset(("transformers", "diffusers"))
# what writes to a tensor in ways that it does not count
_UNCOUNTED = frozenset(("data", "numpy", "__array__", "inference_mode", "untyped_storage", "storage", "data_ptr", "set_", "from_numpy"))


class Group(NamedTuple):
    """What the first layer of a group knows of the others.

    parent  the class of the module whose children they are
    hooks   dictionaries of the hooks that run between the calls of the first and the last
    """

    followers: tuple[Any, ...]
    parent: Any
    hooks: tuple[dict[int, Any], ...]


def link(parent: nn.Module, path: str, is_member: Any) -> None:
    """Records in the first layer of a group which siblings follow it, where every one is a member.

    path  of `parent` in the model. With LoRA dropout a product that is shared in vain draws masks that PEFT's layers do not draw
    """
    crosses = getattr(parent, "is_cross_attention", False) or _CROSS.search(path.rpartition(".")[2])
    for names in CROSS_GROUPS if crosses else GROUPS:
        layers: list[Any] = [getattr(parent, name, None) for name in names]
        if all(layer is not None and is_member(layer) for layer in layers) and len({layer.in_features for layer in layers}) == 1:
            # past nn.Module's own __setattr__; in a tuple they are no children of the first
            vars(layers[0])[_GROUP] = Group(tuple(layers[1:]), type(parent), _hooks_between(parent, layers))


def _hooks_between(parent: nn.Module, layers: list[Any]) -> tuple[dict[int, Any], ...]:
    others = [child for child in parent.children() if all(child is not layer for layer in layers)]
    before = [module._forward_pre_hooks for module in (*layers[1:], *others)]
    return (*before, *(module._forward_hooks for module in (*layers[:-1], *others)))


def unlink(layer: nn.Module) -> None:
    vars(layer).pop(_GROUP, None)
    vars(layer).pop(_READY, None)


def group_of(layer: nn.Module) -> Group | None:
    # past nn.Module's own lookup, which raises where there is none
    found: Group | None = layer.__dict__.get(_GROUP)
    return found


def common_call(group: Group, x: Tensor) -> tuple[Any, ...] | None:
    """The run of the code that calls the layer whose forward asks by way of one function; None where it may not leave results."""
    if torch.compiler.is_compiling():
        return ()
    for hooks in group.hooks:
        if hooks and any(not getattr(hook, "observes", False) for hook in hooks.values()):
            return None
    frame = calling_frame(forward_above(2))
    if frame is None:
        return None
    code = frame.f_code
    if _is_a_librarys(frame.f_globals.get("__name__")) or (not x.is_inference() and any(code is own for own in _own_codes(group.parent))):
        return id(frame), code
    return None


@cache
def _is_a_librarys(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


@cache
def _own_codes(parent: Any) -> tuple[CodeType, ...]:
    """The code of this class's forward and of the comprehensions in it; none where it writes to tensors in uncounted ways."""
    code = code_of(parent)
    codes = () if code is None else (code, *(part for part in code.co_consts if isinstance(part, CodeType)))
    return () if any(_UNCOUNTED.intersection(part.co_names) for part in codes) else codes


class _Ready:
    """An output that is stored for a sibling; it is not part of a copy or a pickle of the model."""

    def __init__(self, x: Tensor, y: Tensor, moment: tuple[Any, ...], call: tuple[Any, ...]) -> None:
        self.x, self.y, self.moment, self.call = x, y, moment, call

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


def leave(layer: Any, x: Tensor, y: Tensor, tensors: tuple[Tensor | None, ...], call: tuple[Any, ...]) -> None:
    """Stores `y` for the sibling's own call.

    call  what `common_call` gave
    """
    ready = _Ready(x, y, _moment(x, tensors), call)
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
    if ready.x is not x or ready.moment != _moment(x, tensors):
        return None
    if torch.compiler.is_compiling():
        return ready.y
    frame = calling_frame(forward_above(1))
    return ready.y if frame is not None and (id(frame), frame.f_code) == ready.call else None


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

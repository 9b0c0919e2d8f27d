"""LayerNorm without weights that a picture's own scale and shift follow (adaptive LayerNorm), in diffusers' modules.

Two kinds of place: a module that computes scale, shift and more of the time's embedding and returns the modulated rows with the rest
(`AdaLayerNormZero` and its like), and a block that modulates a norm's output itself (`streams`). Either calls the norm through
`modulated`, so that whoever observes the norm sees a call of it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import modulated_layer_norm
from ..placement import Placement
from .instances import once_a_kind, placement, put, same_in_both_modes, settings_of, stand_in, taken

PART = "modulated norm"
_WIDTH = 6


@dataclass(frozen=True)
class LayerNormSettings:
    out_dtype: torch.dtype | None


@dataclass(frozen=True)
class AdaptiveSettings:
    """argument    the embedding's name in the forward; first: it is the first one after x
    chunks      of the linear layer's output
    scale, shift  which of them; the others are returned after the rows
    alone       the rows are returned without others
    twice       nine chunks: after the fourth of the others, the same rows come again with the seventh as shift and the eighth as scale
    """

    argument: str
    first: bool
    chunks: int
    scale: int
    shift: int
    alone: bool
    twice: bool


def is_plain_norm(module: Any) -> bool:
    """Whether it is PyTorch's own LayerNorm over the last dimension, without weights."""
    return type(module) is nn.LayerNorm and not module.elementwise_affine and len(module.normalized_shape) == 1


def is_candidate(module: nn.Module) -> bool:
    """Whether it is a norm of diffusers with its own linear layer for scale and shift."""
    layers = ("linear", "silu", "norm")
    return (
        type(module).__module__.startswith("diffusers.")
        and "Norm" in type(module).__name__
        and all(isinstance(getattr(module, name, None), nn.Module) for name in layers)
        and getattr(module, "emb", None) is None
        and is_plain_norm(module.norm)
    )


def layer_norm_forward(self: Any, x: Tensor, modulation: tuple[Tensor, Tensor] | None = None) -> Tensor:
    if modulation is None:
        own: Tensor = type(self).forward(self, x)
        return own
    s: LayerNormSettings = settings_of(self)
    return modulated_layer_norm(x, *modulation, self.eps, out_dtype=s.out_dtype)


def modulated(norm: Any, x: Tensor, scale_BH: Tensor, shift_BH: Tensor) -> Tensor:
    """norm(x) * (1 + scale) + shift, by the op where `place_norm` has put it and nothing else follows the norm."""
    if getattr(vars(norm).get("forward"), "__func__", None) is layer_norm_forward and x.dim() == 3 and not _changed_by_hooks(norm):
        made: Tensor = norm(x, modulation=(scale_BH, shift_BH))
        return made
    rows: Tensor = norm(x) * (1 + scale_BH[:, None]) + shift_BH[:, None]
    return rows


def _changed_by_hooks(norm: nn.Module) -> bool:
    """Whether a hook may change what the norm is given or gives: one that only narrows the output to the op's own dtype does not."""
    s: LayerNormSettings = settings_of(norm)
    before = (norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    if any(not getattr(hook, "observes", False) for hooks in before for hook in hooks.values()):
        return True
    after = [hook for hook in norm._forward_hooks.values() if not getattr(hook, "observes", False)]
    return any(getattr(hook, "narrows_to", None) is not s.out_dtype or s.out_dtype is None for hook in after)


def place_norm(path: str, norm: nn.Module, out_dtype: torch.dtype | None) -> Placement:
    """Lets a LayerNorm without weights run `modulated_layer_norm` where `modulated` calls it."""
    reason = taken(norm)
    if reason is None:
        put(norm, layer_norm_forward, LayerNormSettings(out_dtype))
    return placement(PART, path, norm, None if reason else "modulated_layer_norm", reason or "")


@once_a_kind
def recognise(module: Any) -> AdaptiveSettings | None:
    """The settings with which `adaptive_forward` gives this module's output on a probe; None where none do."""
    width = module.norm.normalized_shape[0]
    outer = getattr(module.linear, "out_features", 0)
    if outer % width:
        return None
    chunks, generator = outer // width, torch.Generator().manual_seed(0)
    linear = nn.Linear(_WIDTH, chunks * _WIDTH, dtype=torch.float64)
    for p in linear.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    tiny = {"linear": linear, "norm": nn.LayerNorm(_WIDTH, eps=module.norm.eps, elementwise_affine=False)}
    twin = stand_in(module, tiny, {})
    x = torch.randn(2, 3, _WIDTH, generator=generator, dtype=torch.float64) * 1e-2
    emb = torch.randn(2, _WIDTH, generator=generator, dtype=torch.float64)
    names = list(inspect.signature(type(module).forward).parameters)[2:]
    argument = next((name for name in ("emb", "conditioning_embedding") if name in names), None)
    if argument is None:
        return None
    for scale, shift in ((1, 0), (0, 1)):
        for alone, twice in ((False, False), (True, False), (False, chunks == 9)):
            s = AdaptiveSettings(argument, names[0] == argument, chunks, scale, shift, alone, twice)
            if same_in_both_modes(twin, partial(_flat_own, module, twin, x, {argument: emb}), partial(_flat_form, twin, s, x, emb), x, emb):
                return s
    return None


def _flat_own(module: Any, twin: nn.Module, x: Tensor, given: dict[str, Tensor]) -> Tensor:
    return _flat(type(module).forward(twin, x, **given))


def _flat_form(twin: nn.Module, s: AdaptiveSettings, x: Tensor, emb: Tensor) -> Tensor:
    return _flat(compute(twin, s, x, emb))


def _flat(made: Any) -> Tensor:
    """The outputs in one row, their number first: 0 for a tensor that is in no tuple."""
    many = made if isinstance(made, tuple) else (made,)
    return torch.cat([torch.tensor([float(len(many) if many is made else 0)]), *(t.flatten() for t in many)])


def compute(module: Any, s: AdaptiveSettings, x: Tensor, emb: Tensor) -> Any:
    parts = module.linear(module.silu(emb).to(x.dtype)).chunk(s.chunks, dim=1)
    rows = modulated(module.norm, x, parts[s.scale], parts[s.shift])
    if s.twice:
        return rows, *parts[2:6], modulated(module.norm, x, parts[7], parts[6]), parts[8]
    return rows if s.alone else (rows, *(part for i, part in enumerate(parts) if i not in (s.scale, s.shift)))


def adaptive_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The form; the class's forward for a call with other arguments than the embedding."""
    s: AdaptiveSettings = settings_of(self)
    emb = args[0] if s.first and len(args) == 1 and not kwargs else kwargs.get(s.argument)
    if not isinstance(emb, Tensor) or len(args) + len(kwargs) > 1:
        return type(self).forward(self, x, *args, **kwargs)
    return compute(self, s, x, emb)


def place(path: str, module: Any, out_dtype: torch.dtype | None) -> list[Placement]:
    """Puts the form on the module at this path of the model, and the op on its norm, where it gives the module's output."""
    reason = taken(module)
    if reason is None and (found := recognise(module)) is None:
        reason = "its output is not a LayerNorm's, scaled and shifted, on a probe"
    if reason is not None:
        return [placement(PART, path, module, None, reason)]
    put(module, adaptive_forward, found)
    return [placement(PART, path, module, "modulated_layer_norm"), place_norm(f"{path}.norm", module.norm, out_dtype)]

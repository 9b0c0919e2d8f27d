"""Rotary embedding: a function of the model's module, reached by rebuilding the instance's forward over private globals (`rebuilt`).

It is known by its form, `f(q, k, cos, sin, ...)`, whatever its name, and then by a probe. One that is only named like a rotation is left
alone, with a line in the manifest.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import rope
from ..placement import Placement
from .forwards import narrow, replacement
from .instances import KERNEL_LIBRARIES, Replacement, library_of, placement, same, taken, why_not_rebuilt

PART = "rotary"


@dataclass(frozen=True, slots=True)
class Tables:
    """The form of a model's tables of cos and sin, which are twice as wide as the pairs.

    repeated  whether each value stands twice in a row (True), or the whole run twice (False); None where it is unknown
    reason    why it is unknown
    """

    repeated: bool | None
    reason: str = ""


# (original function, tables that repeat each value) -> whether it rotates interleaved pairs; None: `rope` does not compute it
_known: dict[tuple[Any, bool], bool | None] = {}


def rotary_name(module: nn.Module) -> str | None:
    """The global name under which the module's forward calls a rotation, or something named like one; the first has precedence."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return None
    called = [n for n in forward.__code__.co_names if isinstance(forward.__globals__.get(n), FunctionType)]
    formed = [n for n in called if has_the_form(forward.__globals__[n])]
    return next(iter(formed or [n for n in called if "rotary" in n or "rope" in n.split("_")]), None)


def has_the_form(function: Callable[..., Any]) -> bool:
    """Whether it is `f(q, k, cos, sin, ...)`: two tensors, then the tables."""
    names = list(inspect.signature(function).parameters)
    return len(names) >= 4 and names[2:4] == ["cos", "sin"]


def is_candidate(module: nn.Module) -> bool:
    return rotary_name(module) is not None


def tables(positions: int, pairs: int, repeated: bool) -> tuple[Tensor, Tensor]:
    """cos and sin as wide as transformers makes them: the angles twice, or each of them repeated."""
    angle = torch.arange(positions, dtype=torch.float64)[:, None] / (1.0 + torch.arange(pairs, dtype=torch.float64))
    angle = (angle.repeat_interleave(2, -1) if repeated else torch.cat((angle, angle), -1))[None]
    return angle.cos(), angle.sin()


def recognise(original: Callable[..., Any], tables_repeat: bool) -> bool | None:
    """The `interleaved` with which `rope` gives this function's output on tables of the model's own form; None where neither does."""
    size, generator = 8, torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 5, size, generator=generator, dtype=torch.float64)
    k = torch.randn(2, 1, 5, size, generator=generator, dtype=torch.float64)
    for interleaved in (False, True):

        def both(pairs: int, interleaved: bool = interleaved) -> bool:
            cos, sin = tables(5, pairs, tables_repeat)
            return same(
                lambda: torch.cat(original(q, k, cos, sin), 1),
                lambda: torch.cat(rope(q, k, narrow(cos, tables_repeat), narrow(sin, tables_repeat), interleaved=interleaved), 1),
                q,
                k,
            )

        # the whole head is enough for a function without partial rotation; a half must agree where it runs at all
        if both(size // 2) and (both(size // 4) or not _runs(original, q, k, size // 4, tables_repeat)):
            return interleaved
    return None


def _runs(original: Callable[..., Any], q: Tensor, k: Tensor, pairs: int, repeated: bool) -> bool:
    try:
        original(q, k, *tables(q.shape[2], pairs, repeated))
    except Exception:
        return False
    return True


def tables_of(model: nn.Module) -> Tables:
    """The form of the tables that the model's own rotary module makes."""
    for module in model.modules():
        buffers = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        if not buffers or isinstance(module, nn.ModuleList):
            continue
        module = with_values(module)
        x = torch.zeros(1, 3, 1, device=getattr(module, buffers[0]).device)
        ids = torch.arange(1, 4, device=x.device)[None]
        layer_types = list(getattr(getattr(module, "config", None), "layer_types", None) or [])
        for extra in ((), *((kind,) for kind in dict.fromkeys(layer_types))):
            try:
                with torch.no_grad():
                    cos, _ = type(module).forward(module, x, ids, *extra)
            except Exception:
                continue
            if cos.dim() != 3:
                return Tables(None, "its tables are not [B S D]")
            # a single pair, or equal neighbours, would fit both kinds: the angles differ from one pair to the next
            half = cos.shape[-1] // 2
            if torch.equal(cos[..., :half], cos[..., half:]):
                return Tables(False)
            if torch.equal(cos[..., ::2], cos[..., 1::2]):
                return Tables(True)
            return Tables(None, "its tables repeat in no known way")
    return Tables(None, "no module with inv_freq was found to make the tables")


def with_values(module: nn.Module) -> nn.Module:
    """The module itself, or a copy whose buffers have values, where those of a model outlined on the meta device have none."""
    if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
        return module
    filled = copy.copy(module)
    # angles that differ from pair to pair, as every model's do: the form of the tables is asked for, not their values
    filled._buffers = {
        name: buffer
        if buffer is None or not buffer.is_meta
        else (1.0 / torch.arange(1, buffer.numel() + 1)).view(buffer.shape).to(buffer.dtype)
        for name, buffer in module._buffers.items()
    }
    return filled


def place(path: str, module: nn.Module, made: Tables, replacements: list[Replacement]) -> Placement:
    """Adds a replacement of the rotary function to those with which the module's forward will be rebuilt."""
    called, forward = rotary_name(module), type(module).forward
    assert called is not None
    original = inspect.unwrap(forward).__globals__[called]
    reason = taken(module) or why_not(called, original) or why_not_rebuilt(forward)
    if reason is not None:
        return placement(PART, path, module, None, reason)
    if made.repeated is None:
        return placement(PART, path, module, None, made.reason)
    key = original, made.repeated
    if key not in _known:
        _known[key] = recognise(original, made.repeated)
    interleaved = _known[key]
    if interleaved is None:
        return placement(PART, path, module, None, "its output is not a rotation's on a probe")
    replacements.append(Replacement(called, replacement, (interleaved, made.repeated)))
    return placement(PART, path, module, "rope", "interleaved pairs" if interleaved else "")


def why_not(called: str, original: Callable[..., Any]) -> str | None:
    """Why the function that is called by this name is not probed, or None."""
    if library_of(original) in KERNEL_LIBRARIES:
        return f"{called} was already replaced by {library_of(original)}"
    if not has_the_form(original):
        return f"{called}({', '.join(inspect.signature(original).parameters)}) is not of the form (q, k, cos, sin)"
    return None

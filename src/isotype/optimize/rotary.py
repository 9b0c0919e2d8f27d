"""Replaces the rotary embedding, which is a function in the file of the model. The forward of an
attention layer calls this function. The forward is replaced by a copy that calls the op instead
(`rebuild_forward`).

The function is recognised by its signature `f(q, k, cos, sin, ...)` and by its output for a small
test input. A function that has the name of a rotary embedding but another signature is not
replaced. The manifest, which lists the replaced functions of a model, then gives the reason.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..instance_method import Placement
from .forwards import Pairs, TableForm, rotate, wrap_rotary
from .instances import (
    KERNEL_LIBRARIES,
    Replacement,
    computes_same,
    library_name,
    make_placement,
    rebuild_blocker,
    replacement_blocker,
)

PART_NAME = "rotary"  # the value of `Placement.part`


@dataclass(frozen=True, slots=True)
class Tables:
    """The layout of a model's tables of cos and sin.

    form    how a row repeats the angles a, b of two pairs: `runs` (a b a b), `values` (a a b b) or
            `once` (a b); None if it is unknown
    reason  why the layout is unknown
    """

    form: TableForm | None
    reason: str = ""


def rotary_name(module: nn.Module) -> str | None:
    """Returns the name of the global function with which the module's forward rotates query and
    key. This is a function with the signature of a rotary embedding. If there is none, it is a
    function with the name of a rotary embedding.
    """
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return None
    called_names = [
        name
        for name in forward.__code__.co_names
        if isinstance(forward.__globals__.get(name), FunctionType)
    ]
    rotary_names = [
        name for name in called_names if has_rotary_signature(forward.__globals__[name])
    ]
    return next(
        iter(
            rotary_names
            or [name for name in called_names if "rotary" in name or "rope" in name.split("_")]
        ),
        None,
    )


def has_rotary_signature(function: Callable[..., Any]) -> bool:
    """Whether the signature of the function is `f(q, k, cos, sin, ...)`, where cos and sin are the
    tables.
    """
    names = list(inspect.signature(function).parameters)
    return len(names) >= 4 and names[2:4] == ["cos", "sin"]


def make_tables(positions: int, pairs: int, form: TableForm) -> tuple[Tensor, Tensor]:
    """Creates tables of cos and sin in one of the layouts that transformers uses."""
    angle = torch.arange(positions, dtype=torch.float64)[:, None] / (
        1.0 + torch.arange(pairs, dtype=torch.float64)
    )
    if form != "once":
        if form == "values":
            angle = angle.repeat_interleave(2, -1)
        else:
            angle = torch.cat((angle, angle), -1)
    return angle[None].cos(), angle[None].sin()


@cache
def recognise(original: Callable[..., Any], form: TableForm) -> Pairs | None:
    """Finds out which pairs of dimensions this function rotates. Returns the value of `Pairs` with
    which `rope` computes the same output for tables with the model's layout, or None if there is no
    such value.
    """
    size = 8
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 5, size, generator=generator, dtype=torch.float64)
    k = torch.randn(2, 1, 5, size, generator=generator, dtype=torch.float64)
    for pairs in get_args(Pairs):

        def outputs_agree(count: int, pairs: Pairs = pairs) -> bool:
            cos, sin = make_tables(5, count, form)
            return computes_same(
                lambda: torch.cat(original(q, k, cos, sin), 1),
                lambda: torch.cat(rotate(q, k, cos, sin, pairs, form), 1),
                q,
                k,
            )

        # the whole head must agree; a rotation of half the head must agree too if the function
        # supports partial rotation
        if outputs_agree(size // 2) and (
            outputs_agree(size // 4) or not _runs(original, q, k, size // 4, form)
        ):
            result: Pairs = pairs
            return result
    return None


def _runs(original: Callable[..., Any], q: Tensor, k: Tensor, pairs: int, form: TableForm) -> bool:
    try:
        original(q, k, *make_tables(q.shape[2], pairs, form))
    except Exception:
        return False
    return True


def detect_tables(model: nn.Module) -> Tables:
    """Detects the layout of the tables that the model's rotary module computes."""
    for module in model.modules():
        buffers = [
            name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")
        ]
        if not buffers or isinstance(module, nn.ModuleList):
            continue
        module = fill_meta_buffers(module)
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
            # A table of a single pair, or of pairs with equal angles, would pass both tests. The
            # angles of real models differ from one pair to the next.
            half = cos.shape[-1] // 2
            if torch.equal(cos[..., :half], cos[..., half:]):
                return Tables("runs")
            if torch.equal(cos[..., ::2], cos[..., 1::2]):
                return Tables("values")
            if cos.shape[-1] == getattr(module, buffers[0]).numel():
                return Tables("once")
            return Tables(None, "its tables repeat in no known way")
    return Tables(None, "no module with inv_freq was found to make the tables")


def fill_meta_buffers(module: nn.Module) -> nn.Module:
    """Returns the module. If its buffers are on the meta device, returns a copy of the module whose
    buffers have values.
    """
    if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
        return module
    filled = copy.copy(module)
    # angles that differ from pair to pair, as in every model; only the form of the tables is
    # needed, not their values
    filled._buffers = {
        name: (
            buffer
            if buffer is None or not buffer.is_meta
            else (1.0 / torch.arange(1, buffer.numel() + 1)).view(buffer.shape).to(buffer.dtype)
        )
        for name, buffer in module._buffers.items()
    }
    return filled


def place_rotary(
    path: str, module: nn.Module, tables: Tables, replacements: list[Replacement]
) -> Placement:
    """Adds the new rotary function to `replacements`. The caller then creates a copy of the
    module's forward that calls the functions in `replacements`.
    """
    function_name = rotary_name(module)
    forward = type(module).forward
    assert function_name is not None
    original = inspect.unwrap(forward).__globals__[function_name]
    reason = (
        replacement_blocker(module)
        or rotary_blocker(function_name, original)
        or rebuild_blocker(forward)
        or tables.reason
    )
    pairs = None if reason or tables.form is None else recognise(original, tables.form)
    if pairs is None:
        return make_placement(
            PART_NAME,
            path,
            module,
            None,
            reason or "for random inputs, its output differs from that of a rotation",
        )
    replacements.append(Replacement(function_name, wrap_rotary, (pairs, tables.form)))
    note_by_pairs = {
        "halves": "",
        "neighbours": "interleaved pairs",
        "neighbours to halves": "interleaved pairs, turned into halves",
    }
    return make_placement(PART_NAME, path, module, "rope", note_by_pairs[pairs])


def rotary_blocker(function_name: str, original: Callable[..., Any]) -> str | None:
    """Returns the reason why the function with this name cannot be replaced, or None if it may be."""
    if library_name(original) in KERNEL_LIBRARIES:
        return f"{function_name} was already replaced by {library_name(original)}"
    if not has_rotary_signature(original):
        return (
            f"{function_name}({', '.join(inspect.signature(original).parameters)}) does not take (q, k,"
            " cos, sin)"
        )
    return None

"""Recognises by its values a table that was rounded before it was looked at, as in a model's first forward, which is not observed.

Rounded values end in zero bits, and so do whole numbers and their multiples by powers of two, which are exact. The smallest of such
multiples are simple (1, 2, 3 steps), and the smallest of rounded values are not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...libraries import of_a_library
from .attributes import kept_in_attributes
from .function_caches import cached_tables

# a dtype's bits after the first, and the dtypes narrower than that of a computation
_BITS = {"bf16": 7, "fp16": 10}
_NARROWER = {"fp32": ("bf16", "fp16"), "bf16": ("fp16",), "fp16": ("bf16",)}
_VALUES, _SAMPLE, _SMALLEST = 16, 4096, 8


def rounded_tables(model: nn.Module, compute: str) -> Iterator[tuple[str, str]]:
    """Each fp32 table of a model's own code whose values are a narrower dtype's: its name, and that dtype.

    A tensor of a weight's size may be a copy of it, and a weight may come from a file of a narrower dtype.
    """
    sizes = {parameter.numel() for parameter in model.parameters()}
    for full, table in _tables(model):
        if table.numel() not in sizes and (dtype := rounded_to(table, compute)) is not None:
            yield full, dtype


def rounded_to(table: Tensor, compute: str) -> str | None:
    """The dtype, narrower than `compute`, to which all values of this fp32 tensor were rounded, or None."""
    if table.dtype != torch.float32 or table.requires_grad or table.numel() < _VALUES or table.device.type == "meta":
        return None
    values = torch.cat((_first(table.detach()), _first(table.detach(), last=True))).abs()
    values = values[values.isfinite() & (values > 0)].unique()
    if values.numel() < _VALUES or values.diff().unique().numel() == 1:
        return None
    fractions = values.view(torch.int32) & 0x7FFFFF
    for dtype in _NARROWER.get(compute, ()):
        left = 23 - _BITS[dtype]
        if not bool((fractions & ((1 << left) - 1)).any()):
            # multiples of a step up to 63 times it have no more than five bits after the first
            last = fractions[:_SMALLEST] & ((1 << (left + 2)) - 1)
            return dtype if bool(last.any()) else None
    return None


def _first(table: Tensor, *, last: bool = False) -> Tensor:
    """The first rows of a table, or the last, without a copy of the rest."""
    while table.dim() > 1 and table.numel() > _SAMPLE:
        kept = table.shape[0] * _SAMPLE // table.numel()
        table = (table[-kept:] if last else table[:kept]) if kept > 1 else table[-1 if last else 0]
    return table.reshape(-1)[-_SAMPLE if last else 0 :][:_SAMPLE]


def _tables(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What modules of a model's own code keep in attributes, in buffers that no file has and in their methods' caches."""
    for path, module in model.named_modules():
        if of_a_library(type(module)):
            continue
        buffers = ((name, module._buffers.get(name)) for name in module._non_persistent_buffers_set)
        for name, table in (*kept_in_attributes(module), *buffers):
            if table is not None:
                yield f"{path}.{name}".lstrip("."), table
        for table in cached_tables(nn.ModuleList([module])):
            yield f"{path or type(module).__name__}, in a cache of {type(module).__name__}", table

"""Recognises by its values a tensor that holds fewer bits than `compute` has, whatever arithmetic put it there.

Rounding needs no cast and no rounding operator: comparisons can be counted, a product subtracted from itself (Veltkamp's split), a sign
multiplied by a mean. What is common to all of them is the result, so that a sample of it is looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .lineage import readable

# bits of the fraction that a value may use at most for a finding, where `compute` has 23, 10 and 7
_FEW = {"fp32": 15, "fp16": 6, "bf16": 4}
_STORED = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
_STEPS = {"fp32": 1024, "fp16": 256, "bf16": 32}
# fewer elements, or fewer different values, say nothing; a few values are a mask or a choice
_ELEMENTS, _SAMPLE, _LEVELS = 256, 2048, 8


def few_bits(tensor: Tensor, compute: str) -> str | None:
    """How the values of a floating tensor are coarser than `compute`, or None. Whole numbers are counts, and not coarse.

    At least 256 elements are needed; of a larger tensor the first 2,048 are looked at.
    """
    values = readable(tensor)
    if values is None or values.dtype not in _STORED or compute not in _FEW or values.numel() < _ELEMENTS:
        return None
    levels = _sample(values).float()
    levels = levels[levels.isfinite()].unique()
    if levels.numel() <= _LEVELS:
        # a mask has values of one sign, and a sign that multiplies something else is 1
        both_signs = levels.numel() > 1 and bool(levels[0] < 0) and bool(levels[-1] > 0)
        return f"{levels.numel()} different values" if both_signs and float(levels.abs().amax()) != 1 else None
    if bool((levels == levels.round()).all()):
        return None
    few = _FEW[compute]
    if not bool((levels.view(torch.int32) & ((1 << (23 - few)) - 1)).any()):
        return f"no value uses more than {few + 1} bits"
    steps = _steps(levels, _STORED[values.dtype])
    return f"values are multiples of one number, {steps} steps apart" if steps and steps <= _STEPS[compute] else None


def few_signed_levels(tensor: Tensor, compute: str) -> str | None:
    """The same for weights, of which only a handful of values of both signs counts: tables of whole steps are common initial values."""
    found = few_bits(tensor, compute)
    return found if found is not None and found.endswith("different values") else None


def _sample(tensor: Tensor) -> Tensor:
    part = tensor.detach()
    while part.dim() > 1 and part.numel() > _SAMPLE:
        kept = part.shape[0] * _SAMPLE // part.numel()
        part = part[:kept] if kept > 1 else part[0]
    return part.reshape(-1)[:_SAMPLE]


def _steps(levels: Tensor, stored_bits: int) -> int | None:
    """The number of steps between the first and the last of these sorted values if all lie on a grid much wider than their dtype's own."""
    smallest = float(levels.diff().amin())
    last_bit = float(torch.frexp(levels.abs().amax()).exponent) - 1 - stored_bits
    own_step = 2.0**last_bit
    if smallest < 4 * own_step or (levels.numel() <= 2 * _LEVELS and stored_bits < 23):
        return None
    span = float(levels[-1] - levels[0])
    steps = round(span / smallest)
    at = (levels - levels[0]).double() * (steps / span)
    tolerance = 0.02 + own_step / smallest
    return steps if bool(((at - at.round()).abs() <= tolerance).all()) else None

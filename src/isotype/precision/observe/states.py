"""The dtypes of an optimizer's states, for the role `optimizer`: the moments, and the scales of 8-bit moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...dtypes import name

# below so many elements bitsandbytes keeps a state in fp32 (`min_8bit_size` of its optimizers)
SMALLEST_8BIT = 4096
SCALES = "scales and code tables of 8-bit states"
COUNTS = "step counts of the optimizer, which no precision declares"
COUNT = "step"  # torch's and bitsandbytes' key of a step count
_EIGHT_BITS = (torch.uint8, torch.int8)


def states_of(parameter: Tensor, state: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(key, word) for each tensor of a state; the word is None for its step count and for a part of an 8-bit state, as its scales.

    A block-wise 8-bit state is int8, whatever integers hold it.
    """
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    quantised = any(t.dtype in _EIGHT_BITS for key, t in tensors.items() if key != COUNT)
    for key, tensor in tensors.items():
        if key == COUNT:
            yield key, None
        elif tensor.dtype in _EIGHT_BITS:
            yield key, "int8"
        elif quantised and tensor.shape != parameter.shape:
            yield key, None
        else:
            yield key, name(tensor.dtype)


def allowed_beside(declared: str, parameter: Tensor) -> tuple[str, ...]:
    """Words that a state may have besides the declared one."""
    return ("fp32",) if declared == "int8" and parameter.numel() < SMALLEST_8BIT else ()

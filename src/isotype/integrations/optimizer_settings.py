"""Judges what a user's own callback sets of an optimizer's settings, such as the learning rate.

A setting is a number or a tensor. A tensor has a dtype. A number that was rounded to a narrow one has few bits; one of very few (0.125)
may be meant so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..dtypes import FLOATS, itemsize, name
from ..observe import Observation

# significant bits of a value of each dtype; a number of fewer than _MEANT may be meant so
_BITS = {"bf16": 8, "fp16": 11}
_MEANT = 6


class OptimizerSettings:
    """The settings of an optimizer before a callback."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self._before = dict(_settings(optimizer))

    def judge(self, seen: Observation, declared: str, by: str) -> None:
        """Adds to `seen` which settings `by` changed to values narrower than the optimizer's declared dtype."""
        for (group, key), (number, dtype) in _settings(self.optimizer):
            if self._before.get((group, key)) == (number, dtype):
                continue
            if dtype in FLOATS and itemsize(dtype) < itemsize(declared):
                seen.report(
                    "optimizer", f"{by} sets the optimizer's {key} in {dtype}", symbol=by, observed=dtype, declared=declared,
                    cause="its code computes it in that dtype", fix=f"compute it in {declared} there, or as a Python number",
                )  # fmt: skip
            elif (word := _rounded_to(number)) is not None and itemsize(word) < itemsize(declared):
                why = f"{number!r} has no more bits than {word}; what it passed through is not seen"
                seen.unobserved.setdefault(f"the optimizer's {key} that {by} sets", why)


def _settings(optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[tuple[int, str], tuple[float, str]]]:
    """((group, setting), (its value, the dtype of a tensor)); settings of several numbers, as betas, are as many settings."""
    for group, settings in enumerate(optimizer.param_groups if optimizer is not None else []):  # an evaluation without training has none
        for key, setting in settings.items():
            several = isinstance(setting, (tuple, list)) and key != "params"
            for at, value in enumerate(setting if several else [setting]):
                word = f"{key}[{at}]" if several else key
                if isinstance(value, float):
                    yield (group, word), (value, "")
                elif isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
                    yield (group, word), (float(value), name(value.dtype))


def _rounded_to(number: float) -> str | None:
    """The dtype narrower than fp32 to which this number was rounded, as its bits say, or None."""
    if not math.isfinite(number) or number.is_integer():
        return None
    fraction = int(math.frexp(abs(number))[0] * 2**53)
    bits = fraction.bit_length() - (fraction & -fraction).bit_length() + 1
    return next((word for word, most in _BITS.items() if _MEANT <= bits <= most), None)

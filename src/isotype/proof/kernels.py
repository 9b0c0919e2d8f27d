"""Checks every op on the card, forward and backward, in every dtype that the card supports."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..dtypes import to_torch
from ..environment.hardware import detect
from ..lora.kernel_cases import CASES as LORA_CASES
from ..ops.kernel_cases import CASES
from .card import supported_dtypes
from .parts import ResultRow, Scale


def check_ops(scale: Scale) -> Iterator[ResultRow]:
    """Yields a row with the result for each op and each dtype."""
    dtype_names = supported_dtypes(detect(scale.device))
    device = torch.device(scale.device)
    for name, case in {**CASES, **LORA_CASES}.items():
        for dtype_name in dtype_names:
            dtype = to_torch(dtype_name)
            if case.supports(device, dtype):
                result = case.check(device, dtype, is_tiny=scale.is_tiny)
                yield {"name": f"{name}, {dtype_name}", **result}

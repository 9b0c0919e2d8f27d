"""The matrix products of the head, each with its dtype decided by the caller, and with the widest result the device can give.

A CUDA product of bf16 or fp16 keeps its fp32 accumulator (`out_dtype`), which cuts the gradient error about tenfold; a CPU product has
no such output. A CPU product of fp16 runs in fp32: it is no slower without native fp16, and does not overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which operands meet, for a product declared as `dtype`."""
    return torch.float32 if dtype == torch.float16 and device.type != "cuda" else dtype


def result_dtype(operand: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a product's result."""
    return torch.float32 if device.type == "cuda" and operand in _HALF else operand


def gradient_scale(operand: torch.dtype) -> float:
    """What a softmax is multiplied by before it is narrowed to `operand`: in fp16 1/128k would be subnormal."""
    return 1024.0 if operand == torch.float16 else 1.0


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """`left @ right` into `out`, whose dtype is `result_dtype`'s."""
    if out.dtype == left.dtype:
        # every operand and the result have the one dtype decided by the caller, and autocast is off
        return torch.mm(left, right, out=out)
    return out.copy_(torch.mm(left, right, out_dtype=out.dtype))

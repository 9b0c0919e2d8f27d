"""The matrix products of the head, each with its dtype decided by the caller, and with the widest result the device can give.

A CUDA product of bf16 or fp16 keeps its fp32 accumulator (`out_dtype`), which cuts the gradient error about tenfold; a CPU product has
no such output, nor has bf16 on a GPU older than compute capability 8.0. A CPU product of fp16 runs in fp32: it is no slower without native
fp16, and does not overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...environment.planned import stands_for
from ..backend import keeps_fp32_sums

# Bytes of logits. On a CPU more rows only cost memory once a product is past 256 rows, and a new buffer's pages cost 0.3 ms a MiB; a head's
# gradient is summed once a chunk in V x H of fp32, which fewer chunks save.
# A GPU's product of N rows does 2 N H V operations on 2 H V bytes of weight and 4 N V of logits: 523 rows (256 MiB at V 128,256) are 416
# operations a byte at H 4096, past the ridge of an H200 (184 measured: 788 TFLOP/s over 4.3 TB/s) and an H100 (about 260). The head's own
# gradient is read and written in fp32, 8 H V bytes a chunk: N / 4 operations a byte, past the ridge from 1,046 rows on (512 MiB).
_BUDGET = {"cpu": 64 * 2**20}
_BUDGET_WITH_HEAD = {"cpu": 256 * 2**20}
_BUDGET_ELSEWHERE = 256 * 2**20
_BUDGET_WITH_HEAD_ELSEWHERE = 512 * 2**20
_MULTIPLE = 64


def budget(device: torch.device, head: bool) -> int:
    if head:
        return _BUDGET_WITH_HEAD.get(stands_for(device), _BUDGET_WITH_HEAD_ELSEWHERE)
    return _BUDGET.get(stands_for(device), _BUDGET_ELSEWHERE)


def extent(tokens_or_classes: int, other: int, itemsize: int, device: torch.device, head: bool) -> int:
    """How many of the first fit the budget beside all of the second, in equal parts; `head` where the head's gradient is wanted."""
    most = max(_MULTIPLE, budget(device, head) // max(1, other * itemsize))
    parts = max(1, -(-tokens_or_classes // most))
    equal = -(-tokens_or_classes // parts)
    return max(1, -(-equal // _MULTIPLE) * _MULTIPLE)


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which operands meet, for a product declared as `dtype`."""
    return torch.float32 if dtype == torch.float16 and stands_for(device) != "cuda" else dtype


def result_dtype(operand: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a product's result."""
    return torch.float32 if keeps_fp32_sums(operand, device) else operand


def gradient_factors(operand: torch.dtype, upstream: Tensor) -> tuple[Tensor, Tensor | None]:
    """(into, back): what a softmax is multiplied by before it is narrowed to `operand`, and its products after, where not by 1.

    The two make `upstream`. It goes in before the narrowing, so that the gradient is rounded as often as a plain product's; in fp16, where
    1/128k is subnormal, the softmax is narrowed 1024 times as large as it is instead, and its products, in fp32, take what is left.
    """
    if operand != torch.float16:
        return upstream, None
    return torch.full_like(upstream, 1024.0), upstream / 1024.0


def rows_of_logits(rows: int, classes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for logits or their gradient. On a GPU rows start at multiples of 64 values: cuBLAS's fast kernels want 16 bytes of alignment,
    and a vocabulary with a few added tokens (32,001) has it in no row but one of eight."""
    apart = -(-classes // 64) * 64 if stands_for(device) == "cuda" else classes
    return torch.empty(rows, apart, dtype=dtype, device=device)[:, :classes]


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """`left @ right` into `out`, whose dtype is `result_dtype`'s."""
    if out.dtype == left.dtype:
        # every operand and the result have the one dtype decided by the caller, and autocast is off
        return torch.mm(left, right, out=out)
    # straight into `out`: a result of its own would be as large as a chunk of logits, and be written and read once more
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product_(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """`total += left @ right` in the product's own epilogue: `total`, of `result_dtype`, is read and written once, and nothing else is."""
    if total.dtype == left.dtype:
        return torch.addmm(total, left, right, out=total)
    return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def product_over_classes(dlogits_NV: Tensor, weight_VH: Tensor, out_NH: Tensor) -> Tensor:
    """`dlogits @ weight` into `out`. On a CPU its transpose is made and turned over: 12% faster at 1024 x 32,000 x 2048 in bf16."""
    if stands_for(dlogits_NV.device) == "cpu" and out_NH.dtype == dlogits_NV.dtype:
        return out_NH.copy_(torch.mm(weight_VH.t(), dlogits_NV.t()).t())
    return product(dlogits_NV, weight_VH, out_NH)

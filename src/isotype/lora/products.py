"""The adapters' own products, one of whose dimensions is a rank: by the C++ kernels (`cpp`) where those run, else PyTorch's.

An adapter's gradient is summed and returned in fp32 though its operands are narrow. On a CPU PyTorch has no such product; without
the kernels it is made of two (bf16) or in blocks of rows (fp16), so that no activation is widened whole.

T tokens, M and N features, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..environment.planned import stands_for
from ..ops.autocast import wide
from ..ops.backend import keeps_fp32_sums
from . import cpp

# Elements of one block of rows once widened: 1 MiB in fp32, which a core's own cache holds; elsewhere 256 MiB, one block for most layers,
# since each is a launch.
BLOCK_ELEMENTS = 2**18
BLOCK_ELSEWHERE = 2**26

# Below this many elements the call overhead of a bf16 product dominates: 128 x (256 + 16) widened take 25 us, in two terms 46;
# 256 x (512 + 16) take 94 and 78.
SMALL_ELEMENTS = 2**16

# Up to this rank a kernel is no slower than PyTorch's product: 2048 x 768 at rank 64 0.52 and 0.53 ms, at 256 2.4 and 2.0.
SKINNY = 64


def row_blocks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices over `rows`, each of about BLOCK_ELEMENTS elements at `width` elements a row; one slice inside a compiled graph."""
    elements = BLOCK_ELEMENTS if stands_for(device) == "cpu" else BLOCK_ELSEWHERE
    step = rows if torch.compiler.is_compiling() else max(elements // max(width, 1), 16)
    # at least one step, so that an empty batch takes the same path
    return (slice(start, start + step) for start in range(0, max(rows, 1), max(step, 1)))


def product_fp32(left_TM: Tensor, right_TN: Tensor, scale: float = 1.0) -> Tensor:
    """scale * leftᵀ @ right, summed and returned in fp32 (fp64 for fp64): an adapter's gradient without a rounding to 8 bits.

    Relative error of bf16 operands (2048 tokens, rank 16): 1e-7 on a GPU, 4e-7 by the kernels, 2.5e-6 in two terms, 1.7e-3 for a
    bf16 result.

    left    F[T M]
    right   F[T N]   of left's dtype
    ->      fp32[M N]
    """
    assert left_TM.dtype == right_TN.dtype
    if cpp.runs(left_TM, right_TN):
        return cpp.gradient(left_TM, right_TN, scale)
    product_MN = _product_fp32(left_TM, right_TN)
    return product_MN if scale == 1.0 else product_MN.mul_(scale)


def _product_fp32(left_TM: Tensor, right_TN: Tensor) -> Tensor:
    dtype = wide(left_TM.dtype)
    if left_TM.dtype == dtype:
        return left_TM.t() @ right_TN
    if keeps_fp32_sums(left_TM.dtype, left_TM.device):
        return torch.mm(left_TM.t(), right_TN, out_dtype=dtype)
    if left_TM.numel() + right_TN.numel() <= SMALL_ELEMENTS:
        return left_TM.to(dtype).t() @ right_TN.to(dtype)
    if left_TM.dtype == torch.bfloat16:
        return _two_terms(left_TM, right_TN)
    if torch.compiler.is_compiling():
        return left_TM.to(dtype).t() @ right_TN.to(dtype)
    out_MN = torch.zeros(left_TM.shape[1], right_TN.shape[1], dtype=dtype, device=left_TM.device)
    for rows in row_blocks(left_TM.shape[0], left_TM.shape[1] + right_TN.shape[1], left_TM.device):
        out_MN.addmm_(left_TM[rows].to(dtype).t(), right_TN[rows].to(dtype))
    return out_MN


def _two_terms(left_TM: Tensor, right_TN: Tensor) -> Tensor:
    """The product rounded to bf16, plus the rounding error: a second product subtracts the first result inside its fp32 sum.

    bf16 has fp32's range, so the first term overflows no earlier. On a CPU whose addmm rounds before it adds, the second term is zero.
    """
    high_MN = left_TM.t() @ right_TN
    rest_MN = torch.addmm(high_MN, left_TM.t(), right_TN, beta=-1.0)
    return high_MN.float().add_(rest_MN)


def gradient_product(left_TM: Tensor, right_TN: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """scale * leftᵀ @ right in `dtype`, rounded once: through fp32 only where `dtype` can hold more than the operands' own."""
    if dtype == left_TM.dtype and scale == 1.0:
        return left_TM.t() @ right_TN
    return product_fp32(left_TM, right_TN, scale).to(dtype)


def adds_in_place(dtype: torch.dtype, left_TR: Tensor, right_RN: Tensor) -> bool:
    """Whether `add_product_` onto a sum of this dtype adds left @ right unrounded, in one pass."""
    return dtype == left_TR.dtype and 0 < right_RN.shape[0] <= SKINNY and cpp.runs(left_TR, right_RN)


def add_product_(y_TN: Tensor, left_TR: Tensor, right_RN: Tensor, scale: float = 1.0) -> Tensor:
    """y + scale * left @ right in place, in their one dtype: the sum is rounded once."""
    # A graph's y is a product's result. Dynamo cannot answer for strides in a backward: it traces that again, and the autocast that was
    # switched off around it stays off for what follows (torch 2.13)
    if adds_in_place(y_TN.dtype, left_TR, right_RN) and (torch.compiler.is_compiling() or y_TN.stride(-1) == 1):
        cpp.expand_(y_TN, left_TR, right_RN, scale)
        return y_TN
    return y_TN.addmm_(left_TR, right_RN, alpha=scale)


def scaled_product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """scale * left @ right in their dtype, where right has a rank's columns; the sum is scaled before it is rounded.

    left    F[T N]
    right   F[N R]
    """
    if right.shape[1] <= SKINNY and cpp.runs(left, right):
        return cpp.shrink(left, right.t(), scale)
    if scale == 1.0:
        return left @ right
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0.0, alpha=scale)

"""Products whose sum and whose result are fp32 though their operands are narrow. On a CPU, where PyTorch has none, without widening
an activation whole: of bf16 in two terms, of fp16 in blocks of rows.

T tokens, M and N features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..ops.autocast import wide

# Elements of one block of rows once widened: 1 MiB in fp32, which a core's own cache holds.
BLOCK_ELEMENTS = 2**18

# Below this many elements a bf16 product costs its call: 128 x (256 + 16) widened take 25 us, in two terms 46; 256 x (512 + 16) 94 and 78.
SMALL_ELEMENTS = 2**16


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices over `rows`, each of about BLOCK_ELEMENTS elements at `width` elements a row; one slice inside a compiled graph."""
    step = rows if torch.compiler.is_compiling() else max(BLOCK_ELEMENTS // max(width, 1), 16)
    # at least one step, so that an empty batch passes through as any other
    return (slice(start, start + step) for start in range(0, max(rows, 1), max(step, 1)))


def product_fp32(left_TM: Tensor, right_TN: Tensor) -> Tensor:
    """leftᵀ @ right, summed and returned in fp32 (fp64 for fp64): an adapter's gradient without a rounding to 8 bits.

    Relative error of bf16 operands (2048 tokens, rank 16): 1e-7 on a GPU, 2.5e-6 on a CPU, 1.7e-3 for a bf16 result.

    left    F[T M]
    right   F[T N]   of left's dtype
    ->      fp32[M N]
    """
    assert left_TM.dtype == right_TN.dtype
    dtype = wide(left_TM.dtype)
    if left_TM.dtype == dtype:
        return left_TM.t() @ right_TN
    if left_TM.is_cuda:
        return torch.mm(left_TM.t(), right_TN, out_dtype=dtype)
    if left_TM.numel() + right_TN.numel() <= SMALL_ELEMENTS:
        return left_TM.to(dtype).t() @ right_TN.to(dtype)
    if left_TM.dtype == torch.bfloat16:
        return _two_terms(left_TM, right_TN)
    if torch.compiler.is_compiling():
        return left_TM.to(dtype).t() @ right_TN.to(dtype)
    out_MN = torch.zeros(left_TM.shape[1], right_TN.shape[1], dtype=dtype, device=left_TM.device)
    for rows in row_blocks(left_TM.shape[0], left_TM.shape[1] + right_TN.shape[1]):
        out_MN.addmm_(left_TM[rows].to(dtype).t(), right_TN[rows].to(dtype))
    return out_MN


def _two_terms(left_TM: Tensor, right_TN: Tensor) -> Tensor:
    """The product rounded to bf16, plus what that rounding left: the second product subtracts the first inside its fp32 sum.

    bf16 has fp32's range, so the first term overflows no earlier. On a CPU whose addmm rounds before it adds, the second term is zero.
    """
    high_MN = left_TM.t() @ right_TN
    rest_MN = torch.addmm(high_MN, left_TM.t(), right_TN, beta=-1.0)
    return high_MN.float().add_(rest_MN)


def gradient_product(left_TM: Tensor, right_TN: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """scale * leftᵀ @ right in `dtype`, rounded once: through fp32 only where `dtype` can hold more than the operands' own."""
    if dtype == left_TM.dtype and scale == 1.0:
        return left_TM.t() @ right_TN
    return product_fp32(left_TM, right_TN).mul_(scale).to(dtype)


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * left @ right in their dtype; the sum is scaled before it is rounded."""
    if scale == 1.0:
        return left @ right
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0.0, alpha=scale)

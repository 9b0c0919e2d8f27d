"""A bitsandbytes 4-bit weight: its product without a copy of the weight, and the copy that backward needs.

T tokens, K in features, O out features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def product_4bit(x_TK: Tensor, packed: Tensor, state: Any, bias: Tensor | None) -> Tensor:
    """x @ Wᵀ + bias by bitsandbytes' own kernels, in x's dtype."""
    import bitsandbytes

    return bitsandbytes.matmul_4bit(x_TK, packed, quant_state=state, bias=bias)


def dequantised(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """W in `dtype`, as the forward product used it.

    `bitsandbytes.functional.dequantize_4bit` answers in the dtype at quantisation time, which rounds a fp32 product's weight to bf16.

    packed  uint8[...]
    ->      dtype[O K]
    """
    ops = torch.ops.bitsandbytes
    absmax = state.absmax
    if state.nested:
        inner = state.state2
        absmax = ops.dequantize_blockwise.default(absmax, inner.absmax, inner.code, inner.blocksize, torch.float32) + state.offset
    return ops.dequantize_4bit.default(packed.view(-1, 1), absmax, state.blocksize, state.quant_type, list(state.shape), dtype)

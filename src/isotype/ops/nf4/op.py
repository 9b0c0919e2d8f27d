"""`widen_4bit`: a weight that bitsandbytes packed, as a float tensor. By one kernel on a GPU; elsewhere bitsandbytes' own operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backend import fused_runs
from ..library import library_op


def _fake(packed: Tensor, absmax: Tensor, code: Tensor, a: Any, b: Any, c: Any, d: int, e: int, shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty([shape[0], shape[1]], dtype=dtype, device=packed.device)


@library_op(
    "widen_4bit(Tensor packed, Tensor absmax, Tensor code, Tensor? inner_absmax, Tensor? inner_code, Tensor? offset, int blocksize, "
    "int inner_blocksize, SymInt[] shape, ScalarType dtype) -> Tensor",
    fake=_fake,
)
def _widen(
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    inner_absmax: Tensor | None,
    inner_code: Tensor | None,
    offset: Tensor | None,
    blocksize: int,
    inner_blocksize: int,
    shape: Any,
    dtype: torch.dtype,
) -> Tensor:
    from . import triton

    out = torch.empty([shape[0], shape[1]], dtype=dtype, device=packed.device)
    triton.widen_4bit(packed, absmax, code, inner_absmax, inner_code, offset, blocksize, inner_blocksize, out)
    return out


def widen_4bit(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, computed in fp32 and narrowed once.

    packed  any dtype, its bytes in order: two values a byte, the first one in the high half
    state   bitsandbytes' QuantState of it: nf4 or fp4, its scales in fp32 or quantised too
    ->      dtype[O, K]
    """
    if fused_runs(packed) and dtype != torch.float64 and packed.is_contiguous() and state.code is not None and state.blocksize % 16 == 0:
        nested = (state.state2.absmax, state.state2.code, state.offset, state.state2.blocksize) if state.nested else (None, None, None, 1)
        scales, scale_code, offset, block = nested
        bytes_ = packed.view(torch.uint8)
        return _widen(bytes_, state.absmax, state.code, scales, scale_code, offset, state.blocksize, block, list(state.shape), dtype)
    ops = torch.ops.bitsandbytes
    absmax = state.absmax
    if state.nested:
        quantised = state.state2
        absmax = ops.dequantize_blockwise.default(absmax, quantised.absmax, quantised.code, quantised.blocksize, torch.float32)
        absmax = absmax + state.offset
    weight: Tensor = ops.dequantize_4bit.default(packed.view(-1, 1), absmax, state.blocksize, state.quant_type, list(state.shape), dtype)
    return weight

"""The rotation by the C++ kernel: fp32, bf16 or fp16, any order of the dimensions in memory. B batch, N heads, S positions, D head size."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import CppKernels
from ..library import library_op

KERNELS = CppKernels(__file__, rotate="d" + "p" * 4 + "i" * 14)


def like(x_BNSD: Tensor) -> Tensor:
    """In the order of x in memory: a projection's [B S N D], seen as [B N S D], needs no copy on its way back."""
    y_BNSD = torch.empty_like(x_BNSD)
    return y_BNSD if y_BNSD.stride(-1) == 1 else torch.empty_like(x_BNSD, memory_format=torch.contiguous_format)


def rotate_now(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool, back: bool) -> Tensor:
    y_BNSD = torch.empty_like(x_BNSD)
    if y_BNSD.stride(-1) != 1:
        y_BNSD = like(x_BNSD)
    x_BNSD = x_BNSD if x_BNSD.stride(-1) == 1 else x_BNSD.contiguous()
    KERNELS(
        "rotate", x_BNSD.dtype, x_BNSD, y_BNSD, cos_BSR.to(torch.float32).contiguous(), sin_BSR.to(torch.float32).contiguous(),
        *x_BNSD.shape, cos_BSR.shape[-1], *x_BNSD.stride()[:3], *y_BNSD.stride()[:3], cos_BSR.shape[0], interleaved, back,
    )  # fmt: skip
    return y_BNSD


rotate = library_op(
    "rope_cpp(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor",
    fake=lambda x, cos, sin, interleaved, back: like(x),
)(rotate_now)

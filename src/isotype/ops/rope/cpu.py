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


@library_op(
    "rope_cpp(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool back) -> (Tensor, Tensor)",
    fake=lambda q, k, cos, sin, interleaved, back: (like(q), like(k)),
)
def rotate(q_BNSD: Tensor, k_BMSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool, back: bool) -> tuple[Tensor, Tensor]:
    cos_BSR, sin_BSR = cos_BSR.to(torch.float32).contiguous(), sin_BSR.to(torch.float32).contiguous()
    made: list[Tensor] = []
    for x in (q_BNSD, k_BMSD):
        y = torch.empty_like(x)
        y = y if y.stride(-1) == 1 else like(x)
        x = x if x.stride(-1) == 1 else x.contiguous()
        KERNELS(
            "rotate", x.dtype, x, y, cos_BSR, sin_BSR, *x.shape, cos_BSR.shape[-1], *x.stride()[:3], *y.stride()[:3], cos_BSR.shape[0],
            interleaved, back,
        )  # fmt: skip
        made.append(y)
    return made[0], made[1]

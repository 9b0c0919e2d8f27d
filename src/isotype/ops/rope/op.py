"""The op `rope` computes the rotary position embedding. B is the batch size, N the number of query
heads, M the number of key heads, S the number of positions, D the head size, and R the number of
rotated pairs. `*t` is the batch size, 1, or no dimension. A capital letter before brackets, as in
`Q[B N S D]`, names a dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ShapeError
from ..backend import (
    Implementation,
    apply_function,
    arithmetic_dtype,
    autocast_off,
    can_bypass_dispatcher,
    choose_implementation,
    empty_rows_like,
    refuse_second_derivative,
    uses_fused_kernel,
)
from ..contract import OpContract
from ..cpp import CppKernels
from ..library import library_op

# q and k keep their dtypes; the tables may be wider
ROPE = OpContract(
    "q: Q[B N S D], k: K[B M S D], cos: C[*t S R], sin: C[*t S R] -> Q[B N S D], K[B M S D]",
    inside="fp32",
    grads={"q": "Q", "k": "K"},
    autocast="ignored",
)


# --- reference


def rotate_reference(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool) -> Tensor:
    """Rotates `x` by the tables in plain PyTorch. It also supports fp64 inputs. Dimensions past 2R
    do not change.
    """
    dtype = arithmetic_dtype(x_BNSD.dtype, cos_BSR.dtype)
    # under autocast torch.cat raises for tensors of another dtype than autocast's
    with autocast_off(x_BNSD):
        cos = cos_BSR.unsqueeze(1).to(dtype)
        sin = sin_BSR.unsqueeze(1).to(dtype)
        pairs = cos_BSR.shape[-1]
        rotated = x_BNSD[..., : 2 * pairs].to(dtype)
        unrotated = x_BNSD[..., 2 * pairs :]
        if interleaved:
            a = rotated[..., 0::2]
            b = rotated[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a = rotated[..., :pairs]
            b = rotated[..., pairs:]
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((rotated.to(x_BNSD.dtype), unrotated), -1)


def rope_reference(
    q: Tensor, k: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return _rotate_both_reference(q, k, cos_BSR, sin_BSR, interleaved, False)


def _rotate_both_reference(
    q: Tensor, k: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    sin_BSR = -sin_BSR if inverse else sin_BSR
    return rotate_reference(q, cos_BSR, sin_BSR, interleaved), rotate_reference(
        k, cos_BSR, sin_BSR, interleaved
    )


# --- the C++ kernels of cpu.cpp

# a letter per argument of `rotate` in cpu.cpp: the dtype, four tensors, and 14 integers (sizes,
# strides, and the two flags)
KERNELS = CppKernels(__file__, rotate="d" + "p" * 4 + "i" * 14)


def _fake_rotate(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_rows_like(q), empty_rows_like(k)


def _run_cpp_rotate(
    q_BNSD: Tensor,
    k_BMSD: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    cos_BSR = cos_BSR.to(torch.float32).contiguous()
    sin_BSR = sin_BSR.to(torch.float32).contiguous()
    outputs: list[Tensor] = []
    for x in (q_BNSD, k_BMSD):
        y = torch.empty_like(x)
        y = y if y.stride(-1) == 1 else empty_rows_like(x)
        x = x if x.stride(-1) == 1 else x.contiguous()
        KERNELS(
            "rotate",
            x.dtype,
            x,
            y,
            cos_BSR,
            sin_BSR,
            *x.shape,
            cos_BSR.shape[-1],
            *x.stride()[:3],
            *y.stride()[:3],
            cos_BSR.shape[0],
            interleaved,
            inverse,
        )
        outputs.append(y)
    return outputs[0], outputs[1]


_cpp_rotate = library_op(
    "rope_cpp(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool inverse) ->"
    " (Tensor, Tensor)",
    fake=_fake_rotate,
)(_run_cpp_rotate)


# --- the op


@library_op(
    "rope_triton(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool inverse) ->"
    " (Tensor, Tensor)",
    fake=_fake_rotate,
)
def _triton_rotate(
    q_BNSD: Tensor,
    k_BMSD: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    from . import triton

    return triton.rotate_query_and_key(
        q_BNSD, k_BMSD, cos_BSR, sin_BSR, interleaved=interleaved, inverse=inverse
    )


def _rotate(
    q_BNSD: Tensor,
    k_BMSD: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    interleaved: bool,
    inverse: bool,
    implementation: Implementation,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k with the given implementation (C++, Triton or plain PyTorch).

    inverse  rotates by the negative angle, as backward does
    """
    if implementation == "cpp":
        return _cpp_rotate(q_BNSD, k_BMSD, cos_BSR, sin_BSR, interleaved, inverse)
    if implementation == "triton" and q_BNSD.dtype == k_BMSD.dtype:
        return _triton_rotate(q_BNSD, k_BMSD, cos_BSR, sin_BSR, interleaved, inverse)
    if implementation == "triton":
        # one launch for q and one for k; the other tensor of each launch has no heads
        q, _ = _triton_rotate(q_BNSD, q_BNSD[:, :0], cos_BSR, sin_BSR, interleaved, inverse)
        k, _ = _triton_rotate(k_BMSD, k_BMSD[:, :0], cos_BSR, sin_BSR, interleaved, inverse)
        return q, k
    return _rotate_both_reference(q_BNSD, k_BMSD, cos_BSR, sin_BSR, interleaved, inverse)


class Rotate(torch.autograd.Function):
    """The autograd function of `rope`. It saves only the tables. The gradient of a rotation is the
    inverse rotation. The same kernels compute it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BNSD: Tensor,
        k_BMSD: Tensor,
        cos_BSR: Tensor,
        sin_BSR: Tensor,
        interleaved: bool,
        implementation: Implementation,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_BSR, sin_BSR)
        ctx.implementation = implementation
        ctx.interleaved = interleaved
        return _rotate(q_BNSD, k_BMSD, cos_BSR, sin_BSR, interleaved, False, implementation)

    @staticmethod
    def backward(
        ctx: Any, d_rotated_q_BNSD: Tensor, d_rotated_k_BMSD: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("rope")
        cos_BSR, sin_BSR = ctx.saved_tensors
        dq_BNSD, dk_BMSD = _rotate(
            d_rotated_q_BNSD,
            d_rotated_k_BMSD,
            cos_BSR,
            sin_BSR,
            ctx.interleaved,
            True,
            ctx.implementation,
        )
        return dq_BNSD, dk_BMSD, None, None, None, None


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates q and k by their positions, in fp32. Dimensions past 2R do not change.

    q             Q[B N S D]   any float dtype, unchanged by autocast
    k             K[B M S D]
    cos, sin      C[S R] or C[B S R], R pairs; use fp32 for positions past 256 (bf16 has 8 bits)
    ->            Q[B N S D], K[B M S D]
    grads         q: Q   k: K   (the tables have none)
    A pair is (d, d + R), or (2d, 2d + 1) when interleaved.
    Raises  ShapeError SH001
    """
    cos = cos.unsqueeze(0) if cos.dim() == 2 else cos
    sin = sin.unsqueeze(0) if sin.dim() == 2 else sin
    for name, x in (("q", q), ("k", k)):
        if (
            x.dim() != 4
            or cos.shape != sin.shape
            or cos.shape[0] not in (1, x.shape[0])
            or cos.shape[1] != x.shape[2]
        ):
            raise ShapeError(
                f"{name} {list(x.shape)} and tables {list(cos.shape)}: expected [B N S D] and [B S"
                " R] or [S R]",
                code="SH001",
            )
        if 2 * cos.shape[-1] > x.shape[-1]:
            raise ShapeError(
                f"{name} has {x.shape[-1]} dimensions where {cos.shape[-1]} pairs need"
                f" {2 * cos.shape[-1]}",
                code="SH001",
            )
    implementation = choose_implementation(KERNELS, q, k)
    if not q.is_cpu and implementation in ("plain", "cpp") and uses_fused_kernel("rope", q):
        # tensors have no data while memory is planned for a GPU; the Triton kernel is a
        # `torch.library` op with a fake implementation, so it can be planned
        implementation = "triton"
    if implementation == "cpp" and can_bypass_dispatcher(q, k, cos, sin):
        return _run_cpp_rotate(q, k, cos, sin, interleaved, False)
    rotated_q, rotated_k = apply_function(Rotate, q, k, cos, sin, interleaved, implementation)
    return rotated_q, rotated_k

"""Computes AdamW in a single kernel, with stochastic rounding of bf16 weights. It reads and writes
every tensor once.

In plain PyTorch, the same update takes 16 kernel launches and up to four fp32 copies of the tensor.
For a bf16 embedding of 128,256 x 4,096, these copies take 8.4 GB. The random bits for rounding come
from the generator Philox and depend only on the seed and the element's index.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import on_tensor_device

# 8 values per thread with 4 warps
BLOCK = 1024


# The seed differs at every step, and the first index differs for every part of a tensor. Triton
# must not compile the kernel anew for their values
@triton.jit(do_not_specialize=["seed", "first_group"])
def adamw_kernel(
    weight,
    gradient,
    mean,
    square,
    n,
    seed,
    first_group,
    decay,
    step_size,
    correction,
    beta1,
    beta2,
    eps,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(n - first, BLOCK).to(tl.int32)
    g_fp32 = tl.load(gradient + first + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    m_fp32 = tl.load(mean + first + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    v_fp32 = tl.load(square + first + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    w_fp32 = tl.load(weight + first + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    m_fp32 += (g_fp32 - m_fp32) * (1.0 - beta1.to(tl.float32))
    v_fp32 = v_fp32 * beta2.to(tl.float32) + g_fp32 * g_fp32 * (1.0 - beta2.to(tl.float32))
    tl.store(mean + first + i, m_fp32.to(mean.dtype.element_ty), mask=inside)
    tl.store(square + first + i, v_fp32.to(square.dtype.element_ty), mask=inside)
    denominator_fp32 = tl.sqrt(v_fp32 * correction.to(tl.float32)) + eps.to(tl.float32)
    w_fp32 = w_fp32 * decay.to(tl.float32) - step_size.to(tl.float32) * m_fp32 / denominator_fp32
    if STOCHASTIC:
        # one Philox call gives four neighbouring elements 32 random bits each; 16 of them are added
        # to the bits that bf16 drops
        group = first_group + first // 4 + tl.arange(0, BLOCK // 4)
        a, b, c, d = tl.randint4x(seed, group.to(tl.uint32))
        noise = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,)) & 0xFFFF
        bits = w_fp32.to(tl.int32, bitcast=True) + noise.to(tl.int32)
        rounded_fp32 = (bits & -65536).to(tl.float32, bitcast=True)
        # the addition of noise would turn an infinity into nan, and might turn a nan into an
        # infinity
        w_fp32 = tl.where(tl.abs(w_fp32) < float("inf"), rounded_fp32, w_fp32)
    tl.store(weight + first + i, w_fp32.to(weight.dtype.element_ty), mask=inside)


@on_tensor_device
def adamw_(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    hyperparameters: Any,
    seed: int | None,
    first_index: int = 0,
) -> None:
    """Computes the update of `adamw_reference_`. All four tensors must be contiguous, and
    `first_index` must be a multiple of 4.
    """
    if not weight.numel():
        return
    h = hyperparameters
    adamw_kernel[(triton.cdiv(weight.numel(), BLOCK),)](
        weight,
        gradient,
        mean,
        square,
        weight.numel(),
        seed or 0,
        first_index // 4,
        h.decay,
        h.step_size,
        h.correction,
        h.beta1,
        h.beta2,
        h.eps,
        STOCHASTIC=seed is not None and weight.dtype == torch.bfloat16,
        BLOCK=BLOCK,
        num_warps=4,
    )

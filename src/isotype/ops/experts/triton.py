"""Triton kernels for stacked experts, for computations that torch's grouped matrix products cannot
do. They compute the activation between the two layers of an expert, the sum over the experts of a
token, and the gradients of adapters in fp32.

S is the number of rows, which are sorted by expert. I is the number of inner features, and N the
number of columns. A gradient has the shape [M N].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gated.triton import activation_factor, activation_slope
from ..launch import on_tensor_device

# 8 values per thread with 4 warps, as in gated/triton.py
BLOCK = 1024


@triton.jit
def load_pair(g, row_start, first, inner, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Loads (gate, up) of BLOCK inner features, starting at `first`. gate is the first half of a
    row and up the second half. For "clamped", gate has the even columns and up the odd columns.
    """
    if KIND == "clamped":
        pair_index = tl.arange(0, 2 * BLOCK)
        inside = pair_index < 2 * tl.minimum(inner - first, BLOCK)
        x_fp32 = tl.load(g + (row_start + 2 * first) + pair_index, mask=inside, other=0.0).to(
            tl.float32
        )  # [2 BLOCK]
        gate_fp32, up_fp32 = tl.split(tl.reshape(x_fp32, (BLOCK, 2)))
    else:
        i = tl.arange(0, BLOCK)
        inside = i < tl.minimum(inner - first, BLOCK)
        gate_fp32 = tl.load(g + (row_start + first) + i, mask=inside, other=0.0).to(
            tl.float32
        )  # [BLOCK]
        up_fp32 = tl.load(g + (row_start + inner + first) + i, mask=inside, other=0.0).to(
            tl.float32
        )  # [BLOCK]
    return gate_fp32, up_fp32


@triton.jit
def activate_kernel(
    g,
    h,
    inner,
    blocks,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    gate_fp32, up_fp32 = load_pair(g, row * 2 * inner, first, inner, KIND, BLOCK)
    if KIND == "clamped":
        clamped_gate_fp32 = tl.minimum(gate_fp32, LIMIT)
        y_fp32 = (
            (tl.minimum(tl.maximum(up_fp32, -LIMIT), LIMIT) + 1.0)
            * clamped_gate_fp32
            * tl.sigmoid(ALPHA * clamped_gate_fp32)
        )
    else:
        y_fp32 = gate_fp32 * activation_factor(gate_fp32, KIND) * up_fp32
    i = tl.arange(0, BLOCK)
    tl.store(
        h + (row * inner + first) + i,
        y_fp32.to(h.dtype.element_ty),
        mask=i < tl.minimum(inner - first, BLOCK),
    )


@triton.jit
def backward_kernel(
    g,
    dh,
    weights,
    dg,
    h,
    products,
    inner,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    WANT_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each Triton program computes one row. It computes h, the gradient of g, and the inner product
    <h, dh>. The gradient of g is multiplied by the routing weight. The inner product is not.
    """
    row = tl.program_id(0).to(tl.int64)
    weight_fp32 = tl.load(weights + row).to(tl.float32)
    sum_fp32 = tl.zeros((BLOCK,), dtype=tl.float32)
    i = tl.arange(0, BLOCK)
    for first in range(0, inner, BLOCK):
        inside = i < tl.minimum(inner - first, BLOCK)
        gate_fp32, up_fp32 = load_pair(g, row * 2 * inner, first, inner, KIND, BLOCK)
        d_fp32 = tl.load(dh + (row * inner + first) + i, mask=inside, other=0.0).to(
            tl.float32
        )  # [BLOCK]
        if KIND == "clamped":
            clamped_gate_fp32 = tl.minimum(gate_fp32, LIMIT)
            gate_factor_fp32 = tl.sigmoid(ALPHA * clamped_gate_fp32)
            factor_fp32 = tl.minimum(tl.maximum(up_fp32, -LIMIT), LIMIT) + 1.0
            value_fp32 = clamped_gate_fp32 * gate_factor_fp32
            slope_fp32 = tl.where(
                gate_fp32 > LIMIT,
                0.0,
                gate_factor_fp32 * (1.0 + ALPHA * clamped_gate_fp32 * (1.0 - gate_factor_fp32)),
            )
            up_slope_fp32 = tl.where((up_fp32 > LIMIT) | (up_fp32 < -LIMIT), 0.0, value_fp32)
        else:
            gate_factor_fp32 = activation_factor(gate_fp32, KIND)
            factor_fp32 = up_fp32
            value_fp32 = gate_fp32 * gate_factor_fp32
            slope_fp32 = activation_slope(gate_fp32, gate_factor_fp32, KIND)
            up_slope_fp32 = value_fp32
        y_fp32 = value_fp32 * factor_fp32
        sum_fp32 += y_fp32 * d_fp32
        d_fp32 *= weight_fp32
        dgate = (d_fp32 * factor_fp32 * slope_fp32).to(dg.dtype.element_ty)
        dup = (d_fp32 * up_slope_fp32).to(dg.dtype.element_ty)
        if KIND == "clamped":
            pair_index = tl.arange(0, 2 * BLOCK)
            pairs = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,))
            tl.store(
                dg + (row * 2 * inner + 2 * first) + pair_index,
                pairs,
                mask=pair_index < 2 * tl.minimum(inner - first, BLOCK),
            )
        else:
            tl.store(dg + (row * 2 * inner + first) + i, dgate, mask=inside)
            tl.store(dg + (row * 2 * inner + inner + first) + i, dup, mask=inside)
        if WANT_H:
            tl.store(h + (row * inner + first) + i, y_fp32.to(h.dtype.element_ty), mask=inside)
    tl.store(products + row, tl.sum(sum_fp32))


@triton.jit
def combine_kernel(
    y,
    token_rows,
    weights,
    total,
    experts_per_token,
    columns,
    blocks,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums the rows of a token, in a fixed order. Each program computes a block of one token's
    columns.
    """
    token = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(columns - first, BLOCK)
    sum_fp32 = tl.load(total + (token * columns + first) + i, mask=inside, other=0.0).to(
        tl.float32
    )  # [BLOCK]
    for choice in range(experts_per_token):
        row = tl.load(token_rows + token * experts_per_token + choice).to(tl.int64)
        y_fp32 = tl.load(y + (row * columns + first) + i, mask=inside, other=0.0).to(
            tl.float32
        )  # [BLOCK]
        if WEIGHTED:
            y_fp32 *= tl.load(weights + row).to(tl.float32)
        sum_fp32 += y_fp32
    tl.store(total + (token * columns + first) + i, sum_fp32, mask=inside)


@triton.jit
def gradient_kernel(
    lhs,
    rhs,
    ends,
    out,
    m,
    n,
    lhs_stride,
    rhs_stride,
    out_expert,
    out_m,
    out_n,
    scale,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Computes the matrix product lhsᵀ rhs for the rows of an expert. Each Triton program computes
    a tile [M, N] of one expert.
    """
    expert = tl.program_id(0)
    i = tl.program_id(1) * M + tl.arange(0, M)
    j = tl.program_id(2) * N + tl.arange(0, N)
    # the first expert's rows start at 0
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    sums_fp32 = tl.zeros((M, N), dtype=tl.float32)
    for first in range(start, end, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        in_rows = (row < end)[:, None]
        a = tl.load(
            lhs + row[:, None] * lhs_stride + i[None, :], mask=in_rows & (i < m)[None, :], other=0.0
        )  # [ROWS, M]
        b_any = tl.load(
            rhs + row[:, None] * rhs_stride + j[None, :],
            mask=in_rows & (j < n)[None, :],
            other=0.0,
        )  # [ROWS, N]
        b = b_any.to(a.dtype)
        sums_fp32 = tl.dot(tl.trans(a), b, sums_fp32, input_precision="ieee")
    target = (
        out
        + expert.to(tl.int64) * out_expert
        + i.to(tl.int64)[:, None] * out_m
        + j.to(tl.int64)[None, :] * out_n
    )
    tl.store(target, sums_fp32 * scale, mask=(i < m)[:, None] & (j < n)[None, :])


@on_tensor_device
def activate(g_SG: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    rows, inner = g_SG.shape[0], g_SG.shape[1] // 2
    h = torch.empty(rows, inner, dtype=g_SG.dtype, device=g_SG.device)
    if h.numel():
        blocks = triton.cdiv(inner, BLOCK)
        activate_kernel[(rows * blocks,)](
            g_SG, h, inner, blocks, KIND=kind, ALPHA=alpha, LIMIT=limit, BLOCK=BLOCK
        )
    return h


@on_tensor_device
def backward(
    g_SG: Tensor, dh_SI: Tensor, w_S: Tensor, kind: str, alpha: float, limit: float, want_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors: the gradient of g, which is multiplied by w; h, or an empty tensor if
    h is not needed; and the inner product <h, dh> of each row.
    """
    dg, products = torch.empty_like(g_SG), torch.empty_like(w_S)
    h = torch.empty_like(dh_SI) if want_h else dh_SI.new_empty(0)
    if dh_SI.numel():
        backward_kernel[(dh_SI.shape[0],)](
            g_SG,
            dh_SI,
            w_S,
            dg,
            h if want_h else dg,
            products,
            dh_SI.shape[1],
            KIND=kind,
            ALPHA=alpha,
            LIMIT=limit,
            WANT_H=want_h,
            BLOCK=BLOCK,
        )
    return dg, h, products


@on_tensor_device
def combine_(total_TN: Tensor, y_SN: Tensor, token_rows_TC: Tensor, w_S: Tensor | None) -> None:
    """For each token, multiplies the rows of this token in `y_SN` by w, and adds their sum to the
    token's row in `total_TN`.
    """
    tokens, columns = total_TN.shape
    if total_TN.numel():
        blocks = triton.cdiv(columns, BLOCK)
        combine_kernel[(tokens * blocks,)](
            y_SN,
            token_rows_TC,
            y_SN if w_S is None else w_S,
            total_TN,
            token_rows_TC.numel() // tokens,
            columns,
            blocks,
            WEIGHTED=w_S is not None,
            BLOCK=BLOCK,
        )


@on_tensor_device
def gradient_(
    lhs_SM: Tensor, rhs_SN: Tensor, ends_E: Tensor, out_EMN: Tensor, scale: float
) -> None:
    """For each expert, computes `scale` times the matrix product lhsᵀ rhs and writes it to out in
    fp32. For an expert without rows, it writes zeros. out may have any strides.
    """
    if lhs_SM.shape[1] > rhs_SN.shape[1]:
        lhs_SM, rhs_SN, out_EMN = rhs_SN, lhs_SM, out_EMN.transpose(1, 2)
    experts, m, n = out_EMN.shape
    # a rank of 16 fills the smallest tile of the tensor cores
    tile = 16 if m <= 16 else 32 if m <= 32 else 64
    gradient_kernel[(experts, triton.cdiv(m, tile), triton.cdiv(n, 128))](
        lhs_SM,
        rhs_SN,
        ends_E,
        out_EMN,
        m,
        n,
        lhs_SM.stride(0),
        rhs_SN.stride(0),
        *out_EMN.stride(),
        scale,
        ROWS=32,
        M=tile,
        N=128,
        num_warps=4,
    )

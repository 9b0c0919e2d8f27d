"""The adapter branch in fp32 beside a narrow base product: one block of rows at a time, so that no activation is widened whole.

For adapters whose dtype differs from the product's without autocast, where PEFT widens the whole input.

T tokens, K in features, O out features, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .products import row_blocks


def _after_dropout(x_TK: Tensor, keep_TK: Tensor | None, rows: slice) -> Tensor:
    block = x_TK[rows].float()
    return block if keep_TK is None else block * keep_TK[rows]


def add_branch(y_TO: Tensor, x_TK: Tensor, keep_TK: Tensor | None, a_RK: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """Adds scale (x Aᵀ) Bᵀ to `y` in place and returns x Aᵀ.

    y       any float [T O]   written: the caller's own, fresh
    x       any float [T K]
    a, b    fp32[R K], fp32[O R]
    ->      fp32[T R]
    """
    xa_TR = torch.empty(x_TK.shape[0], a_RK.shape[0], dtype=torch.float32, device=x_TK.device)
    for rows in row_blocks(x_TK.shape[0], x_TK.shape[1] + y_TO.shape[1], x_TK.device):
        xa_TR[rows] = _after_dropout(x_TK, keep_TK, rows) @ a_RK.t()
        y_TO[rows] = torch.addmm(y_TO[rows].float(), xa_TR[rows], b_OR.t(), alpha=scale).to(y_TO.dtype)
    return xa_TR


def gradients(
    dy_TO: Tensor,
    x_TK: Tensor | None,
    xa_TR: Tensor | None,
    keep_TK: Tensor | None,
    a_RK: Tensor,
    b_OR: Tensor,
    scale: float,
    dx_TK: Tensor | None,
    *,
    needs_a: bool,
    needs_b: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(dA, dB) in fp32; adds the branch's share to `dx` in place where there is one.

    dy      any float [T O]
    dx      any float [T K]   written: the caller's own, fresh
    """
    da = torch.zeros_like(a_RK) if needs_a else None
    db = torch.zeros_like(b_OR) if needs_b else None
    for rows in row_blocks(dy_TO.shape[0], dy_TO.shape[1] + a_RK.shape[1], dy_TO.device):
        dy_fp32 = dy_TO[rows].float()
        if db is not None:
            assert xa_TR is not None
            db.addmm_(dy_fp32.t(), xa_TR[rows], alpha=scale)
        if da is None and dx_TK is None:
            continue
        dxa_fp32 = dy_fp32 @ b_OR
        if da is not None:
            assert x_TK is not None
            x_fp32 = _after_dropout(x_TK, keep_TK, rows)
            da.addmm_(dxa_fp32.t(), x_fp32, alpha=scale)
        if dx_TK is not None:
            share = dxa_fp32 @ a_RK if keep_TK is None else (dxa_fp32 @ a_RK).mul_(keep_TK[rows])
            dx_TK[rows] = share.mul_(scale).add_(dx_TK[rows]).to(dx_TK.dtype)
    return da, db

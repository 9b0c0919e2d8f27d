"""Implements DoRA, which scales each row of W + s B A to a trained length m (Liu et al. 2024,
"DoRA: weight-decomposed low-rank adaptation").

The output of the layer is y = (m / n) (x Wᵀ + s x Aᵀ Bᵀ) + bias. n contains the norms of the rows
of W + s B A. No gradient is computed for these norms, as in the paper and in PEFT. So a DoRA layer
computes a LoRA layer and multiplies each output feature by a factor. The norm of each row is
computed as n² = |W|² + 2 s <W Aᵀ, B> + s² <B (A Aᵀ), B>, without computing W + s B A. |W|² is
computed once per step and per call of `generate`, because the weight is frozen. n is fp32. At the
start of training, m / n is near 1. The distance between two bf16 numbers near 1 is as large as the
changes that training makes to m / n.

T is the number of tokens, K the number of input features, O the number of output features, and R
the rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..ops.backend import autocast_off
from .linear import LoraDtypes, Projection, apply_linear, base_weight
from .products import can_call_kernels_directly, row_blocks, scaled_product

# weight -> (data pointer, version, |W|² of each row); cleared by `forget_row_squares`
_row_squares_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()


class ScaleToMagnitude(torch.autograd.Function):
    """Replaces u by u m / n + bias, in fp32 for one block of rows at a time. The result is the only
    large tensor that is saved for backward.

    u     F[T O]      overwritten
    m, n  fp32[O]
    grads u: F, m: fp32, n: none, bias
    """

    @staticmethod
    def forward(ctx: Any, u_TO: Tensor, m_O: Tensor, n_O: Tensor, bias: Tensor | None) -> Tensor:
        with autocast_off(u_TO):
            factor_O = m_O / n_O
            rows_TO = u_TO.view(-1, u_TO.shape[-1])
            for rows in row_blocks(len(rows_TO), len(factor_O), u_TO.device):
                block = rows_TO[rows]
                if bias is None:
                    block.copy_(block * factor_O)
                else:
                    block.copy_(torch.addcmul(bias.to(factor_O.dtype), block, factor_O))
        ctx.mark_dirty(u_TO)
        ctx.save_for_backward(u_TO, m_O, factor_O, bias)
        return u_TO

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, m_O, factor_O, bias = ctx.saved_tensors
        with autocast_off(dy):
            dy_TO = dy.reshape(-1, dy.shape[-1])
            y_TO = y.view(-1, y.shape[-1])
            du = torch.empty_like(y)
            du_TO = du.view(-1, du.shape[-1])
            dm_O = torch.zeros_like(factor_O)
            dbias_O = torch.zeros_like(factor_O)
            for rows in row_blocks(len(dy_TO), len(factor_O), dy.device):
                block = dy_TO[rows].to(factor_O.dtype)
                dm_O += (block * y_TO[rows]).sum(0)
                if bias is not None:
                    dbias_O += block.sum(0)
                du_TO[rows] = block * factor_O
            # y - bias is u m / n
            if bias is not None:
                dm_O = dm_O - dbias_O * bias
            dm = (dm_O / m_O).to(m_O.dtype)
            if bias is not None and ctx.needs_input_grad[3]:
                dbias = dbias_O.to(bias.dtype)
            else:
                dbias = None
        return du, dm, None, dbias


def adapted_row_norms(projection: Projection, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the norms of the rows of W + s B A as fp32[O], or fp64 for an fp64 weight.

    dtype  of the products
    """
    sum_dtype = torch.promote_types(torch.float32, dtype)
    calls_kernels_directly = can_call_kernels_directly(dtype, x)
    assert projection.a is not None
    assert projection.b is not None
    with torch.no_grad(), autocast_off(x):
        w_OK = base_weight(projection.weight, projection.quant_state, dtype)
        a_RK = projection.a.to(dtype)
        b_OR = projection.b.to(dtype).to(sum_dtype)
        wa_OR = scaled_product(w_OK, a_RK.t(), calls_kernels_directly=calls_kernels_directly).to(
            sum_dtype
        )
        aa_RR = a_RK.to(sum_dtype) @ a_RK.to(sum_dtype).t()
        squares = _row_squares(projection.weight, w_OK, sum_dtype) + (
            (2 * projection.scale * wa_OR + projection.scale**2 * (b_OR @ aa_RR)) * b_OR
        ).sum(1)
        norms: Tensor = squares.clamp_(min=0).sqrt_()
        return norms


def forget_row_squares() -> None:
    """Makes the next call of each layer compute |W|² again. A step and a call of `generate` begin
    with it, because the values can change at the same address and with the same version: after
    `weight.data.copy_(other)`, and when FSDP gathers a weight.
    """
    _row_squares_cache.clear()


def _row_squares(weight: Tensor, w_OK: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns |W|² of each row. The result is cached until the weight is written to, and at most
    until the next call of `forget_row_squares`.
    """
    cached: tuple[int, int, Tensor] | None = _row_squares_cache.get(weight)
    if (
        cached is None
        or cached[:2] != (weight.data_ptr(), weight._version)
        or cached[2].dtype != dtype
    ):
        squares = torch.cat(
            [
                w_OK[rows].to(dtype).square().sum(1)
                for rows in row_blocks(w_OK.shape[0], w_OK.shape[1], w_OK.device)
            ]
        )
        cached = _row_squares_cache[weight] = weight.data_ptr(), weight._version, squares
    return cached[2]


def apply_dora(x: Tensor, projection: Projection, magnitude: Tensor, dtypes: LoraDtypes) -> Tensor:
    """Computes a projection with a DoRA adapter, without dropout.

    magnitude  m, any float [O]
    """
    n_O = adapted_row_norms(projection, x, dtypes.compute)
    u = apply_linear(x, projection._replace(bias=None), dtypes, is_eager=True)
    y: Tensor = ScaleToMagnitude.apply(u, magnitude.to(n_O.dtype), n_O, projection.bias)
    return y

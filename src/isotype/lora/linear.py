"""`lora_linear`: x Wᵀ + bias + scale (x Aᵀ) Bᵀ in one autograd function.

Saved for backward: x (or what x is made from: `ops.remade`), x Aᵀ (tokens x rank), the weight itself, A and B as cast down, and a
byte per element where there is dropout.
Adapter gradients come from products summed in fp32. The scale multiplies sums, not rounded values.

T tokens, K in features, O out features, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ShapeError
from ..ops.autocast import autocast_off, narrowed, no_view
from ..ops.backend import applied, refuse_second_derivative
from ..ops.recompute import output_is_unused, unwritten
from ..ops.remade import kept_for, made_again
from . import wide_branch
from .dropout import dropout_mask, dropped_scale
from .dtypes import LoraDtypes, decide
from .inside import before_or_inside
from .narrow import narrow
from .products import add_product_, adds_in_place, gradient_product, scaled_product
from .quantised import dequantised, product_4bit


def after_dropout(x_TK: Tensor, keep_TK: Tensor | None) -> Tensor:
    """x where dropout kept it, zero elsewhere; the factor 1/(1-p) belongs to the branch's scale."""
    return x_TK if keep_TK is None else x_TK * keep_TK


def base_product(x_TK: Tensor, weight: Tensor, bias: Tensor | None, quant_state: Any) -> Tensor:
    """x Wᵀ + bias in x's dtype."""
    bias = None if bias is None else bias.to(x_TK.dtype)
    if quant_state is not None:
        return product_4bit(x_TK, weight, quant_state, bias)
    return F.linear(x_TK, narrowed(weight, x_TK.dtype), bias)


def out_features(weight: Tensor, quant_state: Any) -> int:
    return int((weight if quant_state is None else quant_state).shape[0])


def base_weight(weight: Tensor, quant_state: Any, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if quant_state is None else dequantised(weight, quant_state, dtype)


def input_gradient(share_TK: Tensor, scale: float, dy_TO: Tensor, w_OK: Tensor, dtype: torch.dtype) -> Tensor:
    """scale * share + dy W in `dtype`, overwriting `share`.

    The small addend is rounded to the products' dtype, the large one is not: it is summed onto it inside the product. Where `dtype`
    is another one the sum belongs there.
    """
    if dtype == share_TK.dtype:
        return share_TK.addmm_(dy_TO, w_OK, beta=scale)
    return (dy_TO @ w_OK).to(dtype).add_(share_TK, alpha=scale)


def adapted_product(
    x_TK: Tensor, weight: Tensor, bias: Tensor | None, quant_state: Any, xa_TR: Tensor, b_OR: Tensor, scale: float, *, before: bool
) -> Tensor:
    """x Wᵀ + bias + scale xa Bᵀ in x's dtype.

    On a GPU the adapter's product is made first and the large one is summed onto it inside itself, which reads it while it multiplies: 2
    bytes an element of the output, where a sum after the product takes 4. Where the adapter goes into the product itself: `inside`.

    before  what `before_or_inside` says of x
    """
    if not before:
        return add_product_(base_product(x_TK, weight, bias, quant_state), xa_TR, b_OR.t(), scale)
    w_OK = base_weight(weight, quant_state, x_TK.dtype)
    if bias is None:
        y_TO = scaled_product(xa_TR, b_OR.t(), scale)
    else:
        y_TO = torch.addmm(bias.to(x_TK.dtype), xa_TR, b_OR.t(), alpha=scale)
    return y_TO.addmm_(x_TK, w_OK.t())


class LoraLinear(torch.autograd.Function):
    """`lora_linear` with its dtypes decided."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a_RK: Tensor,
        b_OR: Tensor,
        keep: Tensor | None,
        branch_scale: float,
        quant_state: Any,
        dtypes: LoraDtypes,
    ) -> Tensor:
        needs_x, needs_weight, _, needs_a, needs_b = ctx.needs_input_grad[:5]
        x_TK = x.reshape(-1, x.shape[-1])
        keep_TK = None if keep is None else keep.reshape(x_TK.shape)
        with autocast_off(x):
            narrow_TK = narrowed(x_TK, dtypes.compute)
            unused = output_is_unused(ctx)
            if dtypes.wide:
                y_TO = base_product(narrow_TK, weight, bias, quant_state).to(dtypes.out)
                branch_TK, a, b = x_TK, a_RK.float(), b_OR.float()
                xa_TR = wide_branch.add_branch(y_TO, branch_TK, keep_TK, a, b, branch_scale)
            else:
                branch_TK, a, b = narrow_TK, narrow(a_RK, dtypes.compute), narrow(b_OR, dtypes.compute)
                xa_TR = scaled_product(after_dropout(branch_TK, keep_TK), a.t())
                if unused:
                    # a recompute: backward needs x's product with A and nothing else
                    y_TO = unwritten((x_TK.shape[0], out_features(weight, quant_state)), narrow_TK, dtypes.out)
                else:
                    y_TO = adapted_product(narrow_TK, weight, bias, quant_state, xa_TR, b, branch_scale, before=before_or_inside(narrow_TK))
        saved_x = branch_TK if needs_a or needs_weight else None
        saved_weight = weight if needs_x else None
        ctx.make_x, kept_x = kept_for(x, saved_x)
        ctx.save_for_backward(saved_weight, a, b, xa_TR if needs_b else None, keep_TK if needs_x or needs_a else None, *kept_x)
        ctx.branch_scale, ctx.quant_state, ctx.dtypes, ctx.x_shape, ctx.x_dtype = branch_scale, quant_state, dtypes, x.shape, x.dtype
        ctx.leaf_dtypes = weight.dtype, None if bias is None else bias.dtype, a_RK.dtype, b_OR.dtype
        return no_view(narrowed(y_TO, dtypes.out), (*x.shape[:-1], y_TO.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(
            "lora_linear", why="its backward is fused", fix="isotype.restore(model), or isotype.lora.unfuse_lora(model)"
        )
        weight, a, b, xa_TR, keep_TK, *kept_x = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_a, needs_b = ctx.needs_input_grad[:5]
        weight_dtype, bias_dtype, a_dtype, b_dtype = ctx.leaf_dtypes
        compute, scale = ctx.dtypes.compute, ctx.branch_scale
        dx_TK = dweight = dbias = da = db = None
        with autocast_off(dy):
            dy_TO = dy.reshape(-1, dy.shape[-1])
            narrow_TO = dy_TO.to(compute)
            x_TK = kept_x[0] if ctx.make_x is None else made_again(ctx.make_x, kept_x).reshape(-1, a.shape[1])
            if ctx.make_x is not None and not ctx.dtypes.wide:
                x_TK = x_TK.to(compute)
            if needs_weight:
                dweight = (narrow_TO.t() @ x_TK.to(compute)).to(weight_dtype)
            if needs_bias:
                dbias = dy_TO.sum(0, dtype=torch.promote_types(torch.float32, dy_TO.dtype)).to(bias_dtype)
            if ctx.dtypes.wide:
                if needs_x:
                    dx_TK = (narrow_TO @ base_weight(weight, ctx.quant_state, compute)).to(ctx.x_dtype)
                da, db = wide_branch.gradients(dy_TO, x_TK, xa_TR, keep_TK, a, b, scale, dx_TK, needs_a=needs_a, needs_b=needs_b)
            else:
                if needs_x or needs_a:
                    dxa_TR = scaled_product(narrow_TO, b)
                if needs_b:
                    db = gradient_product(narrow_TO, xa_TR, scale, b_dtype)
                if needs_a:
                    da = gradient_product(dxa_TR, after_dropout(x_TK, keep_TK), scale, a_dtype)
                if needs_x:
                    w_OK = base_weight(weight, ctx.quant_state, compute)
                    if keep_TK is None and adds_in_place(ctx.x_dtype, dxa_TR, a):
                        dx_TK = add_product_(narrow_TO @ w_OK, dxa_TR, a, scale)
                    else:
                        dx_TK = input_gradient(after_dropout(dxa_TR @ a, keep_TK), scale, narrow_TO, w_OK, ctx.x_dtype)
            da = None if da is None else da.to(a_dtype)
            db = None if db is None else db.to(b_dtype)
            dx = None if dx_TK is None else dx_TK.to(ctx.x_dtype).view(ctx.x_shape)
        return dx, dweight, dbias, da, db, None, None, None, None


def lora_linear(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    dropout: float = 0.0,
    quant_state: Any = None,
    compute_dtype: torch.dtype | None = None,
    branch_fp32: bool = False,
) -> Tensor:
    """x Wᵀ + bias + scale (dropout(x) Aᵀ) Bᵀ, fused, in the dtypes of PEFT's layer.

    x        X[*n k]
    weight   W[o k]     dense, or packed by bitsandbytes with its `quant_state`
    a, b     A[r k], A[o r]
    bias     any float dtype [o], or None
    ->       Y[*n o]    autocast's dtype, else X; of a 4-bit weight always X
    inside   Y; a 4-bit weight: `compute_dtype`, else X; adapter gradients are summed in fp32; the branch is fp32 where
             `branch_fp32` asks for it, and where PEFT computes it in a dtype that is not the product's
    grads    each in its tensor's dtype; none for a 4-bit weight
    Raises   DtypeError DT001 when autocast is off and X is not W; ShapeError SH001
    """
    rank, features = a.shape
    if x.shape[-1] != features or b.shape[-1] != rank:
        raise ShapeError(f"x is {list(x.shape)}, a {list(a.shape)}, b {list(b.shape)}, declared [*n k], [r k], [o r]", code="SH001")
    weight_dtype = weight.dtype if quant_state is None else compute_dtype or x.dtype
    adapter_dtype = torch.promote_types(a.dtype, b.dtype)
    dtypes = decide(x, weight_dtype, adapter_dtype, quantised=quant_state is not None, branch_fp32=branch_fp32)
    keep = None
    if dropout > 0.0:
        keep, scale = dropout_mask(x, dropout), dropped_scale(scale, dropout)
    out: Tensor = applied(LoraLinear, x, weight, bias, a, b, keep, scale, quant_state, dtypes)
    return out

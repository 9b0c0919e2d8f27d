"""Several LoRA linears of one input (Q, K and V; gate and up) in one autograd function: x meets every A in one product.

Saved for backward: x once, x Aᵀ of all projections together, the weights, A and B as cast down. The input's gradient is one sum.

T tokens, K in features, O out features of a projection, R ranks of all projections together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.autocast import autocast_off
from .dtypes import LoraDtypes
from .linear import base_product, base_weight
from .products import gradient_product


class Projection(NamedTuple):
    """One member's tensors: weight [O K] or packed, bias [O] or None, a [r K], b [O r], and the state of a 4-bit weight."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    quant_state: Any


class LoraGroup(torch.autograd.Function):
    """`lora_group` with its dtypes decided; tensors come flat, four a projection."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, quant_states: tuple[Any, ...], dtypes: LoraDtypes, *flat: Tensor | None) -> Any:
        weights, biases, a_masters, b_masters = (flat[i::4] for i in range(4))
        x_TK = x.reshape(-1, x.shape[-1])
        with autocast_off(x):
            x_TK = x_TK.to(dtypes.compute)
            a_RK = torch.cat([a.to(dtypes.compute) for a in a_masters])  # type: ignore[union-attr]
            bs = [b.to(dtypes.compute) for b in b_masters]  # type: ignore[union-attr]
            xa_TR = x_TK @ a_RK.t()
            ys = []
            for weight, bias, b, state, part in zip(weights, biases, bs, quant_states, parts(bs)):
                assert weight is not None
                y_TO = base_product(x_TK, weight, bias, state).addmm_(xa_TR[:, part], b.t(), alpha=scale)
                ys.append(y_TO.to(dtypes.out).view(*x.shape[:-1], y_TO.shape[-1]))
        ctx.save_for_backward(x_TK, a_RK, xa_TR, *bs, *weights)
        ctx.scale, ctx.quant_states, ctx.dtypes, ctx.x_shape, ctx.x_dtype = scale, quant_states, dtypes, x.shape, x.dtype
        ctx.leaf_dtypes = [None if t is None else t.dtype for t in flat]
        # an output nobody used has no gradient, and costs no product
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        n, scale, compute = len(dys), ctx.scale, ctx.dtypes.compute
        x_TK, a_RK, xa_TR, *rest = ctx.saved_tensors
        bs, weights = rest[:n], rest[n:]
        needs = ctx.needs_input_grad[4:]
        grads: list[Tensor | None] = [None] * len(needs)
        used = [i for i in range(n) if dys[i] is not None]
        if not used:
            return None, None, None, None, *grads
        slices = parts(bs)
        with autocast_off(x_TK):
            dxa_TR = torch.zeros_like(xa_TR)
            narrow: dict[int, Tensor] = {}
            for i in used:
                dy = dys[i]
                assert dy is not None
                dy_TO = dy.reshape(-1, dy.shape[-1])
                narrow[i] = dy_TO.to(compute)
                dxa_TR[:, slices[i]] = narrow[i] @ bs[i]
                if needs[4 * i]:
                    grads[4 * i] = (narrow[i].t() @ x_TK).to(ctx.leaf_dtypes[4 * i])
                if needs[4 * i + 1]:
                    grads[4 * i + 1] = dy_TO.sum(0, dtype=torch.promote_types(torch.float32, dy_TO.dtype)).to(ctx.leaf_dtypes[4 * i + 1])
                if needs[4 * i + 3]:
                    grads[4 * i + 3] = gradient_product(narrow[i], xa_TR[:, slices[i]], scale, ctx.leaf_dtypes[4 * i + 3])
            wanted = [i for i in used if needs[4 * i + 2]]
            if wanted:
                widest = torch.float32 if compute != torch.float64 else compute
                da_RK = gradient_product(dxa_TR, x_TK, scale, widest)
                for i in wanted:
                    grads[4 * i + 2] = da_RK[slices[i]].to(ctx.leaf_dtypes[4 * i + 2])
            dx = None
            if ctx.needs_input_grad[0]:
                products = ((narrow[i], base_weight(weights[i], ctx.quant_states[i], compute)) for i in used)
                dx = _input_gradient(dxa_TR @ a_RK, scale, products, ctx.x_dtype).view(ctx.x_shape)
        return dx, None, None, None, *grads


def parts(bs: list[Tensor]) -> list[slice]:
    """The columns of x Aᵀ that belong to each projection."""
    ends = [0]
    for b in bs:
        ends.append(ends[-1] + b.shape[1])
    return [slice(ends[i], ends[i + 1]) for i in range(len(bs))]


def _input_gradient(share_TK: Tensor, scale: float, products: Any, dtype: torch.dtype) -> Tensor:
    """scale * share + the products' sum in `dtype`; `share` is overwritten. One weight is dequantised at a time."""
    if dtype == share_TK.dtype:
        factor = scale
        for dy_TO, w_OK in products:
            share_TK.addmm_(dy_TO, w_OK, beta=factor)
            factor = 1.0
        return share_TK
    dx_TK = share_TK.to(dtype).mul_(scale)
    for dy_TO, w_OK in products:
        dx_TK.add_(dy_TO @ w_OK)
    return dx_TK


def lora_group(x: Tensor, projections: list[Projection], scale: float, dtypes: LoraDtypes) -> tuple[Tensor, ...]:
    """What `lora_linear` gives for each projection, without dropout, for one scale and one decision of dtypes (no wide branch)."""
    assert not dtypes.wide
    flat = [t for p in projections for t in p[:4]]
    return LoraGroup.apply(x, scale, tuple(p.quant_state for p in projections), dtypes, *flat)

"""`lora_mlp`: down(activation(gate(x)) * up(x)) with LoRA on any of the three, in one autograd function.

Saved for backward: x, gate's and up's outputs, and tokens x rank; neither the activation nor the product, which one pass makes again
together with their gradients. Gate and up may be one layer of twice the width.

T tokens, K in features, I inner features, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.autocast import autocast_off, no_view
from ..ops.gated import Gated, gated_gradients, gated_product
from .dtypes import LoraDtypes
from .group import TENSORS, Projection, branch_gradient, input_gradient, multiply, parts, tensor_gradients, wants_input


def halves(ys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(gate, up) of two layers' outputs, or of one layer's."""
    gate, up = ys if len(ys) == 2 else ys[0].chunk(2, dim=-1)
    return gate, up


class LoraMlp(torch.autograd.Function):
    """`lora_mlp`; tensors come flat, TENSORS a projection, down's last."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kind: Gated, scales: tuple[float, ...], states: tuple[Any, ...], dtypes: LoraDtypes, *flat: Tensor | None
    ) -> Tensor:
        needs = ctx.needs_input_grad[5:]
        x_TK = x.reshape(-1, x.shape[-1])
        with autocast_off(x):
            x_TK = x_TK.to(dtypes.compute)
            inner = multiply(x_TK, flat[:-TENSORS], scales[:-1], states[:-1])
            outer = multiply(gated_product(kind, *halves(inner.ys)), flat[-TENSORS:], scales[-1:], states[-1:])
        saved_x = x_TK if wants_input(needs[:-TENSORS]) else None
        ctx.save_for_backward(
            saved_x, inner.xa_TR, inner.a_RK, outer.xa_TR, outer.a_RK,
            *inner.ys, *inner.bs, *outer.bs, *flat[0::TENSORS], *flat[4::TENSORS],
        )  # fmt: skip
        ctx.kind, ctx.scales, ctx.states, ctx.dtypes, ctx.x_shape, ctx.x_dtype = kind, scales, states, dtypes, x.shape, x.dtype
        ctx.leaf_dtypes = [None if t is None else t.dtype for t in flat]
        return no_view(outer.ys[0], (*x.shape[:-1], outer.ys[0].shape[-1]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, leaves, scales, states = ctx.needs_input_grad[5:], ctx.leaf_dtypes, ctx.scales, ctx.states
        x_TK, xa_TR, a_RK, ha_TR, a_RI, *rest = ctx.saved_tensors
        n = len(scales) - 1
        ys, bs, weights, keeps = rest[:n], rest[n : 2 * n + 1], rest[2 * n + 1 : 3 * n + 2], rest[3 * n + 2 :]
        compute = ctx.dtypes.compute
        with autocast_off(dy):
            # down: its input's gradient first, because its input is made again in the same pass as gate's and up's gradients
            dy_TK = dy.reshape(-1, dy.shape[-1])
            narrow, slices = [dy_TK.to(compute)], parts(bs[-1:])
            dha_TR = branch_gradient(narrow, bs[-1:], scales[-1:], ha_TR)
            dh_TI = input_gradient(dha_TR, a_RI, narrow, weights[-1:], states[-1:], keeps[-1:], slices, compute)
            dgate_TI, dup_TI, h_TI = gated_gradients(ctx.kind, *halves(ys), dh_TI)
            del dh_TI
            last = tensor_gradients(
                h_TI, ha_TR, dha_TR, narrow, [dy_TK], scales[-1:], keeps[-1:], slices, needs[-TENSORS:], leaves[-TENSORS:]
            )  # fmt: skip
            del h_TI
            dys = [dgate_TI, dup_TI] if n == 2 else [torch.cat((dgate_TI, dup_TI), -1)]
            slices = parts(bs[:-1])
            dxa_TR = branch_gradient(dys, bs[:-1], scales[:-1], xa_TR)
            first = tensor_gradients(
                x_TK, xa_TR, dxa_TR, dys, dys, scales[:-1], keeps[:-1], slices, needs[:-TENSORS], leaves[:-TENSORS]
            )  # fmt: skip
            dx = None
            if ctx.needs_input_grad[0]:
                dx = input_gradient(dxa_TR, a_RK, dys, weights[:-1], states[:-1], keeps[:-1], slices, ctx.x_dtype).view(ctx.x_shape)
        return dx, None, None, None, None, *first, *last


def lora_mlp(x: Tensor, inner: Sequence[Projection], down: Projection, kind: Gated, dtypes: LoraDtypes) -> Tensor:
    """down(activation(gate) * up), where gate and up are `inner`'s two outputs, or the halves of its one.

    x       any float [*n K]
    ->      Y[*n K]   the one dtype that all three layers compute and answer in
    grads   each in its tensor's dtype; adapter gradients are summed in fp32
    """
    assert not dtypes.wide
    assert dtypes.out == dtypes.compute
    every = [*inner, down]
    flat = [t for p in every for t in p.tensors]
    out: Tensor = LoraMlp.apply(x, kind, tuple(p.scale for p in every), tuple(p.quant_state for p in every), dtypes, *flat)
    return out

"""Several LoRA linears of one input (Q, K and V; gate and up) in one autograd function: x meets
every A in one product.

Saved for backward: x once (or what x is made from: `ops.recomputable`), x Aᵀ of all projections together,
the weights, A and B, and a byte an element for each dropout. The input's gradient is one sum. The
pieces are functions of their own because the gated MLP (`mlp`) puts them together otherwise.

T tokens, K in features, O out features of a projection, R ranks of all projections together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.backend import autocast_off, direct_apply, disable_autocast, refuse_second_derivative
from ..ops.recomputable import recompute, saved_or_recomputed
from .linear import (
    LoraDtypes,
    Projection,
    adapted_product,
    adapter_first,
    after_dropout,
    base_product,
    base_weight,
    dropout_mask,
    dropped_scale,
)
from .products import (
    SKINNY,
    add_product_,
    adds_in_place,
    at_once,
    cast_down,
    casts_again,
    gradient_product,
    scaled_product,
)
from .quantised import bias_gradient

# tensors that are given to autograd for each projection: weight, bias, a, b, and bool[T K], what
# the dropout before A keeps
TENSORS = 5


# x Aᵀ of all projections, and A and B as cast down: of all in one tensor, and of each
Branches = tuple[Tensor, Tensor, list[Tensor | None]]
Narrow = tuple[Tensor, list[Tensor | None]]


def parts(bs: Sequence[Tensor | None]) -> list[slice]:
    """The columns of x Aᵀ that belong to each projection: none without an adapter."""
    found = []
    start = 0
    for b in bs:
        end = start if b is None else start + b.shape[1]
        found.append(slice(start, end))
        start = end
    return found


def all_none(tensors: Sequence[Tensor | None]) -> bool:
    # asked at every call: no generator
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None:
            return False
    return True


def branches(
    x_TK: Tensor, flat: Sequence[Tensor | None], down: Narrow | None = None, *, now: bool = False
) -> Branches:
    """The adapters' part of `multiply` that backward needs too."""
    if down is None:
        down = cast_down(flat[2::TENSORS], flat[3::TENSORS], x_TK, x_TK.shape[1], x_TK.dtype)
    a_RK, bs = down
    if not a_RK.shape[0]:
        return x_TK[:, :0], a_RK, bs
    keeps = flat[4::TENSORS]
    if all_none(keeps):
        return scaled_product(x_TK, a_RK.t(), now=now), a_RK, bs
    return (
        torch.cat(
            [after_dropout(x_TK, keep) @ a_RK[part].t() for keep, part in zip(keeps, parts(bs))], 1
        ),
        a_RK,
        bs,
    )


def multiply(
    x: Tensor,
    flat: Sequence[Tensor | None],
    scales: Sequence[float],
    states: Sequence[Any],
    down: Narrow | None = None,
    *,
    now: bool = False,
) -> tuple[list[Tensor], Branches]:
    """Every projection of x, in x's dtype and dimensions, and what backward needs of their
    adapters.

    down  what `cast_down` gave, for all tiles
    now   what `at_once` says of the adapters' products
    """
    x_TK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    xa_TR, a_RK, bs = branches(x_TK, flat, down, now=now)
    before = not now and adapter_first(x_TK)
    start = 0
    ys = []
    for i, b in enumerate(bs):
        weight = flat[TENSORS * i]
        bias = flat[TENSORS * i + 1]
        assert weight is not None
        if b is None:
            ys.append(base_product(x_TK, weight, bias, states[i]))
            continue
        end = start + b.shape[1]
        ys.append(
            adapted_product(
                x,
                weight,
                bias,
                states[i],
                xa_TR[:, start:end],
                b,
                scales[i],
                before=before,
                now=now,
            )
        )
        start = end
    return ys, (xa_TR, a_RK, bs)


def branch_gradient(
    dys: Sequence[Tensor | None],
    bs: Sequence[Tensor | None],
    scales: Sequence[float],
    like_TR: Tensor,
    *,
    now: bool = False,
) -> Tensor:
    """Of x Aᵀ, scaled: scale dy B, zero where an output was not used."""
    if like_TR.shape[1] == 0:
        return like_TR
    columns = []
    for dy, b, scale in zip(dys, bs, scales):
        if b is not None:
            columns.append(
                scaled_product(dy, b, scale, now=now)
                if dy is not None
                else b.new_zeros(like_TR.shape[0], b.shape[1])
            )
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def input_gradient(
    dxa_TR: Tensor,
    a_RK: Tensor,
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    states: Sequence[Any],
    keeps: Sequence[Tensor | None] | None,
    slices: Sequence[slice],
    dtype: torch.dtype,
    *,
    now: bool = False,
) -> Tensor:
    """The branches' share and every dy W in one sum, in `dtype`. One weight is dequantised at a
    time.

    The small share is rounded to the products' dtype, and each large product is summed onto it
    inside itself; or, where the kernels run, the share is added to the sum unrounded.

    keeps  None where there is no dropout
    """
    share_TK = None
    last = False
    if keeps is None:
        last = (now and dtype == dxa_TR.dtype and 0 < a_RK.shape[0] <= SKINNY) or adds_in_place(
            dtype, dxa_TR, a_RK
        )
        share_TK = dxa_TR @ a_RK if a_RK.shape[0] and not last else None
    else:
        for keep, part in zip(keeps, slices):
            if part.stop > part.start:
                one_TK = after_dropout(dxa_TR[:, part] @ a_RK[part], keep)
                share_TK = one_TK if share_TK is None else share_TK.add_(one_TK)
    dx_TK = None if share_TK is None else share_TK.to(dtype)
    for dy, weight, state in zip(dys, weights, states):
        if dy is not None:
            if state is None and weight.dtype == dxa_TR.dtype:
                w_OK = weight
            else:
                w_OK = base_weight(weight, state, dxa_TR.dtype)
            if dx_TK is None:
                dx_TK = (dy @ w_OK).to(dtype)
            elif dtype == dy.dtype:
                dx_TK.addmm_(dy, w_OK)
            else:
                dx_TK.add_(dy @ w_OK)
    assert dx_TK is not None
    if last:
        return add_product_(dx_TK, dxa_TR, a_RK, now=now)
    return dx_TK


def tensor_gradients(
    x_TK: Tensor | None,
    xa_TR: Tensor,
    dxa_TR: Tensor,
    dys: Sequence[Tensor | None],
    wide_dys: Sequence[Tensor | None],
    scales: Sequence[float],
    keeps: Sequence[Tensor | None] | None,
    slices: Sequence[slice],
    needs: Sequence[bool],
    dtypes: Sequence[torch.dtype | None],
    *,
    now: bool = False,
) -> list[Tensor | None]:
    """Of every tensor that `multiply` was given, in its dtype; x is needed where a weight or an A
    has one.

    dys       in the products' dtype
    wide_dys  as they came, for the biases
    keeps     None where there is no dropout
    """
    grads: list[Tensor | None] = [None] * len(needs)
    together: Tensor | None = None
    for i, dy in enumerate(dys):
        weight = TENSORS * i
        bias = weight + 1
        a = weight + 2
        b = weight + 3
        wide_dy = wide_dys[i]
        if dy is None or wide_dy is None:
            continue
        if needs[weight]:
            assert x_TK is not None
            grads[weight] = (dy.t() @ x_TK).to(dtypes[weight])
        if needs[bias]:
            grads[bias] = bias_gradient(wide_dy, dtypes[bias])  # type: ignore[arg-type]  # a bias that has a gradient has a dtype
        if needs[b]:
            grads[b] = gradient_product(dy, xa_TR[:, slices[i]], scales[i], dtypes[b], now=now)  # type: ignore[arg-type]  # as above, of B
        if needs[a]:
            assert x_TK is not None
            widest = torch.promote_types(torch.float32, x_TK.dtype)
            if keeps is None:
                if together is None:
                    together = gradient_product(dxa_TR, x_TK, 1.0, widest, now=now)
                else:
                    together = together
                da = together[slices[i]]
            else:
                da = gradient_product(
                    dxa_TR[:, slices[i]], after_dropout(x_TK, keeps[i]), 1.0, widest, now=now
                )
            grads[a] = da.to(dtypes[a])
    return grads


def wants_input(needs: Sequence[bool]) -> bool:
    """Whether backward reads the projections' input: for a weight's or an A's gradient."""
    return any(needs[0::TENSORS]) or any(needs[2::TENSORS])


class LoraGroup(torch.autograd.Function):
    """`lora_group` with its dtypes decided; tensors come flat, TENSORS a projection."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scales: tuple[float, ...],
        states: tuple[Any, ...],
        dtypes: LoraDtypes,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        compute, out, _ = dtypes
        now = at_once(compute, x)
        with disable_autocast() if now else autocast_off(x):
            low = x if x.dtype == compute else x.to(compute)
            ys, (xa_TR, a_RK, bs) = multiply(low, flat, scales, states, now=now)
        if out != compute:
            ys = [y.to(out) for y in ys]
        ctx.make_x, kept_x = saved_or_recomputed(
            x, low.reshape(-1, x.shape[-1]) if wants_input(ctx.needs_input_grad[4:]) else None
        )
        ctx.again = casts_again(x)
        adapters = (*flat[2::TENSORS], *flat[3::TENSORS]) if ctx.again else (a_RK, *bs)
        ctx.save_for_backward(xa_TR, *flat[0::TENSORS], *flat[4::TENSORS], *adapters, *kept_x)
        ctx.given = scales, states, compute, x.shape, x.dtype, now
        ctx.leaf_dtypes = [None if t is None else t.dtype for t in flat]
        # an output nobody used has no gradient, and costs no product
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("lora_group")
        n = len(dys)
        needs = ctx.needs_input_grad[4:]
        xa_TR, *rest = ctx.saved_tensors
        weights = rest[:n]
        keeps = rest[n : 2 * n]
        rest = rest[2 * n :]
        if all_none(dys):
            return (None,) * (4 + len(needs))
        scales, states, compute, x_shape, x_dtype, now = ctx.given
        if ctx.again:
            (a_RK, bs), kept_x = (
                cast_down(rest[:n], rest[n : 2 * n], xa_TR, x_shape[-1], compute),
                rest[2 * n :],
            )
        else:
            a_RK = rest[0]
            bs = rest[1 : n + 1]
            kept_x = rest[n + 1 :]
        keeps = None if all_none(keeps) else keeps
        slices = parts(bs)
        now = now and not torch._C._len_torch_dispatch_stack()
        with disable_autocast() if now else autocast_off(xa_TR):
            came = [None if dy is None else dy.reshape(-1, dy.shape[-1]) for dy in dys]
            down = [None if dy is None else dy.to(compute) for dy in came]
            dxa_TR = branch_gradient(down, bs, scales, xa_TR, now=now)
            if ctx.make_x is None:
                x_TK = kept_x[0]
            else:
                x_TK = recompute(ctx.make_x, kept_x).reshape(-1, a_RK.shape[1]).to(compute)
            grads = tensor_gradients(
                x_TK,
                xa_TR,
                dxa_TR,
                down,
                came,
                scales,
                keeps,
                slices,
                needs,
                ctx.leaf_dtypes,
                now=now,
            )
            dx = None
            if ctx.needs_input_grad[0]:
                dx = input_gradient(
                    dxa_TR, a_RK, down, weights, states, keeps, slices, x_dtype, now=now
                ).view(x_shape)
        return dx, None, None, None, *grads


_apply = direct_apply(LoraGroup)


def flattened(
    x: Tensor, calls: Sequence[Projection]
) -> tuple[list[Tensor | None], tuple[float, ...], tuple[Any, ...]]:
    """(the tensors of projections of x, TENSORS each, their branches' scales, states of 4-bit
    weights): what an autograd function takes.

    Dropouts are drawn in the order in which PEFT's layers would draw them, and their factor goes
    into the scale.
    """
    flat: list[Tensor | None] = []
    scales = []
    states = []
    for weight, bias, a, b, state, scale, dropout, _ in calls:
        keep = dropout_mask(x, dropout).reshape(-1, x.shape[-1]) if dropout else None
        flat += (weight, bias, a, b, keep)
        scales.append(dropped_scale(scale, dropout) if dropout else scale)
        states.append(state)
    return flat, tuple(scales), tuple(states)


def lora_group(x: Tensor, calls: Sequence[Projection], dtypes: LoraDtypes) -> tuple[Tensor, ...]:
    """What `lora_linear` gives for each projection, for one decision of dtypes (no wide branch).
    Not under torch.func or in a graph.
    """
    assert not dtypes.wide
    flat, scales, states = flattened(x, calls)
    outs: tuple[Tensor, ...] = _apply(x, scales, states, dtypes, *flat)
    return outs

"""Several LoRA linears of one input (Q, K and V; gate and up) in one autograd function: x meets every A in one product.

Saved for backward: x once (or what x is made from: `ops.remade`), x Aᵀ of all projections together, the weights, A and B as cast down, and
a byte an element for each dropout. The input's gradient is one sum. The pieces are functions of their own because the gated MLP (`mlp`)
puts them together otherwise.

T tokens, K in features, O out features of a projection, R ranks of all projections together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.autocast import autocast_off, narrowed, no_view
from ..ops.backend import applied, refuse_second_derivative
from ..ops.remade import kept_for, made_again
from . import inside
from .dtypes import LoraDtypes
from .linear import adapted_product, after_dropout, base_product, base_weight, out_features
from .narrow import narrow, stacked
from .products import add_product_, adds_in_place, gradient_product, scaled_product


class Projection(NamedTuple):
    """One member: weight [O K] or packed with the state of a 4-bit weight, bias [O] or None, a [r K] and b [O r] or None without adapter.

    scale   of the branch, the dropout's 1 / (1 - p) included
    keep    bool[T K]: what the dropout before A keeps; None where there is none
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    quant_state: Any
    scale: float = 1.0
    keep: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that are given to autograd, TENSORS of them. The result depends on the first four."""
        return self.weight, self.bias, self.a, self.b, self.keep


TENSORS = 5


class Multiplied(NamedTuple):
    """What the projections of one input gave, and what backward needs of it."""

    ys: list[Tensor]
    xa_TR: Tensor
    a_RK: Tensor
    bs: list[Tensor | None]


def parts(bs: Sequence[Tensor | None]) -> list[slice]:
    """The columns of x Aᵀ that belong to each projection: none without an adapter."""
    ends = [0]
    for b in bs:
        ends.append(ends[-1] + (0 if b is None else b.shape[1]))
    return [slice(ends[i], ends[i + 1]) for i in range(len(bs))]


class Branches(NamedTuple):
    """x Aᵀ of all projections, and A and B as cast down."""

    xa_TR: Tensor
    a_RK: Tensor
    bs: list[Tensor | None]


Narrow = tuple[Tensor, list[Tensor | None]]


def cast_down(flat: Sequence[Tensor | None], dtype: torch.dtype, features: int) -> Narrow:
    """Every A in one tensor, and each B, in the products' dtype."""
    every_a = [a for a in flat[2::TENSORS] if a is not None]
    bs = [None if b is None else narrow(b, dtype) for b in flat[3::TENSORS]]
    if not every_a:
        weight = flat[0]
        assert weight is not None
        return torch.empty(0, features, dtype=dtype, device=weight.device), bs
    return stacked(every_a, dtype), bs


def branches(x_TK: Tensor, flat: Sequence[Tensor | None], down: Narrow | None = None) -> Branches:
    """The adapters' part of `multiply` that backward needs too."""
    keeps = flat[4::TENSORS]
    a_RK, bs = cast_down(flat, x_TK.dtype, x_TK.shape[1]) if down is None else down
    if not a_RK.shape[0]:
        return Branches(x_TK[:, :0], a_RK, bs)
    if all(keep is None for keep in keeps):
        return Branches(scaled_product(x_TK, a_RK.t()), a_RK, bs)
    parted = zip(keeps, parts(bs))
    return Branches(torch.cat([after_dropout(x_TK, keep) @ a_RK[part].t() for keep, part in parted], 1), a_RK, bs)


def with_adapters(tokens_TK: Tensor, flat: Sequence[Tensor | None], scales: Sequence[float], states: Sequence[Any]) -> list[Tensor] | None:
    """[W | s B] of every projection where `inside` wants the adapters in the product of these tokens, or None."""
    bs, packed = flat[3::TENSORS], [w for w in flat[0::TENSORS] if w is not None]
    ranks = [0 if b is None else b.shape[1] for b in bs]
    if not inside.wanted(tokens_TK, [out_features(w, state) for w, state in zip(packed, states)], ranks, states):
        return None
    return inside.weights(packed, states, [b for b in bs if b is not None], scales, tokens_TK.dtype)


def multiply(
    x_TK: Tensor,
    flat: Sequence[Tensor | None],
    scales: Sequence[float],
    states: Sequence[Any],
    ready: Sequence[Tensor] | None = None,
    down: Narrow | None = None,
) -> Multiplied:
    """Every projection of x, in x's dtype.

    ready  what `with_adapters` gave for tokens of which x is a tile
    down   what `cast_down` gave, for all tiles
    """
    made = branches(x_TK, flat, down)
    before = inside.before_or_inside(x_TK)
    if ready is None and before:
        ready = with_adapters(x_TK, flat, scales, states)
    if ready is not None:
        both = inside.inputs(x_TK, made.xa_TR)
        biases = [None if bias is None else bias.to(x_TK.dtype) for bias in flat[1::TENSORS]]
        return Multiplied([F.linear(both, weight, bias) for weight, bias in zip(ready, biases)], *made)
    ys = []
    for weight, bias, b, state, part, scale in zip(flat[0::TENSORS], flat[1::TENSORS], made.bs, states, parts(made.bs), scales):
        assert weight is not None
        if b is None:
            ys.append(base_product(x_TK, weight, bias, state))
        else:
            ys.append(adapted_product(x_TK, weight, bias, state, made.xa_TR[:, part], b, scale, before=before))
    return Multiplied(ys, *made)


def branch_gradient(dys: Sequence[Tensor | None], bs: Sequence[Tensor | None], scales: Sequence[float], like_TR: Tensor) -> Tensor:
    """Of x Aᵀ, scaled: scale dy B, zero where an output was not used."""
    if like_TR.shape[1] == 0:
        return like_TR
    columns = [
        scaled_product(dy, b, scale) if dy is not None else b.new_zeros(like_TR.shape[0], b.shape[1])
        for dy, b, scale in zip(dys, bs, scales)
        if b is not None
    ]
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def input_gradient(
    dxa_TR: Tensor,
    a_RK: Tensor,
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    states: Sequence[Any],
    keeps: Sequence[Tensor | None],
    slices: Sequence[slice],
    dtype: torch.dtype,
) -> Tensor:
    """The branches' share and every dy W in one sum, in `dtype`. One weight is dequantised at a time.

    The small share is rounded to the products' dtype, and each large product is summed onto it inside itself; or, where the kernels
    run, the share is added to the sum unrounded.
    """
    share_TK = None
    plain, last = all(keep is None for keep in keeps), False
    if plain:
        last = adds_in_place(dtype, dxa_TR, a_RK)
        share_TK = dxa_TR @ a_RK if a_RK.shape[0] and not last else None
    else:
        for keep, part in zip(keeps, slices):
            if part.stop > part.start:
                one_TK = after_dropout(dxa_TR[:, part] @ a_RK[part], keep)
                share_TK = one_TK if share_TK is None else share_TK.add_(one_TK)
    dx_TK = None if share_TK is None else share_TK.to(dtype)
    for dy, weight, state in zip(dys, weights, states):
        if dy is not None:
            w_OK = base_weight(weight, state, dxa_TR.dtype)
            if dx_TK is None:
                dx_TK = (dy @ w_OK).to(dtype)
            elif dtype == dy.dtype:
                dx_TK.addmm_(dy, w_OK)
            else:
                dx_TK.add_(dy @ w_OK)
    assert dx_TK is not None
    return add_product_(dx_TK, dxa_TR, a_RK) if last else dx_TK


def tensor_gradients(
    x_TK: Tensor | None,
    xa_TR: Tensor,
    dxa_TR: Tensor,
    dys: Sequence[Tensor | None],
    wide_dys: Sequence[Tensor | None],
    scales: Sequence[float],
    keeps: Sequence[Tensor | None],
    slices: Sequence[slice],
    needs: Sequence[bool],
    dtypes: Sequence[torch.dtype | None],
) -> list[Tensor | None]:
    """Of every tensor that `multiply` was given, in its dtype; x is needed where a weight or an A has one.

    dys       in the products' dtype
    wide_dys  as they came, for the biases
    """
    grads: list[Tensor | None] = [None] * len(needs)
    for i, (dy, wide_dy) in enumerate(zip(dys, wide_dys)):
        weight, bias, _, b, _ = range(TENSORS * i, TENSORS * (i + 1))
        if dy is None or wide_dy is None:
            continue
        if needs[weight]:
            assert x_TK is not None
            grads[weight] = (dy.t() @ x_TK).to(dtypes[weight])
        if needs[bias]:
            grads[bias] = wide_dy.sum(0, dtype=torch.promote_types(torch.float32, wide_dy.dtype)).to(dtypes[bias])
        if needs[b]:
            dtype = dtypes[b]
            assert dtype is not None
            grads[b] = gradient_product(dy, xa_TR[:, slices[i]], scales[i], dtype)
    wanted = [i for i, dy in enumerate(dys) if dy is not None and needs[TENSORS * i + 2]]
    if wanted:
        assert x_TK is not None
        widest = torch.promote_types(torch.float32, x_TK.dtype)
        together = gradient_product(dxa_TR, x_TK, 1.0, widest) if all(keep is None for keep in keeps) else None
        for i in wanted:
            if together is not None:
                da = together[slices[i]]
            else:
                da = gradient_product(dxa_TR[:, slices[i]], after_dropout(x_TK, keeps[i]), 1.0, widest)
            grads[TENSORS * i + 2] = da.to(dtypes[TENSORS * i + 2])
    return grads


def wants_input(needs: Sequence[bool]) -> bool:
    """Whether backward reads the projections' input: for a weight's or an A's gradient."""
    return any(needs[0::TENSORS]) or any(needs[2::TENSORS])


class LoraGroup(torch.autograd.Function):
    """`lora_group` with its dtypes decided; tensors come flat, TENSORS a projection."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scales: tuple[float, ...], states: tuple[Any, ...], dtypes: LoraDtypes, *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        x_TK = x.reshape(-1, x.shape[-1])
        with autocast_off(x):
            x_TK = narrowed(x_TK, dtypes.compute)
            made = multiply(x_TK, flat, scales, states)
            ys = tuple([no_view(narrowed(y, dtypes.out), (*x.shape[:-1], y.shape[-1])) for y in made.ys])
        saved_x = x_TK if wants_input(ctx.needs_input_grad[4:]) else None
        ctx.make_x, kept_x = kept_for(x, saved_x)
        ctx.save_for_backward(made.xa_TR, made.a_RK, *made.bs, *flat[0::TENSORS], *flat[4::TENSORS], *kept_x)
        ctx.scales, ctx.states, ctx.dtypes, ctx.x_shape, ctx.x_dtype = scales, states, dtypes, x.shape, x.dtype
        ctx.leaf_dtypes = [None if t is None else t.dtype for t in flat]
        # an output nobody used has no gradient, and costs no product
        ctx.set_materialize_grads(False)
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(
            "lora_group", why="its backward is fused", fix="isotype.restore(model), or isotype.lora.unfuse_lora(model)"
        )
        n, needs = len(dys), ctx.needs_input_grad[4:]
        xa_TR, a_RK, *rest = ctx.saved_tensors
        bs, weights, keeps, kept_x = rest[:n], rest[n : 2 * n], rest[2 * n : 3 * n], rest[3 * n :]
        if all(dy is None for dy in dys):
            return (None,) * (4 + len(needs))
        slices = parts(bs)
        with autocast_off(xa_TR):
            came = [None if dy is None else dy.reshape(-1, dy.shape[-1]) for dy in dys]
            narrow = [None if dy is None else dy.to(ctx.dtypes.compute) for dy in came]
            dxa_TR = branch_gradient(narrow, bs, ctx.scales, xa_TR)
            x_TK = kept_x[0] if ctx.make_x is None else made_again(ctx.make_x, kept_x).reshape(-1, a_RK.shape[1]).to(ctx.dtypes.compute)
            grads = tensor_gradients(x_TK, xa_TR, dxa_TR, narrow, came, ctx.scales, keeps, slices, needs, ctx.leaf_dtypes)
            dx = None
            if ctx.needs_input_grad[0]:
                dx = input_gradient(dxa_TR, a_RK, narrow, weights, ctx.states, keeps, slices, ctx.x_dtype).view(ctx.x_shape)
        return dx, None, None, None, *grads


def lora_group(x: Tensor, projections: Sequence[Projection], dtypes: LoraDtypes) -> tuple[Tensor, ...]:
    """What `lora_linear` gives for each projection, for one decision of dtypes (no wide branch)."""
    assert not dtypes.wide
    flat = [t for p in projections for t in (p.weight, p.bias, p.a, p.b, p.keep)]
    scales, states = tuple(p.scale for p in projections), tuple(p.quant_state for p in projections)
    outs: tuple[Tensor, ...] = applied(LoraGroup, x, scales, states, dtypes, *flat)
    return outs

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
    apply_dropout_mask,
    base_product,
    base_weight,
    draw_dropout_mask,
    scale_with_dropout,
    should_run_adapter_first,
)
from .products import (
    MAX_KERNEL_RANK,
    add_product_,
    can_add_in_one_pass,
    can_call_kernels_directly,
    cast_adapters,
    gradient_product,
    scaled_product,
    should_recast_adapters,
)
from .quantised import bias_gradient

# tensors that are given to autograd for each projection: weight, bias, a, b, and bool[T K], what
# the dropout before A keeps
FIELDS = 5


# x Aᵀ of all projections, and A and B as cast down: of all in one tensor, and of each
AdapterProducts = tuple[Tensor, Tensor, list[Tensor | None]]
CastAdapters = tuple[Tensor, list[Tensor | None]]


def rank_slices(b_matrices: Sequence[Tensor | None]) -> list[slice]:
    """The columns of x Aᵀ that belong to each projection: none without an adapter."""
    slices = []
    start = 0
    for b in b_matrices:
        end = start if b is None else start + b.shape[1]
        slices.append(slice(start, end))
        start = end
    return slices


def are_all_none(tensors: Sequence[Tensor | None]) -> bool:
    # asked at every call: no generator
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None:
            return False
    return True


def adapter_products(
    x_TK: Tensor,
    flat: Sequence[Tensor | None],
    adapters: CastAdapters | None = None,
    *,
    direct_kernels: bool = False,
) -> AdapterProducts:
    """The adapters' part of `multiply` that backward needs too."""
    if adapters is None:
        adapters = cast_adapters(
            flat[2::FIELDS],
            flat[3::FIELDS],
            x_TK,
            x_TK.shape[1],
            x_TK.dtype,
        )
    a_RK, b_matrices = adapters
    if not a_RK.shape[0]:
        return x_TK[:, :0], a_RK, b_matrices
    keeps = flat[4::FIELDS]
    if are_all_none(keeps):
        return scaled_product(x_TK, a_RK.t(), direct_kernels=direct_kernels), a_RK, b_matrices
    return (
        torch.cat(
            [
                apply_dropout_mask(x_TK, keep) @ a_RK[part].t()
                for keep, part in zip(keeps, rank_slices(b_matrices))
            ],
            1,
        ),
        a_RK,
        b_matrices,
    )


def compute_projections(
    x: Tensor,
    flat: Sequence[Tensor | None],
    scales: Sequence[float],
    states: Sequence[Any],
    adapters: CastAdapters | None = None,
    *,
    direct_kernels: bool = False,
) -> tuple[list[Tensor], AdapterProducts]:
    """Every projection of x, in x's dtype and dimensions, and what backward needs of their
    adapters.

    adapters  what `cast_down` gave, for all tiles
    direct_kernels  what `at_once` says of the adapters' products
    """
    x_TK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    xa_TR, a_RK, b_matrices = adapter_products(x_TK, flat, adapters, direct_kernels=direct_kernels)
    adapter_first = not direct_kernels and should_run_adapter_first(x_TK)
    start = 0
    outputs = []
    for i, b in enumerate(b_matrices):
        weight = flat[FIELDS * i]
        bias = flat[FIELDS * i + 1]
        assert weight is not None
        if b is None:
            outputs.append(base_product(x_TK, weight, bias, states[i]))
            continue
        end = start + b.shape[1]
        outputs.append(
            adapted_product(
                x,
                weight,
                bias,
                states[i],
                xa_TR[:, start:end],
                b,
                scales[i],
                adapter_first=adapter_first,
                direct_kernels=direct_kernels,
            )
        )
        start = end
    return outputs, (xa_TR, a_RK, b_matrices)


def branch_gradient(
    dys: Sequence[Tensor | None],
    b_matrices: Sequence[Tensor | None],
    scales: Sequence[float],
    like_TR: Tensor,
    *,
    direct_kernels: bool = False,
) -> Tensor:
    """Of x Aᵀ, scaled: scale dy B, zero where an output was not used."""
    if like_TR.shape[1] == 0:
        return like_TR
    columns = []
    for dy, b, scale in zip(dys, b_matrices, scales):
        if b is not None:
            columns.append(
                scaled_product(dy, b, scale, direct_kernels=direct_kernels)
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
    direct_kernels: bool = False,
) -> Tensor:
    """The branches' share and every dy W in one sum, in `dtype`. One weight is dequantised at a
    time.

    The small share is rounded to the products' dtype, and each large product is summed onto it
    inside itself; or, where the kernels run, the share is added to the sum unrounded.

    keeps  None where there is no dropout
    """
    adapter_dx_TK = None
    add_adapter_last = False
    if keeps is None:
        add_adapter_last = (
            direct_kernels and dtype == dxa_TR.dtype and 0 < a_RK.shape[0] <= MAX_KERNEL_RANK
        ) or can_add_in_one_pass(dtype, dxa_TR, a_RK)
        adapter_dx_TK = dxa_TR @ a_RK if a_RK.shape[0] and not add_adapter_last else None
    else:
        for keep, part in zip(keeps, slices):
            if part.stop > part.start:
                projection_dx_TK = apply_dropout_mask(dxa_TR[:, part] @ a_RK[part], keep)
                adapter_dx_TK = (
                    projection_dx_TK
                    if adapter_dx_TK is None
                    else adapter_dx_TK.add_(projection_dx_TK)
                )
    dx_TK = None if adapter_dx_TK is None else adapter_dx_TK.to(dtype)
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
    if add_adapter_last:
        return add_product_(dx_TK, dxa_TR, a_RK, direct_kernels=direct_kernels)
    return dx_TK


def tensor_gradients(
    x_TK: Tensor | None,
    xa_TR: Tensor,
    dxa_TR: Tensor,
    dys: Sequence[Tensor | None],
    incoming_dys: Sequence[Tensor | None],
    scales: Sequence[float],
    keeps: Sequence[Tensor | None] | None,
    slices: Sequence[slice],
    needs: Sequence[bool],
    dtypes: Sequence[torch.dtype | None],
    *,
    direct_kernels: bool = False,
) -> list[Tensor | None]:
    """Of every tensor that `multiply` was given, in its dtype; x is needed where a weight or an A
    has one.

    dys       in the products' dtype
    incoming_dys  as they came, for the biases
    keeps     None where there is no dropout
    """
    grads: list[Tensor | None] = [None] * len(needs)
    all_da_fp32: Tensor | None = None
    for i, dy in enumerate(dys):
        weight = FIELDS * i
        bias = weight + 1
        a = weight + 2
        b = weight + 3
        incoming_dy = incoming_dys[i]
        if dy is None or incoming_dy is None:
            continue
        if needs[weight]:
            assert x_TK is not None
            grads[weight] = (dy.t() @ x_TK).to(dtypes[weight])
        if needs[bias]:
            grads[bias] = bias_gradient(incoming_dy, dtypes[bias])  # type: ignore[arg-type]  # a bias that has a gradient has a dtype
        if needs[b]:
            grads[b] = gradient_product(
                dy,
                xa_TR[:, slices[i]],
                scales[i],
                dtypes[b],  # type: ignore[arg-type]  # as above, of B
                direct_kernels=direct_kernels,
            )
        if needs[a]:
            assert x_TK is not None
            sum_dtype = torch.promote_types(torch.float32, x_TK.dtype)
            if keeps is None:
                if all_da_fp32 is None:
                    all_da_fp32 = gradient_product(
                        dxa_TR, x_TK, 1.0, sum_dtype, direct_kernels=direct_kernels
                    )
                else:
                    all_da_fp32 = all_da_fp32
                da = all_da_fp32[slices[i]]
            else:
                da = gradient_product(
                    dxa_TR[:, slices[i]],
                    apply_dropout_mask(x_TK, keeps[i]),
                    1.0,
                    sum_dtype,
                    direct_kernels=direct_kernels,
                )
            grads[a] = da.to(dtypes[a])
    return grads


def needs_input(needs: Sequence[bool]) -> bool:
    """Whether backward reads the projections' input: for a weight's or an A's gradient."""
    return any(needs[0::FIELDS]) or any(needs[2::FIELDS])


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
        compute, output_dtype, _ = dtypes
        direct_kernels = can_call_kernels_directly(compute, x)
        with disable_autocast() if direct_kernels else autocast_off(x):
            x_compute = x if x.dtype == compute else x.to(compute)
            outputs, (xa_TR, a_RK, b_matrices) = compute_projections(
                x_compute, flat, scales, states, direct_kernels=direct_kernels
            )
        if output_dtype != compute:
            outputs = [y.to(output_dtype) for y in outputs]
        ctx.make_x, kept_x = saved_or_recomputed(
            x, x_compute.reshape(-1, x.shape[-1]) if needs_input(ctx.needs_input_grad[4:]) else None
        )
        ctx.recasts_adapters = should_recast_adapters(x)
        adapters = (
            (*flat[2::FIELDS], *flat[3::FIELDS]) if ctx.recasts_adapters else (a_RK, *b_matrices)
        )
        ctx.save_for_backward(
            xa_TR,
            *flat[0::FIELDS],
            *flat[4::FIELDS],
            *adapters,
            *kept_x,
        )
        ctx.settings = scales, states, compute, x.shape, x.dtype, direct_kernels
        ctx.leaf_dtypes = [None if t is None else t.dtype for t in flat]
        # an output nobody used has no gradient, and costs no product
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("lora_group")
        n = len(dys)
        needs = ctx.needs_input_grad[4:]
        xa_TR, *saved = ctx.saved_tensors
        weights = saved[:n]
        keeps = saved[n : 2 * n]
        saved = saved[2 * n :]
        if are_all_none(dys):
            return (None,) * (4 + len(needs))
        scales, states, compute, x_shape, x_dtype, direct_kernels = ctx.settings
        if ctx.recasts_adapters:
            (a_RK, b_matrices), kept_x = (
                cast_adapters(saved[:n], saved[n : 2 * n], xa_TR, x_shape[-1], compute),
                saved[2 * n :],
            )
        else:
            a_RK = saved[0]
            b_matrices = saved[1 : n + 1]
            kept_x = saved[n + 1 :]
        keeps = None if are_all_none(keeps) else keeps
        slices = rank_slices(b_matrices)
        direct_kernels = direct_kernels and not torch._C._len_torch_dispatch_stack()
        with disable_autocast() if direct_kernels else autocast_off(xa_TR):
            incoming_dys = [None if dy is None else dy.reshape(-1, dy.shape[-1]) for dy in dys]
            compute_dys = [None if dy is None else dy.to(compute) for dy in incoming_dys]
            dxa_TR = branch_gradient(
                compute_dys, b_matrices, scales, xa_TR, direct_kernels=direct_kernels
            )
            if ctx.make_x is None:
                x_TK = kept_x[0]
            else:
                x_TK = recompute(ctx.make_x, kept_x).reshape(-1, a_RK.shape[1]).to(compute)
            grads = tensor_gradients(
                x_TK,
                xa_TR,
                dxa_TR,
                compute_dys,
                incoming_dys,
                scales,
                keeps,
                slices,
                needs,
                ctx.leaf_dtypes,
                direct_kernels=direct_kernels,
            )
            dx = None
            if ctx.needs_input_grad[0]:
                dx = input_gradient(
                    dxa_TR,
                    a_RK,
                    compute_dys,
                    weights,
                    states,
                    keeps,
                    slices,
                    x_dtype,
                    direct_kernels=direct_kernels,
                ).view(x_shape)
        return dx, None, None, None, *grads


_apply = direct_apply(LoraGroup)


def flatten_projections(
    x: Tensor, projections: Sequence[Projection]
) -> tuple[list[Tensor | None], tuple[float, ...], tuple[Any, ...]]:
    """(the tensors of projections of x, TENSORS each, their branches' scales, states of 4-bit
    weights): what an autograd function takes.

    Dropouts are drawn in the order in which PEFT's layers would draw them, and their factor goes
    into the scale.
    """
    flat: list[Tensor | None] = []
    scales = []
    states = []
    for weight, bias, a, b, state, scale, dropout, _ in projections:
        keep = draw_dropout_mask(x, dropout).reshape(-1, x.shape[-1]) if dropout else None
        flat += (weight, bias, a, b, keep)
        scales.append(scale_with_dropout(scale, dropout) if dropout else scale)
        states.append(state)
    return flat, tuple(scales), tuple(states)


def lora_group(
    x: Tensor, projections: Sequence[Projection], dtypes: LoraDtypes
) -> tuple[Tensor, ...]:
    """What `lora_linear` gives for each projection, for one decision of dtypes (no wide branch).
    Not under torch.func or in a graph.
    """
    assert not dtypes.fp32_branch
    flat, scales, states = flatten_projections(x, projections)
    outputs: tuple[Tensor, ...] = _apply(x, scales, states, dtypes, *flat)
    return outputs

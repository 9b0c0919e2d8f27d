"""`lora_mlp` computes down(activation(gate(x)) * up(x)), with LoRA on any of the three layers, in
one autograd function.

These tensors are saved for backward: x, the outputs of gate and up, and the inputs multiplied by
the A matrices (tokens x rank). The result of the activation, and this result multiplied by the
output of up, are not saved. Backward computes both again at the same time as their gradients. Gate
and up may be a single layer of twice the width.

In a decoder layer that is recomputed (gradient checkpointing), backward may overwrite the outputs
of gate and up. On a GPU, backward writes the gradients of gate and up into the memory of their
outputs. It computes h and its gradient for a few tokens at a time. So at most two tensors with the
shape [tokens, inner features] exist at once, instead of six. If nothing reads the output of the
recomputed layer, the recompute does not multiply h by the base weight of `down`. Backward needs
only h multiplied by the LoRA matrix A of `down`.

T is the number of tokens, K the number of input features, I the number of inner features, and R the
rank. h is activation(gate) * up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.backend import (
    apply_function,
    autocast_off,
    eager_apply,
    fast_autocast_off,
    refuse_second_derivative,
    unsafe_view,
    uses_fused_kernel,
)
from ..ops.gated import Gated, gated_gradients, gated_gradients_, gated_product
from ..ops.recomputed_layer import (
    is_output_unused,
    is_recomputed,
    placeholder_tensor,
    running_checkpointed_layers,
)
from .attach import (
    FUSED,
    GLOBAL_FORWARD_HOOKS,
    GLOBAL_FORWARD_PRE_HOOKS,
    cached_dtypes,
    find_row_layers,
    fusion_blocker,
    has_hooks,
    is_fused,
    is_lora,
    projection_dtypes,
    read_projection,
    read_row_layers,
    read_unadapted_projection,
    shared_dtypes,
    unadapted_layer_blocker,
)
from .few_rows import RowLayers
from .group import (
    BIAS,
    FIELDS_PER_PROJECTION,
    KEEP_MASK,
    WEIGHT,
    A,
    AdapterProducts,
    B,
    CastAdapters,
    adapter_products,
    are_all_none,
    branch_gradient,
    compute_projections,
    flatten_projections,
    input_gradient,
    needs_input,
    rank_slices,
    tensor_gradients,
)
from .linear import (
    LoraDtypes,
    Projection,
    base_weight,
    draw_dropout_mask,
    out_features,
    scale_with_dropout,
)
from .products import (
    can_call_kernels_directly,
    cast_adapters,
    kept_row_layers,
    product_fp32,
    scaled_product,
)

# Tokens per tile. A product of 2,048 x 4,096 x 14,336 takes 0.3 ms on an H200, as long as 50
# launches. Its 896 output tiles of 128 x 256 occupy the 132 multiprocessors well. Gate, up and the
# gradient of their product are then 56 MB each
TILE_TOKENS = 2048


def split_gate_up(outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (gate, up), from the outputs of two layers or from the halves of one output."""
    if len(outputs) == 1:
        outputs = outputs[0].chunk(2, dim=-1)
    gate, up = outputs
    return gate, up


def _token_tiles(tokens: int) -> Iterator[slice]:
    return (
        slice(start, min(start + TILE_TOKENS, tokens))
        for start in range(0, max(tokens, 1), TILE_TOKENS)
    )


def _compute_mlp(
    gated_op: Gated,
    x_TK: Tensor,
    flat_tensors: Sequence[Tensor | None],
    scales: Sequence[float],
    states: Sequence[Any],
    *,
    skip_output: bool = False,
    adapters: tuple[CastAdapters | None, CastAdapters | None] = (None, None),
    calls_kernels_directly: bool = False,
) -> tuple[list[Tensor], AdapterProducts, AdapterProducts, Tensor]:
    """Returns (outputs of gate and up, `AdapterProducts` of gate and up, `AdapterProducts` of down,
    output of down).

    skip_output  whether nothing reads the output; the output is then not computed
    adapters     the result of `_cast_mlp_adapters`, if several tiles share it
    """
    gate_up, inner = compute_projections(
        x_TK,
        flat_tensors[:-FIELDS_PER_PROJECTION],
        scales[:-1],
        states[:-1],
        adapters[0],
        calls_kernels_directly=calls_kernels_directly,
    )
    gate, up = split_gate_up(gate_up)
    down = flat_tensors[-FIELDS_PER_PROJECTION:]
    if skip_output:
        weight = down[WEIGHT]
        assert weight is not None
        output_shape = (x_TK.shape[0], out_features(weight, states[-1]))
        output = placeholder_tensor(output_shape, x_TK, x_TK.dtype)
        return gate_up, inner, _down_adapter_products(gated_op, gate, up, down), output
    (output,), outer = compute_projections(
        gated_product(gated_op, gate, up),
        down,
        scales[-1:],
        states[-1:],
        adapters[1],
        calls_kernels_directly=calls_kernels_directly,
    )
    return gate_up, inner, outer, output


def _compute_mlp_in_tiles(
    gated_op: Gated,
    x_TK: Tensor,
    flat_tensors: Sequence[Tensor | None],
    scales: Sequence[float],
    states: Sequence[Any],
) -> tuple[list[Tensor], AdapterProducts, AdapterProducts, Tensor]:
    """Computes the same as `_compute_mlp`, one tile of tokens at a time. The outputs of gate and up
    that it returns are placeholders without values.
    """
    # adapters are cast and weights dequantised once for all tiles
    adapters = _cast_mlp_adapters(x_TK, flat_tensors, states)
    dense_tensors = list(flat_tensors)
    dense_tensors[WEIGHT::FIELDS_PER_PROJECTION] = [
        base_weight(weight, state, x_TK.dtype)
        for weight, state in zip(flat_tensors[WEIGHT::FIELDS_PER_PROJECTION], states)
        if weight is not None
    ]
    no_states = (None,) * len(states)
    inner_xas = list[Tensor]()
    outer_xas = list[Tensor]()
    outputs = list[Tensor]()
    for rows in _token_tiles(x_TK.shape[0]):
        gate_up, inner, outer, y_TO = _compute_mlp(
            gated_op, x_TK[rows], dense_tensors, scales, no_states, adapters=adapters
        )
        widths = [y.shape[1] for y in gate_up]
        inner_xas.append(inner[0])
        outer_xas.append(outer[0])
        outputs.append(y_TO)
        # frees the tensors of this tile before those of the next tile are computed
        del gate_up, y_TO
    placeholders = [placeholder_tensor((x_TK.shape[0], n), x_TK, x_TK.dtype) for n in widths]
    return (
        placeholders,
        (torch.cat(inner_xas), *inner[1:]),
        (torch.cat(outer_xas), *outer[1:]),
        torch.cat(outputs),
    )


def _cast_mlp_adapters(
    x_TK: Tensor, flat_tensors: Sequence[Tensor | None], states: Sequence[Any]
) -> tuple[CastAdapters, CastAdapters]:
    """Returns (A and B of gate and up, A and B of down), cast to the dtype of x."""
    widths = _output_widths(flat_tensors, states)
    inner_features = widths[0] if len(widths) == 3 else widths[0] // 2
    dtype = x_TK.dtype
    inner = flat_tensors[:-FIELDS_PER_PROJECTION]
    down = flat_tensors[-FIELDS_PER_PROJECTION:]
    return (
        cast_adapters(
            inner[A::FIELDS_PER_PROJECTION],
            inner[B::FIELDS_PER_PROJECTION],
            like=x_TK,
            features=x_TK.shape[1],
            dtype=dtype,
        ),
        cast_adapters(
            down[A::FIELDS_PER_PROJECTION],
            down[B::FIELDS_PER_PROJECTION],
            like=x_TK,
            features=inner_features,
            dtype=dtype,
        ),
    )


def _output_widths(flat_tensors: Sequence[Tensor | None], states: Sequence[Any]) -> list[int]:
    """Returns the number of output features of each projection."""
    return [
        out_features(weight, state)
        for weight, state in zip(flat_tensors[WEIGHT::FIELDS_PER_PROJECTION], states)
        if weight is not None
    ]


def _down_adapter_products(
    gated_op: Gated, gate_TI: Tensor, up_TI: Tensor, flat_tensors: Sequence[Tensor | None]
) -> AdapterProducts:
    """Computes h Aᵀ. Returns this matrix product, and A and B in the dtype of h. On a GPU it
    processes one tile of tokens at a time, since a single tile is enough work for the whole device.

    flat_tensors  the tensors of down
    """
    if (
        flat_tensors[KEEP_MASK] is not None
        or not uses_fused_kernel("gated", gate_TI)
        or gate_TI.shape[0] <= TILE_TOKENS
    ):
        return adapter_products(gated_product(gated_op, gate_TI, up_TI), flat_tensors)
    tiles = [
        adapter_products(gated_product(gated_op, gate_TI[rows], up_TI[rows]), flat_tensors)
        for rows in _token_tiles(gate_TI.shape[0])
    ]
    return torch.cat([xa for xa, _, _ in tiles]), *tiles[0][1:]


def _down_gradients(
    gated_op: Gated,
    gate_TI: Tensor,
    up_TI: Tensor,
    dy_TK: Tensor,
    ha_TR: Tensor,
    a_RI: Tensor,
    b: Tensor | None,
    weight: Tensor,
    keep_mask: Tensor | None,
    scale: float,
    state: Any,
    needs: Sequence[bool],
    leaf_dtypes: Sequence[torch.dtype | None],
    compute: torch.dtype,
    *,
    may_overwrite: bool,
    calls_kernels_directly: bool,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Returns (gradient of gate's output, gradient of up's output, gradients of down's tensors).

    ha             h Aᵀ
    may_overwrite  whether the gradients of gate and up may overwrite gate and up, one tile of
                   tokens at a time
    """
    compute_dy_TK = dy_TK.to(compute)
    slices = rank_slices([b])
    keep_masks = None if keep_mask is None else [keep_mask]
    dha_TR = branch_gradient(
        [compute_dy_TK], [b], [scale], ha_TR, calls_kernels_directly=calls_kernels_directly
    )
    can_overwrite = (
        may_overwrite
        and uses_fused_kernel("gated", gate_TI)
        and gate_TI.is_contiguous()
        and up_TI.is_contiguous()
    )
    if needs[WEIGHT] or not can_overwrite:
        dh_TI = input_gradient(
            dha_TR,
            a_RI,
            [compute_dy_TK],
            [weight],
            [state],
            keep_masks,
            slices,
            compute,
            calls_kernels_directly=calls_kernels_directly,
        )
        dgate_TI, dup_TI, h_TI = gated_gradients(gated_op, gate_TI, up_TI, dh_TI)
        del dh_TI
        grads = tensor_gradients(
            h_TI,
            ha_TR,
            dha_TR,
            [compute_dy_TK],
            [dy_TK],
            [scale],
            keep_masks,
            slices,
            needs,
            leaf_dtypes,
            calls_kernels_directly=calls_kernels_directly,
        )
        return dgate_TI, dup_TI, grads
    # dequantised once for all tiles, or taken from the copy that the recompute made
    dense_weight = base_weight(weight, state, compute)
    da_fp32: Tensor | None = None
    for rows in _token_tiles(gate_TI.shape[0]):
        dh_TI = input_gradient(
            dha_TR[rows],
            a_RI,
            [compute_dy_TK[rows]],
            [dense_weight],
            [None],
            keep_masks,
            slices,
            compute,
            calls_kernels_directly=calls_kernels_directly,
        )
        _, _, h_TI = gated_gradients_(gated_op, gate_TI[rows], up_TI[rows], dh_TI)
        if needs[A]:
            tile_da_fp32 = product_fp32(dha_TR[rows], h_TI)
            if da_fp32 is None:
                da_fp32 = tile_da_fp32
            else:
                da_fp32.add_(tile_da_fp32)
        # frees the tensors of this tile before those of the next tile are computed
        del dh_TI, h_TI
    # the gradients of the bias and of B only read dy and h Aᵀ
    remaining_needs = list(needs)
    remaining_needs[A] = False
    grads = tensor_gradients(
        None,
        ha_TR,
        dha_TR,
        [compute_dy_TK],
        [dy_TK],
        [scale],
        keep_masks,
        slices,
        remaining_needs,
        leaf_dtypes,
        calls_kernels_directly=calls_kernels_directly,
    )
    if da_fp32 is not None:
        a_dtype = leaf_dtypes[A]
        assert a_dtype is not None
        grads[A] = da_fp32.to(a_dtype)
    return gate_TI, up_TI, grads


def _can_recompute_from_x(flat_tensors: Sequence[Tensor | None], needs: Sequence[bool]) -> bool:
    """Whether `_gradients_from_x` computes all gradients that are needed. That function only
    computes the gradients of x and of the adapters. The adapters must be in fp32, because otherwise
    the sums over tiles would be rounded after each tile.
    """
    if any(needs[WEIGHT::FIELDS_PER_PROJECTION]) or not are_all_none(
        flat_tensors[BIAS::FIELDS_PER_PROJECTION]
    ):
        return False
    adapters = [
        t
        for t in (*flat_tensors[A::FIELDS_PER_PROJECTION], *flat_tensors[B::FIELDS_PER_PROJECTION])
        if t is not None
    ]
    return needs_input(needs[:-FIELDS_PER_PROJECTION]) and all(
        t.dtype == torch.float32 for t in adapters
    )


def _save_adapters_only(
    x_TK: Tensor, flat_tensors: Sequence[Tensor | None], states: Sequence[Any]
) -> tuple[list[Tensor], AdapterProducts, AdapterProducts, Tensor]:
    """Returns the tensors that a recompute saves for `_gradients_from_x`, in the same order as
    `_compute_mlp`. Only A and B are real tensors, cast to the dtype of the matrix products. For
    each tensor with one row per token, the function returns a placeholder, because its values are
    never read.
    """
    tokens = x_TK.shape[0]
    dtype = x_TK.dtype
    widths = _output_widths(flat_tensors, states)
    (a_RK, inner_b), (a_RI, outer_b) = _cast_mlp_adapters(x_TK, flat_tensors, states)
    gate_up = [placeholder_tensor((tokens, width), x_TK, dtype) for width in widths[:-1]]
    xa_TR, ha_TR = (placeholder_tensor((tokens, a.shape[0]), x_TK, dtype) for a in (a_RK, a_RI))
    return (
        gate_up,
        (xa_TR, a_RK, inner_b),
        (ha_TR, a_RI, outer_b),
        placeholder_tensor((tokens, widths[-1]), x_TK, dtype),
    )


def _gradients_from_x(
    gated_op: Gated,
    x_TK: Tensor,
    dy_TK: Tensor,
    a_RK: Tensor,
    a_RI: Tensor,
    b_matrices: Sequence[Tensor | None],
    dense_weights: Sequence[Tensor],
    scales: Sequence[float],
    needs: Sequence[bool],
    leaf_dtypes: Sequence[torch.dtype | None],
    x_dtype: torch.dtype | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Computes the gradients of the three layers from x alone. Returns (gradient of x, gradients of
    the tensors in the flat list). The outputs of gate and up, their gradients and h are computed
    for one tile of tokens at a time.

    dense_weights  the dequantised weights, in the dtype of the matrix products
    x_dtype        dtype of the gradient of x; None if it is not needed
    """
    inner_count = len(b_matrices) - 1
    slices = rank_slices(b_matrices[:-1])
    down_slices = rank_slices(b_matrices[-1:])
    flat_tensors: list[Tensor | None] = []
    for weight, b, ranks in zip(dense_weights, b_matrices[:-1], slices):
        flat_tensors += [weight, None, None if b is None else a_RK[ranks], b, None]
    no_states: tuple[None, ...] = (None,) * inner_count
    totals: list[Tensor | None] = [None] * len(needs)
    if x_dtype is None:
        dx_TK = None
    else:
        dx_TK = torch.empty(x_TK.shape, dtype=x_dtype, device=x_TK.device)
    for rows in _token_tiles(x_TK.shape[0]):
        x = x_TK[rows]
        dy = dy_TK[rows].to(x_TK.dtype)
        gate_up, (xa, _, _) = compute_projections(
            x, flat_tensors, scales[:-1], no_states, (a_RK, list(b_matrices[:-1]))
        )
        dha = branch_gradient(
            [dy], b_matrices[-1:], scales[-1:], dy.new_empty(dy.shape[0], a_RI.shape[0])
        )
        dh = input_gradient(dha, a_RI, [dy], dense_weights[-1:], [None], None, down_slices, x.dtype)
        dgate, dup, h = gated_gradients_(gated_op, *split_gate_up(gate_up), dh)
        if a_RI.shape[0]:
            ha = scaled_product(h, a_RI.t())
        else:
            ha = h[:, :0]
        down_grads = tensor_gradients(
            h,
            ha,
            dha,
            [dy],
            [dy],
            scales[-1:],
            None,
            down_slices,
            needs[-FIELDS_PER_PROJECTION:],
            leaf_dtypes[-FIELDS_PER_PROJECTION:],
        )
        dys = [dgate, dup]
        if inner_count == 1:
            dys = [torch.cat(dys, -1)]
        dxa = branch_gradient(dys, b_matrices[:-1], scales[:-1], xa)
        inner_grads = tensor_gradients(
            x,
            xa,
            dxa,
            dys,
            dys,
            scales[:-1],
            None,
            slices,
            needs[:-FIELDS_PER_PROJECTION],
            leaf_dtypes[:-FIELDS_PER_PROJECTION],
        )
        for i, grad in enumerate((*inner_grads, *down_grads)):
            total = totals[i]
            totals[i] = grad if total is None or grad is None else total.add_(grad)
        if dx_TK is not None:
            dx_TK[rows] = input_gradient(
                dxa, a_RK, dys, dense_weights[:-1], no_states, None, slices, dx_TK.dtype
            )
        # frees the tensors of this tile before those of the next tile are computed
        del gate_up, dh, dgate, dup, h, dys
    return dx_TK, totals


class LoraMlp(torch.autograd.Function):
    """The autograd function of `lora_mlp`. `flat_tensors` has FIELDS_PER_PROJECTION tensors per
    projection; the tensors of down are last.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gated_op: Gated,
        scales: tuple[float, ...],
        states: tuple[Any, ...],
        dtypes: LoraDtypes,
        *flat_tensors: Tensor | None,
    ) -> Tensor:
        needs = ctx.needs_input_grad[5:]
        x_TK = x
        if x.dim() != 2:
            x_TK = x.reshape(-1, x.shape[-1])
        ctx.owns_gate_up = False
        skip_output = False
        compute = dtypes.compute
        if running_checkpointed_layers:
            ctx.owns_gate_up = is_recomputed()
            skip_output = is_output_unused(ctx)
        calls_kernels_directly = can_call_kernels_directly(compute, x)
        with fast_autocast_off() if calls_kernels_directly else autocast_off(x):
            x_TK = x_TK if x_TK.dtype == compute else x_TK.to(compute)
            can_tile = (
                x_TK.shape[0] > TILE_TOKENS
                and uses_fused_kernel("gated", x_TK)
                and are_all_none(flat_tensors[KEEP_MASK::FIELDS_PER_PROJECTION])
            )
            if can_tile and skip_output and _can_recompute_from_x(flat_tensors, needs):
                gate_up, inner, outer, y_TO = _save_adapters_only(x_TK, flat_tensors, states)
            elif can_tile and ctx.owns_gate_up:
                # the layer will run again, and the tensors that are saved now are dropped
                gate_up, inner, outer, y_TO = _compute_mlp_in_tiles(
                    gated_op, x_TK, flat_tensors, scales, states
                )
            else:
                gate_up, inner, outer, y_TO = _compute_mlp(
                    gated_op,
                    x_TK,
                    flat_tensors,
                    scales,
                    states,
                    skip_output=skip_output,
                    calls_kernels_directly=calls_kernels_directly,
                )
        (xa_TR, a_RK, inner_b), (ha_TR, a_RI, outer_b) = inner, outer
        saved_x = x_TK if needs_input(needs[:-FIELDS_PER_PROJECTION]) else None
        ctx.save_for_backward(
            saved_x,
            xa_TR,
            a_RK,
            ha_TR,
            a_RI,
            *gate_up,
            *inner_b,
            *outer_b,
            *flat_tensors[WEIGHT::FIELDS_PER_PROJECTION],
            *flat_tensors[KEEP_MASK::FIELDS_PER_PROJECTION],
        )
        ctx.gated_op = gated_op
        ctx.scales = scales
        ctx.states = states
        ctx.compute = compute
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        ctx.calls_kernels_directly = calls_kernels_directly
        ctx.leaf_dtypes = [None if t is None else t.dtype for t in flat_tensors]
        if x.dim() == 2:
            return y_TO
        return unsafe_view(y_TO, (*x.shape[:-1], y_TO.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("lora_mlp")
        gated_op = ctx.gated_op
        scales = ctx.scales
        states = ctx.states
        compute = ctx.compute
        needs_x = ctx.needs_input_grad[0]
        needs = ctx.needs_input_grad[5:]
        leaf_dtypes = ctx.leaf_dtypes
        calls_kernels_directly = (
            ctx.calls_kernels_directly and not torch._C._len_torch_dispatch_stack()
        )
        x_TK, xa_TR, a_RK, ha_TR, a_RI, *saved = ctx.saved_tensors
        inner_count = len(scales) - 1
        gate_up = saved[:inner_count]
        b_matrices = saved[inner_count : 2 * inner_count + 1]
        weights = saved[2 * inner_count + 1 : 3 * inner_count + 2]
        keep_masks = saved[3 * inner_count + 2 :]
        inner_keep_masks = None if are_all_none(keep_masks[:-1]) else keep_masks[:-1]
        with fast_autocast_off() if calls_kernels_directly else autocast_off(dy):
            dx = None
            dy_TK = dy.reshape(-1, dy.shape[-1])
            if x_TK is not None and x_TK.shape[0] > 0 and gate_up[0].stride(-1) == 0:
                # the tensors are placeholders, since the recompute did not compute gate and up
                dense_weights = [
                    base_weight(weight, state, compute) for weight, state in zip(weights, states)
                ]
                dx_TK, grads = _gradients_from_x(
                    gated_op,
                    x_TK,
                    dy_TK,
                    a_RK,
                    a_RI,
                    b_matrices,
                    dense_weights,
                    scales,
                    needs,
                    leaf_dtypes,
                    ctx.x_dtype if needs_x else None,
                )
                if dx_TK is not None:
                    dx = dx_TK.view(ctx.x_shape)
                return dx, None, None, None, None, *grads
            dgate_TI, dup_TI, down_grads = _down_gradients(
                gated_op,
                *split_gate_up(gate_up),
                dy_TK,
                ha_TR,
                a_RI,
                b_matrices[-1],
                weights[-1],
                keep_masks[-1],
                scales[-1],
                states[-1],
                needs[-FIELDS_PER_PROJECTION:],
                leaf_dtypes[-FIELDS_PER_PROJECTION:],
                compute,
                may_overwrite=ctx.owns_gate_up and keep_masks[-1] is None and inner_count == 2,
                calls_kernels_directly=calls_kernels_directly,
            )
            dys = [dgate_TI, dup_TI]
            if inner_count == 1:
                dys = [torch.cat(dys, -1)]
            slices = rank_slices(b_matrices[:-1])
            dxa_TR = branch_gradient(
                dys,
                b_matrices[:-1],
                scales[:-1],
                xa_TR,
                calls_kernels_directly=calls_kernels_directly,
            )
            inner_grads = tensor_gradients(
                x_TK,
                xa_TR,
                dxa_TR,
                dys,
                dys,
                scales[:-1],
                inner_keep_masks,
                slices,
                needs[:-FIELDS_PER_PROJECTION],
                leaf_dtypes[:-FIELDS_PER_PROJECTION],
                calls_kernels_directly=calls_kernels_directly,
            )
            if needs_x:
                dx = input_gradient(
                    dxa_TR,
                    a_RK,
                    dys,
                    weights[:-1],
                    states[:-1],
                    inner_keep_masks,
                    slices,
                    ctx.x_dtype,
                    calls_kernels_directly=calls_kernels_directly,
                ).view(ctx.x_shape)
        return dx, None, None, None, None, *inner_grads, *down_grads


_apply = eager_apply(LoraMlp)


def lora_mlp(
    x: Tensor,
    inner: Sequence[Projection],
    down: Projection,
    gated_op: Gated,
    dtypes: LoraDtypes,
    *,
    is_eager: bool = False,
) -> Tensor:
    """Computes down(activation(gate) * up). If `inner` has two projections, gate and up are their
    outputs. If `inner` has one projection, gate and up are the two halves of its output.

    x       any float [*n K]
    ->      Y[*n K]   the dtype in which all three layers compute and return their results
    grads   each in the dtype of its tensor; adapter gradients are summed in fp32

    is_eager  the call is neither under torch.func nor in a compiled graph
    """
    assert not dtypes.widens_branch
    assert dtypes.output == dtypes.compute
    flat_tensors, scales, states = flatten_projections(x, inner)
    keep_mask = None
    scale = down.scale
    if down.dropout:
        # h is not computed yet, but its mask only needs the shape and the device
        keep_mask = draw_dropout_mask(
            torch.empty((*x.shape[:-1], down.in_features), dtype=torch.bool, device=x.device),
            down.dropout,
        )
        keep_mask = keep_mask.reshape(-1, down.in_features)
        scale = scale_with_dropout(scale, down.dropout)
    flat_tensors += (down.weight, down.bias, down.a, down.b, keep_mask)
    args = (x, gated_op, (*scales, scale), (*states, down.quant_state), dtypes, *flat_tensors)
    output: Tensor = _apply(*args) if is_eager else apply_function(LoraMlp, *args)
    return output


# --- the gated MLP of a model's layers


def mlp_fusion_blocker(layers: Sequence[Any]) -> str | None:
    """Returns the reason why these layers do not run as one function, or None if they do. The
    layers are gate, up and down, or one layer that computes both gate and up, followed by down.
    """
    has_adapter = False
    for layer in layers:
        if has_hooks(layer):
            return "a hook on a layer"
        if is_lora(layer):
            if not is_fused(layer):
                return "a LoRA layer that is not fused"
            reason = fusion_blocker(layer)
            has_adapter = True
        else:
            reason = unadapted_layer_blocker(layer)
        if reason is not None:
            return reason
    if not has_adapter:
        return "no LoRA layer"
    return None


def run_gated_mlp(layers: Sequence[Any], x: Tensor, gated_op: Gated) -> Tensor | None:
    """Computes down(activation(gate(x)) * up(x)) in one function, with the same result as PEFT.
    Returns None if the layers have to be called one by one.
    """
    in_graph = torch.compiler.is_dynamo_compiling()
    if not x.dtype.is_floating_point:
        return None
    kept_layers = kept_row_layers()
    if kept_layers is not None and not in_graph:
        row_layers: MlpRowLayers | None = find_row_layers(
            kept_layers, tuple(layers), x, MlpRowLayers.read
        )
        if row_layers is not None:
            return row_layers.compute(x, gated_op)
    projections = []
    has_adapter = False
    for layer in layers:
        hooks = (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
        )
        if (hooks or GLOBAL_FORWARD_HOOKS or GLOBAL_FORWARD_PRE_HOOKS) and has_hooks(layer):
            return None
        attributes = layer.__dict__
        # `fuse_lora` attaches its forward only to LoRA layers
        if FUSED in attributes and attributes.get("forward") is attributes[FUSED]:
            projection = read_projection(layer, x, in_graph=in_graph)
            has_adapter = True
            if projection is None:
                return None
        elif is_lora(layer) or unadapted_layer_blocker(layer) is not None:
            return None
        else:
            projection = read_unadapted_projection(layer)
        projections.append(projection)
    if not has_adapter:
        return None
    *inner, down = projections
    resolve = projection_dtypes if in_graph else cached_dtypes
    dtypes = shared_dtypes(x, inner, resolve)
    if (
        dtypes is None
        or dtypes.output != dtypes.compute
        or resolve(down, x, dtypes.output) != dtypes
    ):
        return None
    return lora_mlp(x, inner, down, gated_op, dtypes, is_eager=not in_graph)


class MlpRowLayers:
    """The layers of a gated MLP, as the kernel for a few rows reads them."""

    __slots__ = ("down", "inner", "layers")

    def __init__(self, layers: Sequence[Any], inner: RowLayers, down: RowLayers) -> None:
        self.layers = layers
        self.inner = inner
        self.down = down

    @staticmethod
    def read(layers: Sequence[Any], x: Tensor) -> MlpRowLayers | None:
        inner = read_row_layers(layers[:-1], x, allow_unadapted=True)
        if inner is None:
            return None
        # the input of down has the dtype and the device of x
        down = read_row_layers(
            layers[-1:], x.new_empty(0, layers[-1].in_features), allow_unadapted=True
        )
        if down is None:
            return None
        return MlpRowLayers(layers, inner, down)

    def is_usable(self, x: Tensor) -> bool:
        """Whether the kernel computes this call. The hooks of a layer run only in its own call."""
        if GLOBAL_FORWARD_HOOKS or GLOBAL_FORWARD_PRE_HOOKS:
            return False
        for layer in self.layers:
            if (
                layer._forward_hooks
                or layer._forward_pre_hooks
                or layer._backward_hooks
                or layer._backward_pre_hooks
            ):
                return False
        return self.inner.is_usable(x)

    def is_current(self) -> bool:
        return self.inner.is_current() and self.down.is_current()

    def compute(self, x: Tensor, gated_op: Gated) -> Tensor:
        gate, up = split_gate_up(self.inner.project(x))
        (y,) = self.down.project(gated_product(gated_op, gate, up))
        return y

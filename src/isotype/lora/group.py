"""Computes several LoRA linear layers with the same input (Q, K and V, or gate and up) in one
autograd function. All A matrices are concatenated, so that a single matrix multiplication computes
x Aᵀ for all layers.

These tensors are saved for backward: x once (or the tensors from which x is recomputed, see
`ops.recomputable`), x Aᵀ of all projections, the weights, A and B, and one byte per element for
each dropout. The gradient of x is the sum of the gradients through all layers. Each matrix product
adds its result to this sum. The module `mlp` (gated MLPs) uses these functions too.

T is the number of tokens, K the number of input features, O the number of output features of a
projection, and R the sum of the ranks of all projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.backend import autocast_off, eager_apply, fast_autocast_off, refuse_second_derivative
from ..ops.recomputable import recompute, saved_or_recomputed
from ..ops.widened_products import addmm_, matmul
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
    weight_gradient,
)
from .products import (
    MAX_KERNEL_RANK,
    add_product_,
    can_add_in_one_pass,
    can_call_kernels_directly,
    cast_adapters,
    gradient_product,
    scaled_product,
    should_save_uncast_adapters,
)
from .quantised import bias_gradient

# An autograd function takes the tensors of several projections in one flat list, five for each
# projection, in this order. KEEP_MASK is bool[T K], the elements of x that the dropout before A
# keeps, or None
WEIGHT, BIAS, A, B, KEEP_MASK = range(5)
FIELDS_PER_PROJECTION = 5  # weight, A, B, bias and dropout mask

# (all A in one tensor, the list of B), in the dtype of the products
CastAdapters = tuple[Tensor, list[Tensor | None]]
# (x Aᵀ of all projections, all A in one tensor, the list of B)
AdapterProducts = tuple[Tensor, Tensor, list[Tensor | None]]


def rank_slices(b_matrices: Sequence[Tensor | None]) -> list[slice]:
    """x Aᵀ contains the columns of all projections. For each projection, returns the slice of its
    columns. The slice is empty if the projection has no adapter.
    """
    slices = []
    start = 0
    for b in b_matrices:
        end = start
        if b is not None:
            end += b.shape[1]
        slices.append(slice(start, end))
        start = end
    return slices


def are_all_none(tensors: Sequence[Tensor | None]) -> bool:
    # a loop, since it is called several times per layer and a generator would add a call
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None:
            return False
    return True


def adapter_products(
    x_TK: Tensor,
    flat_tensors: Sequence[Tensor | None],
    adapters: CastAdapters | None = None,
    *,
    calls_kernels_directly: bool = False,
) -> AdapterProducts:
    """Computes x Aᵀ of all projections. Returns x Aᵀ together with A and B, which are cast to the
    dtype of x.
    """
    if adapters is None:
        adapters = cast_adapters(
            flat_tensors[A::FIELDS_PER_PROJECTION],
            flat_tensors[B::FIELDS_PER_PROJECTION],
            like=x_TK,
            features=x_TK.shape[1],
            dtype=x_TK.dtype,
        )
    a_RK, b_matrices = adapters
    if not a_RK.shape[0]:
        return x_TK[:, :0], a_RK, b_matrices
    keep_masks = flat_tensors[KEEP_MASK::FIELDS_PER_PROJECTION]
    if are_all_none(keep_masks):
        return (
            scaled_product(x_TK, a_RK.t(), calls_kernels_directly=calls_kernels_directly),
            a_RK,
            b_matrices,
        )
    columns = []
    for keep_mask, ranks in zip(keep_masks, rank_slices(b_matrices)):
        columns.append(matmul(apply_dropout_mask(x_TK, keep_mask), a_RK[ranks].t()))
    return torch.cat(columns, 1), a_RK, b_matrices


def compute_projections(
    x: Tensor,
    flat_tensors: Sequence[Tensor | None],
    scales: Sequence[float],
    states: Sequence[Any],
    adapters: CastAdapters | None = None,
    *,
    calls_kernels_directly: bool = False,
) -> tuple[list[Tensor], AdapterProducts]:
    """Computes every projection of x. The outputs have the dtype and the leading dimensions of x.
    Returns the outputs and the `AdapterProducts` that backward needs.

    adapters        the result of `cast_adapters`, if several tiles share it
    calls_kernels_directly  the result of `can_call_kernels_directly` for x
    """
    x_TK = x
    if x.dim() != 2:
        x_TK = x.reshape(-1, x.shape[-1])
    xa_TR, a_RK, b_matrices = adapter_products(
        x_TK, flat_tensors, adapters, calls_kernels_directly=calls_kernels_directly
    )
    adapter_first = not calls_kernels_directly and should_run_adapter_first(x_TK)
    start = 0
    outputs = []
    for i, b in enumerate(b_matrices):
        weight = flat_tensors[FIELDS_PER_PROJECTION * i + WEIGHT]
        bias = flat_tensors[FIELDS_PER_PROJECTION * i + BIAS]
        assert weight is not None
        if b is None:
            outputs.append(
                base_product(
                    x_TK, weight, bias, states[i], calls_kernels_directly=calls_kernels_directly
                )
            )
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
                calls_kernels_directly=calls_kernels_directly,
            )
        )
        start = end
    return outputs, (xa_TR, a_RK, b_matrices)


def branch_gradient(
    dys: Sequence[Tensor | None],
    b_matrices: Sequence[Tensor | None],
    scales: Sequence[float],
    xa_TR: Tensor,
    *,
    calls_kernels_directly: bool = False,
) -> Tensor:
    """Computes the gradient of x Aᵀ, which is scale dy B. The gradient is zero for an output that
    was not used.

    xa_TR  a tensor that has the shape of the result
    """
    if xa_TR.shape[1] == 0:
        return xa_TR
    columns = []
    for dy, b, scale in zip(dys, b_matrices, scales):
        if b is None:
            continue
        if dy is None:
            columns.append(b.new_zeros(xa_TR.shape[0], b.shape[1]))
        else:
            columns.append(
                scaled_product(dy, b, scale, calls_kernels_directly=calls_kernels_directly)
            )
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def input_gradient(
    dxa_TR: Tensor,
    a_RK: Tensor,
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    states: Sequence[Any],
    keep_masks: Sequence[Tensor | None] | None,
    slices: Sequence[slice],
    dtype: torch.dtype,
    *,
    calls_kernels_directly: bool = False,
) -> Tensor:
    """Computes the gradient of x in `dtype`. The gradient is the sum of dy W over all projections,
    plus dxa A, which is the adapters' part. Only one base weight W is dequantised at a time, to
    save memory.

    In PyTorch, the adapters' part is computed first and rounded to the compute dtype. For each
    projection, `addmm_` then adds dy W to it. The C++ kernels add the adapters' part last, in fp32.

    keep_masks  None without dropout
    """
    dx_TK: Tensor | None = None
    add_adapters_last = False
    if keep_masks is None:
        adds_directly = calls_kernels_directly and dtype == dxa_TR.dtype
        add_adapters_last = (
            adds_directly and 0 < a_RK.shape[0] <= MAX_KERNEL_RANK
        ) or can_add_in_one_pass(dtype, dxa_TR, a_RK)
        if a_RK.shape[0] and not add_adapters_last:
            dx_TK = matmul(dxa_TR, a_RK)
    else:
        for keep_mask, ranks in zip(keep_masks, slices):
            if ranks.stop > ranks.start:
                projection_dx_TK = apply_dropout_mask(
                    matmul(dxa_TR[:, ranks], a_RK[ranks]), keep_mask
                )
                if dx_TK is None:
                    dx_TK = projection_dx_TK
                else:
                    dx_TK.add_(projection_dx_TK)
    if dx_TK is not None:
        dx_TK = dx_TK.to(dtype)
    for dy, weight, state in zip(dys, weights, states):
        if dy is None:
            continue
        if state is None and weight.dtype == dxa_TR.dtype:
            w_OK = weight
        else:
            w_OK = base_weight(weight, state, dxa_TR.dtype)
        if dx_TK is None:
            dx_TK = matmul(dy, w_OK).to(dtype)
        elif dtype == dy.dtype:
            addmm_(dx_TK, dy, w_OK)
        else:
            dx_TK.add_(matmul(dy, w_OK))
    assert dx_TK is not None
    if add_adapters_last:
        return add_product_(dx_TK, dxa_TR, a_RK, calls_kernels_directly=calls_kernels_directly)
    return dx_TK


def tensor_gradients(
    x_TK: Tensor | None,
    xa_TR: Tensor,
    dxa_TR: Tensor,
    dys: Sequence[Tensor | None],
    incoming_dys: Sequence[Tensor | None],
    scales: Sequence[float],
    keep_masks: Sequence[Tensor | None] | None,
    slices: Sequence[slice],
    needs: Sequence[bool],
    dtypes: Sequence[torch.dtype | None],
    *,
    calls_kernels_directly: bool = False,
) -> list[Tensor | None]:
    """Computes the gradient of each tensor of the flat list, in the tensor's dtype, or None if it
    is not needed. x may be None if no weight and no A needs a gradient.

    dys           the gradients of the outputs, in the dtype of the matrix products
    incoming_dys  the gradients that autograd passed; the gradients of biases are their sums
    keep_masks    None without dropout
    """
    grads: list[Tensor | None] = [None] * len(needs)
    all_da: Tensor | None = None
    for i, dy in enumerate(dys):
        weight = FIELDS_PER_PROJECTION * i + WEIGHT
        bias = FIELDS_PER_PROJECTION * i + BIAS
        a = FIELDS_PER_PROJECTION * i + A
        b = FIELDS_PER_PROJECTION * i + B
        incoming_dy = incoming_dys[i]
        if dy is None or incoming_dy is None:
            continue
        if needs[weight]:
            assert x_TK is not None
            grads[weight] = weight_gradient(dy, x_TK, dtypes[weight])  # type: ignore[arg-type]
        if needs[bias]:
            # a bias with a gradient has a dtype
            grads[bias] = bias_gradient(incoming_dy, dtypes[bias])  # type: ignore[arg-type]
        if needs[b]:
            grads[b] = gradient_product(
                dy,
                xa_TR[:, slices[i]],
                scales[i],
                dtypes[b],  # type: ignore[arg-type]  # the same holds for B
                calls_kernels_directly=calls_kernels_directly,
            )
        if not needs[a]:
            continue
        assert x_TK is not None
        sum_dtype = torch.promote_types(torch.float32, x_TK.dtype)
        if keep_masks is not None:
            da = gradient_product(
                dxa_TR[:, slices[i]],
                apply_dropout_mask(x_TK, keep_masks[i]),
                1.0,
                sum_dtype,
                calls_kernels_directly=calls_kernels_directly,
            )
        else:
            if all_da is None:
                # without dropout one product computes the gradients of all A
                all_da = gradient_product(
                    dxa_TR, x_TK, 1.0, sum_dtype, calls_kernels_directly=calls_kernels_directly
                )
            da = all_da[slices[i]]
        grads[a] = da.to(dtypes[a])
    return grads


def needs_input(needs: Sequence[bool]) -> bool:
    """Whether backward reads the projections' input. Backward reads this input if a weight or an A
    matrix needs a gradient.
    """
    return any(needs[WEIGHT::FIELDS_PER_PROJECTION]) or any(needs[A::FIELDS_PER_PROJECTION])


class LoraGroup(torch.autograd.Function):
    """The autograd function of `lora_group`. `flat_tensors` has FIELDS_PER_PROJECTION tensors per
    projection.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scales: tuple[float, ...],
        states: tuple[Any, ...],
        dtypes: LoraDtypes,
        *flat_tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        compute, output_dtype, _ = dtypes
        ctx.calls_kernels_directly = calls_kernels_directly = can_call_kernels_directly(compute, x)
        with fast_autocast_off() if calls_kernels_directly else autocast_off(x):
            x_compute = x if x.dtype == compute else x.to(compute)
            outputs, (xa_TR, a_RK, b_matrices) = compute_projections(
                x_compute,
                flat_tensors,
                scales,
                states,
                calls_kernels_directly=calls_kernels_directly,
            )
        if output_dtype != compute:
            outputs = [y.to(output_dtype) for y in outputs]
        backward_x = None
        if needs_input(ctx.needs_input_grad[4:]):
            backward_x = x_compute.reshape(-1, x.shape[-1])
        ctx.recompute_x, saved_x = saved_or_recomputed(x, backward_x)
        ctx.recasts_adapters = should_save_uncast_adapters(x)
        if ctx.recasts_adapters:
            adapters = (
                *flat_tensors[A::FIELDS_PER_PROJECTION],
                *flat_tensors[B::FIELDS_PER_PROJECTION],
            )
        else:
            adapters = (a_RK, *b_matrices)
        ctx.save_for_backward(
            xa_TR,
            *flat_tensors[WEIGHT::FIELDS_PER_PROJECTION],
            *flat_tensors[KEEP_MASK::FIELDS_PER_PROJECTION],
            *adapters,
            *saved_x,
        )
        ctx.scales = scales
        ctx.states = states
        ctx.compute = compute
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        ctx.leaf_dtypes = [None if t is None else t.dtype for t in flat_tensors]
        # an output that was not used gets None as its gradient, and needs no product
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("lora_group")
        n = len(dys)
        needs = ctx.needs_input_grad[4:]
        xa_TR, *saved = ctx.saved_tensors
        if are_all_none(dys):
            return (None,) * (4 + len(needs))
        weights = saved[:n]
        keep_masks = saved[n : 2 * n]
        saved = saved[2 * n :]
        compute = ctx.compute
        if ctx.recasts_adapters:
            a_matrices = saved[:n]
            b_matrices = saved[n : 2 * n]
            saved_x = saved[2 * n :]
            a_RK, b_matrices = cast_adapters(
                a_matrices, b_matrices, like=xa_TR, features=ctx.x_shape[-1], dtype=compute
            )
        else:
            a_RK = saved[0]
            b_matrices = saved[1 : n + 1]
            saved_x = saved[n + 1 :]
        if are_all_none(keep_masks):
            keep_masks = None
        slices = rank_slices(b_matrices)
        calls_kernels_directly = (
            ctx.calls_kernels_directly and not torch._C._len_torch_dispatch_stack()
        )
        with fast_autocast_off() if calls_kernels_directly else autocast_off(xa_TR):
            incoming_dys: list[Tensor | None] = []
            compute_dys: list[Tensor | None] = []
            for dy in dys:
                if dy is None:
                    incoming_dys.append(None)
                    compute_dys.append(None)
                else:
                    dy_TO = dy.reshape(-1, dy.shape[-1])
                    incoming_dys.append(dy_TO)
                    compute_dys.append(dy_TO.to(compute))
            dxa_TR = branch_gradient(
                compute_dys,
                b_matrices,
                ctx.scales,
                xa_TR,
                calls_kernels_directly=calls_kernels_directly,
            )
            if ctx.recompute_x is None:
                (x_TK,) = saved_x
            else:
                x_TK = recompute(ctx.recompute_x, saved_x).reshape(-1, a_RK.shape[1])
                x_TK = x_TK.to(compute)
            grads = tensor_gradients(
                x_TK,
                xa_TR,
                dxa_TR,
                compute_dys,
                incoming_dys,
                ctx.scales,
                keep_masks,
                slices,
                needs,
                ctx.leaf_dtypes,
                calls_kernels_directly=calls_kernels_directly,
            )
            dx = None
            if ctx.needs_input_grad[0]:
                dx = input_gradient(
                    dxa_TR,
                    a_RK,
                    compute_dys,
                    weights,
                    ctx.states,
                    keep_masks,
                    slices,
                    ctx.x_dtype,
                    calls_kernels_directly=calls_kernels_directly,
                ).view(ctx.x_shape)
        return dx, None, None, None, *grads


_apply = eager_apply(LoraGroup)


def flatten_projections(
    x: Tensor, projections: Sequence[Projection]
) -> tuple[list[Tensor | None], tuple[float, ...], tuple[Any, ...]]:
    """Returns the arguments of an autograd function: (the flat list of the projections' tensors,
    the scales of their branches, the states of their packed weights).

    Dropout masks are drawn in the same order as in PEFT's layers, and the factor of the dropout is
    included in the scale.
    """
    flat_tensors: list[Tensor | None] = []
    scales = []
    states = []
    for weight, bias, a, b, state, scale, dropout, _ in projections:
        keep_mask = None
        if dropout:
            keep_mask = draw_dropout_mask(x, dropout).reshape(-1, x.shape[-1])
            scale = scale_with_dropout(scale, dropout)
        flat_tensors += (weight, bias, a, b, keep_mask)
        scales.append(scale)
        states.append(state)
    return flat_tensors, tuple(scales), tuple(states)


def lora_group(
    x: Tensor, projections: Sequence[Projection], dtypes: LoraDtypes
) -> tuple[Tensor, ...]:
    """Computes `lora_linear` of each projection. All projections must have the same dtypes, and
    none may compute its adapter branch in fp32. It must not be called under torch.func or in a
    compiled graph.
    """
    assert not dtypes.widens_branch
    flat_tensors, scales, states = flatten_projections(x, projections)
    outputs: tuple[Tensor, ...] = _apply(x, scales, states, dtypes, *flat_tensors)
    return outputs

"""Defines the op `linear_cross_entropy`, which computes the head and the loss together, and its
autograd function. T is the number of tokens, H the hidden size, V the vocabulary size, and N the number of
rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import (
    apply_function,
    arithmetic_dtype,
    autocast_off,
    product_dtype,
    refuse_second_derivative,
)
from ..contract import OpContract
from ..cross_entropy.op import cross_entropy_reference
from ..cross_entropy.rows import CppRowKernels, LogitsSource, choose_row_kernels
from ..cross_entropy.rule import (
    RULE,
    LossRule,
    Reduction,
    RuleArguments,
    check_reduction,
    check_targets,
)
from ..library import library_op
from .chunked import (
    Chunks,
    Forward,
    HeadGradient,
    cast_gradients,
    cast_head,
    check_head,
    default_chunk,
    empty_gradients,
    empty_outputs,
    gradient_factors,
    gradients_by_vocabulary,
    head_dtypes,
    largest_gradient,
    operand_dtype,
    required_gradients,
    result_dtype,
    rows_to_compute,
    scale_to_dtype,
)

LINEAR_CROSS_ENTROPY = OpContract(
    "hidden: X[*n H], weight: W[V H], targets: int[*n] -> fp32|fp64[...]",
    inside="fp32",
    grads={"hidden": "X", "weight": "W"},
    autocast="fp32",
)


def reference_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes all logits, in the dtype in which the op computes its matrix product."""
    dtype = product_dtype(hidden, weight)
    with autocast_off(hidden):
        return F.linear(*cast_head(dtype, hidden, weight, bias))


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **loss: Any
) -> Tensor:
    """Computes `linear_cross_entropy` in plain PyTorch, differentiated by autograd. `loss` contains
    the options of `cross_entropy`.
    """
    return cross_entropy_reference(reference_logits(hidden, weight, bias), targets, **loss)


def _fake_forward(hidden_TH: Tensor, weight_VH: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    chunk, want_dhidden, want_dweight, want_dbias, _ = rest[-5:]
    return tuple(empty_outputs(hidden_TH, weight_VH, want_dhidden, want_dweight, want_dbias, chunk))


@library_op(
    "linear_cross_entropy_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets,"
    f" Tensor upstream, {RULE}, int chunk, bool want_dhidden, bool want_dweight, bool want_dbias,"
    " bool exact) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_forward,
)
def _forward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    upstream: Tensor,
    ignore_index: int,
    factors: Sequence[float],
    chunk: int,
    want_dhidden: bool,
    want_dweight: bool,
    want_dbias: bool,
    exact: bool,
) -> tuple[Tensor, ...]:
    """Computes the loss of each row and the gradients that are needed. All rows have the same
    upstream gradient, `upstream`. Ignored rows are not computed.

    exact  whether the C++ kernels compute the largest bf16 logits again in fp32
    """
    rule = LossRule.from_arguments(ignore_index, factors)
    out = empty_outputs(hidden_TH, weight_VH, want_dhidden, want_dweight, want_dbias, chunk)
    wants_gradient = want_dhidden or want_dweight or want_dbias
    chunks = Chunks(hidden_TH, weight_VH, bias_V, targets_T, rule, chunk, wants_gradient)
    if not chunks.count:
        out.dweight_VH.zero_()
    pre_scale, post_scale = gradient_factors(chunks.operand_dtype, upstream)
    head = HeadGradient(out.dweight_VH, post_scale)
    kernels = choose_row_kernels(chunks.logits)
    for rows, x_NH, z_NV, g_NV in chunks:
        targets_N = targets_T[rows]
        # only the C++ kernels get logits that were rounded from fp32 sums to bf16
        if exact and kernels is CppRowKernels:
            source_argument = {
                "source": LogitsSource.from_product(z_NV, x_NH, chunks.weight_VH, chunks.bias_V)
            }
        else:
            source_argument = {}
        gradient_arguments: tuple[Tensor, ...] = ()
        if wants_gradient:
            gradient_arguments = (g_NV, pre_scale)
        out.loss_T[rows], out.lse_T[rows] = kernels.cross_entropy_forward(
            z_NV, targets_N, rule, *gradient_arguments, **source_argument
        )
        if want_dbias:
            dbias_V = g_NV.sum(0, dtype=out.dbias_V.dtype)
            if post_scale is not None:
                dbias_V = dbias_V * post_scale
            out.dbias_V.add_(dbias_V)
        if want_dhidden:
            chunks.write_dhidden(out.dhidden_TH, rows, g_NV, post_scale)
        if want_dweight:
            head.add(g_NV, x_NH)
    # the operator's schema requires a plain tuple
    return tuple(out)


@library_op(
    "linear_cross_entropy_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets,"
    f" Tensor lse, Tensor dloss, {RULE}, bool want_dhidden, bool want_dweight) -> (Tensor, Tensor,"
    " Tensor)",
    fake=empty_gradients,
)
def _backward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    ignore_index: int,
    factors: Sequence[float],
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of hidden, weight and bias. The rows may have different upstream
    gradients. The results are in fp32 or in the dtype of the matrix product. A gradient that is not
    needed is empty.
    """
    rule = LossRule.from_arguments(ignore_index, factors)
    rows = rows_to_compute(targets_T, rule)
    targets_N = targets_T[rows]
    lse_N = lse_T[rows]
    dloss_N = (
        dloss_T[rows]
        .to(arithmetic_dtype(hidden_TH.dtype))
        .masked_fill(targets_N == rule.ignore_index, 0)
    )

    def write_gradient(z: Tensor, out: Tensor, first: int, factor: Tensor | None) -> None:
        dloss = dloss_N
        if factor is not None:
            dloss = dloss_N * factor
        choose_row_kernels(z).cross_entropy_backward(
            z, targets_N, lse_N, dloss, rule, out, weight_VH.shape[0], first
        )

    return gradients_by_vocabulary(
        hidden_TH,
        weight_VH,
        bias_V,
        rows,
        largest_gradient(dloss_N),
        write_gradient,
        want_dhidden,
        want_dweight,
    )


class LinearCrossEntropy(torch.autograd.Function):
    """Computes the sum of the losses of all rows. If `is_mean` is set, the sum is divided by
    `items`. If `items` is None, the function returns the loss of each row instead of the sum.

    The gradients of the hidden states and of the head are proportional to the upstream gradient of
    the loss. So forward, which has the logits, computes both gradients for an upstream gradient of
    1. Backward multiplies them by the real upstream gradient. The gradients are therefore also
    correct with loss scaling, and if backward is called more than once. The gradients are divided
    by `items` before they are rounded. This is also done for a sum, since callers usually divide a
    sum by the number of items. If backward then multiplies them by 1 or by a power of two, no value
    is rounded a second time. With a trainable head and a loss per row, the gradients are computed
    in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        items: Tensor | None,
        is_mean: bool,
        rule: RuleArguments,
        dtype: torch.dtype,
        chunk: int,
        needs: tuple[bool, bool, bool],
    ) -> Tensor:
        trains_head = needs[1] or needs[2]
        ctx.is_deferred = trains_head and items is None
        needed_now = needs
        if ctx.is_deferred:
            needed_now = (False, False, False)
        if items is None:
            upstream = hidden_TH.new_ones((), dtype=arithmetic_dtype(dtype))
        else:
            upstream = items.reciprocal()
        # A deferred backward computes the logits again, and none of them again in fp32. Therefore
        # its softmax needs the logsumexp of logits that were not computed in fp32 either.
        exact = not ctx.is_deferred
        # `linear_cross_entropy` has switched autocast off
        operands = cast_head(dtype, hidden_TH, weight_VH, bias_V)
        results = Forward(
            *_forward(*operands, targets_T, upstream, *rule, chunk, *needed_now, exact)
        )
        if items is None:
            loss = results.loss_T
        elif is_mean:
            loss = results.loss_T.sum() / items
        else:
            loss = results.loss_T.sum()
        ctx.rule = rule
        ctx.dtype = dtype
        ctx.needs = needs
        ctx.dtypes = head_dtypes(hidden_TH, weight_VH, bias_V)
        if ctx.is_deferred:
            ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, results.lse_T)
            return loss
        divisor = items
        if is_mean:
            divisor = None
        ctx.save_for_backward(results.dhidden_TH, results.dweight_VH, results.dbias_V, divisor)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cross_entropy")
        with autocast_off(dloss):
            if ctx.is_deferred:
                hidden_TH, weight_VH, bias_V, targets_T, lse_T = ctx.saved_tensors
                operands = cast_head(ctx.dtype, hidden_TH, weight_VH, bias_V)
                raw_grads = _backward(
                    *operands, targets_T, lse_T, dloss.contiguous(), *ctx.rule, *ctx.needs[:2]
                )
                grads = cast_gradients(raw_grads, ctx.dtypes, ctx.needs)
            else:
                *raw_grads, items = ctx.saved_tensors
                factor = dloss
                if items is not None:
                    factor = dloss * items
                if factor.dim():
                    factor = factor.unsqueeze(-1)
                grads = [None, None, None]
                for i, grad in enumerate(raw_grads):
                    if ctx.needs[i]:
                        grads[i] = scale_to_dtype(grad, factor, ctx.dtypes[i])
        return *grads, None, None, None, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    num_items: int | float | Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Computes `cross_entropy(F.linear(hidden, weight, bias), targets)` without storing all logits
    (tokens x vocabulary).

    hidden   X[*n H]   any float dtype
    weight   W[V H]    any float dtype, frozen or trainable
    targets  int[*n]   classes 0..V-1, or ignore_index: those rows are not computed
    bias     B[V]
    ->       fp32[]    fp32[*n] with reduction="none"; fp64 for fp64 inputs
    inside   the matrix product in autocast's dtype, or without autocast in the promoted dtype of
             hidden and weight; the loss in fp32, as in `cross_entropy`
    grads    hidden: X   weight: W   bias: B   accumulated over chunks in fp32
    With reduction="mean", num_items is the divisor. With reduction="sum", num_items is the number
    by which the caller will divide the sum. If num_items is given, the gradients are divided by it
    before they are rounded, so that they are rounded only once. chunk is the number of rows whose
    logits exist at once. Its default is computed from V and a fixed number of bytes, and does not
    depend on the free memory.
    Raises   IsotypeError SH002 for a target out of range; DtypeError DT001, ShapeError SH001;
             UsageError
    """
    check_head(hidden, weight, bias, chunk)
    if reduction == "sum":
        # here num_items has an effect on a sum, as the docstring says
        check_reduction(reduction, None)
    else:
        check_reduction(reduction, num_items)
    rule = LossRule.from_options(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        softcap=softcap,
        z_loss=z_loss,
    )
    check_targets(targets, tuple(hidden.shape[:-1]), weight.shape[0], rule)
    dtype = product_dtype(hidden, weight)
    hidden_TH = hidden.reshape(-1, hidden.shape[-1])
    targets_T = targets.reshape(-1)
    needs = required_gradients(hidden, weight, bias)
    if chunk is None:
        chunk = default_chunk(targets.numel(), weight, (dtype,), needs[1])
    with autocast_off(hidden):
        if reduction == "none":
            items = None
        else:
            items = loss_divisor(
                targets_T, reduction, num_items, ignore_index, arithmetic_dtype(dtype)
            )
        loss: Tensor = apply_function(
            LinearCrossEntropy,
            hidden_TH,
            weight,
            bias,
            targets_T,
            items,
            reduction == "mean",
            rule.arguments,
            dtype,
            chunk,
            needs,
        )
    if reduction == "none":
        return loss.reshape(targets.shape)
    return loss


def loss_divisor(
    targets_T: Tensor,
    reduction: str,
    num_items: int | float | Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the number by which the sum of the losses is divided to get their mean. For
    reduction="sum", returns the number by which the caller will probably divide the sum. The result
    is a scalar tensor on the device of the targets.
    """
    if isinstance(num_items, Tensor):
        divisor = num_items.detach().to(targets_T.device, dtype).reshape(())
    elif num_items is not None:
        divisor = torch.full((), num_items, dtype=dtype, device=targets_T.device)
    else:
        divisor = (targets_T != ignore_index).sum().to(dtype)
    if reduction == "mean":
        return divisor
    return divisor.clamp_min(1.0)


def scratch_estimators() -> dict[Any, Callable[..., int]]:
    """Returns estimators for memory plans. Each operator is mapped to a function that gets the
    operator's arguments. The function returns the number of bytes of temporary memory that the
    operator needs, for one chunk of logits and their gradient.
    """
    return {torch.ops.isotype.linear_cross_entropy_forward.default: _forward_scratch_bytes}


def _forward_scratch_bytes(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Any, targets_T: Tensor, *rest: Any
) -> int:
    *_, chunk, want_dhidden, want_dweight, want_dbias, _ = rest
    rows = min(int(chunk), targets_T.numel())
    classes = weight_VH.shape[0]
    products_dtype = operand_dtype(hidden_TH.dtype, hidden_TH.device)
    output_dtype = result_dtype(products_dtype, hidden_TH.device)
    logits = rows * classes * output_dtype.itemsize
    gradient = 0
    if output_dtype != products_dtype and (want_dhidden or want_dweight or want_dbias):
        gradient = rows * classes * products_dtype.itemsize
    head = 0
    if weight_VH.dtype != products_dtype:
        # the head in the dtype of the product's operands
        head = weight_VH.numel() * products_dtype.itemsize
    return logits + gradient + head + 2 * rows * hidden_TH.shape[1] * output_dtype.itemsize

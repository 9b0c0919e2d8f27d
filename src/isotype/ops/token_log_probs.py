"""Defines the op `linear_log_probs` and its autograd function. It computes values of a head's
logits for each token, such as the log-probability of the target, with gradients. T is the number of
tokens, H the hidden size, and V the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..environment.planned_device import target_device_type
from ..errors import UsageError
from .backend import (
    apply_function,
    arithmetic_dtype,
    autocast_off,
    product_dtype,
    refuse_second_derivative,
)
from .contract import OpContract
from .cross_entropy.op import apply_rule
from .cross_entropy.rows import CppRowKernels, LogitsSource, RecomputedLogits, choose_row_kernels
from .cross_entropy.rule import (
    RULE,
    LossRule,
    RequestedValues,
    RowValues,
    RuleArguments,
    Upstream,
    allocate_row_values,
    check_targets,
)
from .library import library_op
from .linear_cross_entropy.chunked import (
    Chunks,
    cast_gradients,
    cast_head,
    check_head,
    default_chunk,
    empty_gradients,
    gradient_factors,
    gradients_by_vocabulary,
    head_dtypes,
    largest_gradient,
    required_gradients,
    rows_to_compute,
    scale_to_dtype,
    shape_if,
    stored_gradient_dtype,
)
from .linear_cross_entropy.op import reference_logits

LINEAR_LOG_PROBS = OpContract(
    "hidden: X[*n H], weight: W[V H], targets: int[*n] -> fp32|fp64[*n], fp32|fp64[*n],"
    " fp32|fp64[*n]",
    inside="fp32",
    grads={"hidden": "X", "weight": "W"},
    autocast="fp32",
)


def linear_log_probs_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, ...]:
    """Computes every output of `linear_log_probs` in plain PyTorch, differentiated by autograd
    (log_probs, entropy and logsumexp have gradients).
    """
    rule = LossRule.from_options(
        ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap
    )
    with autocast_off(hidden):
        z = apply_rule(reference_logits(hidden, weight, bias), rule) / temperature
        ignored = targets == ignore_index
        lse = torch.logsumexp(z, -1)
        target_logit = z.gather(-1, targets.masked_fill(ignored, 0).long().unsqueeze(-1)).squeeze(
            -1
        )
        log_p = z - lse.unsqueeze(-1)
        # p log p is 0 where p is 0, also for a class that is masked with -inf
        p = log_p.exp()
        entropy = -(p * log_p.clamp_min(torch.finfo(z.dtype).min)).sum(-1)
        squares = torch.logsumexp(2 * log_p.detach(), -1)
        values = (target_logit - lse, entropy, lse, squares, z.detach().mean(-1))
        top1 = z.detach().argmax(-1).masked_fill(ignored, -1)
        return *(x.masked_fill(ignored, 0.0) for x in values), top1


class Forward(NamedTuple):
    """The results of forward.

    dhidden_TH  for each row, the gradient of the requested value (`gradient_of`) with respect to
                the hidden state of the row; empty if no gradient was requested
    recomputed  the logits that the C++ kernels recomputed in fp32; empty if none was recomputed
    """

    values: RowValues
    dhidden_TH: Tensor
    recomputed: RecomputedLogits


def loses_fp32_sums(hidden_TH: Tensor) -> bool:
    """Whether a matrix product with these rows rounds its fp32 sums to a narrower dtype. If it
    does, the C++ kernels can compute the logit of the target and the largest logits again in fp32.
    """
    return hidden_TH.dtype == torch.bfloat16 and target_device_type(hidden_TH.device) == "cpu"


def empty_outputs(
    hidden_TH: Tensor, requested: RequestedValues, gradient_of: str, has_recomputed: bool
) -> Forward:
    """Allocates outputs of the right shapes and dtypes. The outputs are filled with zeros, since
    forward does not write to ignored rows.
    """
    stored_dtype = stored_gradient_dtype(hidden_TH.dtype, hidden_TH.device)
    tokens = hidden_TH.shape[0]
    gradient_shape = shape_if(bool(gradient_of), hidden_TH.shape)
    recomputed_rows = 0
    if has_recomputed:
        recomputed_rows = tokens
    return Forward(
        allocate_row_values(
            hidden_TH.shape[0], arithmetic_dtype(hidden_TH.dtype), hidden_TH.device, requested
        ),
        torch.zeros(gradient_shape, dtype=stored_dtype, device=hidden_TH.device),
        RecomputedLogits.allocate(recomputed_rows, hidden_TH.device),
    )


# names of the values that `linear_log_probs` can return
OUTPUTS = ("log_probs", "entropy", "logsumexp", "log_sum_sq_probs", "mean_logits", "top1")


class TokenLogProbs(NamedTuple):
    """The outputs of `linear_log_probs`. Each has one value per token, which is 0 for an ignored
    token (-1 in top1). An output that was not requested is None.

    log_probs         fp32[*n]   log-probability of the target; has a gradient
    entropy           fp32[*n]   nats; has a gradient
    logsumexp         fp32[*n]   has a gradient; its square is the z-loss
    log_sum_sq_probs  fp32[*n]   log of the sum of p^2
    mean_logits       fp32[*n]   over the vocabulary, after scale, softcap and temperature
    top1              int64[*n]  the most likely class; if several are equally likely, the first
    """

    log_probs: Tensor | None
    entropy: Tensor | None
    logsumexp: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    top1: Tensor | None


def _fake_forward(hidden_TH: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    requested, gradient_of = rest[-2:]
    outputs = empty_outputs(
        hidden_TH, RequestedValues(*requested), gradient_of, loses_fp32_sums(hidden_TH)
    )
    return (*outputs.values, outputs.dhidden_TH, *outputs.recomputed)


@library_op(
    f"linear_log_probs_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, {RULE},"
    " int chunk, bool[] requested, str gradient_of) -> (Tensor, Tensor, Tensor, Tensor, Tensor,"
    " Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_forward,
)
def _forward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    ignore_index: int,
    factors: Sequence[float],
    chunk: int,
    requested: Sequence[bool],
    gradient_of: str,
) -> tuple[Tensor, ...]:
    """Computes the requested values of every row that is not ignored.

    requested    the fields of a `RequestedValues`
    gradient_of  "log_probs" or "logsumexp" to also compute the gradient of this value with respect
                 to the hidden state; "" to compute no gradient
    """
    rule = LossRule.from_arguments(ignore_index, factors)
    requested = RequestedValues(*requested)
    out = empty_outputs(hidden_TH, requested, gradient_of, loses_fp32_sums(hidden_TH))
    chunks = Chunks(hidden_TH, weight_VH, bias_V, targets_T, rule, chunk, bool(gradient_of))
    pre_scale, post_scale = gradient_factors(
        chunks.operand_dtype, hidden_TH.new_ones((), dtype=arithmetic_dtype(hidden_TH.dtype))
    )
    kernels = choose_row_kernels(chunks.logits)
    for rows, x_NH, z_NV, g_NV in chunks:
        ignored = targets_T[rows] == rule.ignore_index
        targets_N = targets_T[rows].masked_fill(ignored, 0)
        if kernels is CppRowKernels:
            source_argument: dict[str, Any] = {
                "source": LogitsSource.from_product(z_NV, x_NH, chunks.weight_VH, chunks.bias_V)
            }
        else:
            source_argument = {}
        values = kernels.row_values(z_NV, targets_N, rule, requested, **source_argument)
        for output, row_part in zip(out.values, values):
            if output is out.values.top1:
                fill = -1
            else:
                fill = 0
            if output.numel():
                output[rows] = row_part.masked_fill(ignored, fill)
        source = source_argument.get("source")
        recomputed_argument: dict[str, Any] = {}
        if source and source.recomputed:
            recomputed_argument["recomputed"] = source.recomputed
            for output, row_part in zip(out.recomputed, source.recomputed):
                output[rows] = row_part
        if not gradient_of:
            continue
        unit_N = pre_scale.expand(z_NV.shape[0]).masked_fill(ignored, 0)
        if gradient_of == "log_probs":
            upstream = Upstream(unit_N, None, None, None)
        else:
            upstream = Upstream(None, unit_N, None, None)
        lse_N = values.logsumexp.masked_fill(ignored, torch.inf)
        kernels.row_value_gradients(
            z_NV, targets_N, lse_N, upstream, rule, g_NV, **recomputed_argument
        )
        chunks.write_dhidden(out.dhidden_TH, rows, g_NV, post_scale)
    return (*out.values, out.dhidden_TH, *out.recomputed)


@library_op(
    "linear_log_probs_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor"
    " lse, Tensor? entropy, Tensor at, Tensor exact, Tensor? dlog_probs, Tensor? dlse, Tensor?"
    f" dentropy, {RULE}, bool want_dhidden, bool want_dweight) -> (Tensor, Tensor, Tensor)",
    fake=empty_gradients,
)
def _backward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    lse_T: Tensor,
    entropy_T: Tensor | None,
    recomputed_classes_T9: Tensor,
    recomputed_logits_T9: Tensor,
    dlog_probs_T: Tensor | None,
    dlse_T: Tensor | None,
    dentropy_T: Tensor | None,
    ignore_index: int,
    factors: Sequence[float],
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of hidden, weight and bias. A gradient that is not needed is empty.
    dlog_probs, dlse and dentropy are upstream gradients or None.
    """
    rule = LossRule.from_arguments(ignore_index, factors)
    wide_dtype = arithmetic_dtype(hidden_TH.dtype)
    rows = rows_to_compute(targets_T, rule)
    ignored = targets_T[rows] == rule.ignore_index
    targets_N = targets_T[rows].masked_fill(ignored, 0)
    lse_N = lse_T[rows].masked_fill(ignored, torch.inf)
    entropy_N = None
    if entropy_T is not None:
        entropy_N = entropy_T[rows]
    if recomputed_classes_T9.numel():
        recomputed_N = RecomputedLogits(
            recomputed_classes_T9[rows].contiguous(), recomputed_logits_T9[rows].contiguous()
        )
    else:
        recomputed_N = None
    upstream_gradients: list[Tensor | None] = []
    for upstream_T in (dlog_probs_T, dlse_T, dentropy_T):
        if upstream_T is None:
            upstream_gradients.append(None)
        else:
            upstream_gradients.append(upstream_T[rows].to(wide_dtype).masked_fill(ignored, 0))

    def write_gradient(z: Tensor, out: Tensor, first: int, factor: Tensor | None) -> None:
        scaled_gradients = list(upstream_gradients)
        if factor is not None:
            for i, upstream_N in enumerate(upstream_gradients):
                if upstream_N is not None:
                    scaled_gradients[i] = upstream_N * factor
        kernels = choose_row_kernels(z)
        recomputed_argument: dict[str, Any] = (
            {"recomputed": recomputed_N} if kernels is CppRowKernels and recomputed_N else {}
        )
        kernels.row_value_gradients(
            z,
            targets_N,
            lse_N,
            Upstream(scaled_gradients[0], scaled_gradients[1], scaled_gradients[2], entropy_N),
            rule,
            out,
            first,
            **recomputed_argument,
        )

    upstream_size = largest_gradient(*(u for u in upstream_gradients if u is not None))
    return gradients_by_vocabulary(
        hidden_TH,
        weight_VH,
        bias_V,
        rows,
        upstream_size,
        write_gradient,
        want_dhidden,
        want_dweight,
    )


class LinearLogProbs(torch.autograd.Function):
    """The autograd function of `linear_log_probs`, for a given compute dtype. Backward does no work
    for outputs that have no upstream gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        rule: RuleArguments,
        dtype: torch.dtype,
        chunk: int,
        requested: RequestedValues,
        first_output: str,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor, ...]:
        """Computes the outputs. first_output names the output whose gradient is computed in forward
        if the head is frozen.
        """
        ctx.set_materialize_grads(False)
        gradient_of = ""
        if needs == (True, False, False):
            gradient_of = first_output
        with autocast_off(hidden_TH):
            outputs = _forward(
                *cast_head(dtype, hidden_TH, weight_VH, bias_V),
                targets_T,
                *rule,
                chunk,
                requested,
                gradient_of,
            )
        *values, dhidden_TH, recomputed_classes_T9, recomputed_logits_T9 = outputs
        ctx.rule = rule
        ctx.dtype = dtype
        ctx.needs = needs
        ctx.gradient_of = gradient_of
        ctx.dtypes = head_dtypes(hidden_TH, weight_VH, bias_V)
        _, lse_T, entropy_T, *without_gradient = values
        head = (hidden_TH, weight_VH, bias_V)
        entropy = None
        if requested.entropy:
            entropy = entropy_T
        stored_dhidden_TH = None
        if gradient_of:
            stored_dhidden_TH = dhidden_TH
        ctx.save_for_backward(
            *head,
            targets_T,
            lse_T,
            entropy,
            stored_dhidden_TH,
            recomputed_classes_T9,
            recomputed_logits_T9,
        )
        ctx.mark_non_differentiable(*without_gradient)
        return tuple(values)

    @staticmethod
    def backward(
        ctx: Any,
        dlog_probs_T: Tensor | None,
        dlse_T: Tensor | None,
        dentropy_T: Tensor | None,
        *_: Any,
    ) -> tuple[Any, ...]:
        refuse_second_derivative("linear_log_probs")
        (
            hidden_TH,
            weight_VH,
            bias_V,
            targets_T,
            lse_T,
            entropy_T,
            stored_dhidden_TH,
            *recomputed,
        ) = ctx.saved_tensors
        grads: list[Tensor | None] = [None, None, None]
        if dlog_probs_T is None and dlse_T is None and dentropy_T is None:
            return (*grads, None, None, None, None, None, None, None)
        with autocast_off(hidden_TH):
            if ctx.gradient_of == "log_probs":
                dfirst_T = dlog_probs_T
                dother_T = dlse_T
            else:
                dfirst_T = dlse_T
                dother_T = dlog_probs_T
            if stored_dhidden_TH is not None and dother_T is None and dentropy_T is None:
                assert dfirst_T is not None
                grads[0] = scale_to_dtype(stored_dhidden_TH, dfirst_T.unsqueeze(-1), ctx.dtypes[0])
            else:
                upstream = (
                    None if u is None else u.contiguous()
                    for u in (dlog_probs_T, dlse_T, dentropy_T)
                )
                operands = cast_head(ctx.dtype, hidden_TH, weight_VH, bias_V)
                raw_grads = _backward(
                    *operands,
                    targets_T,
                    lse_T,
                    entropy_T,
                    *recomputed,
                    *upstream,
                    *ctx.rule,
                    *ctx.needs[:2],
                )
                grads = cast_gradients(raw_grads, ctx.dtypes, ctx.needs)
        return (*grads, None, None, None, None, None, None, None)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    outputs: tuple[str, ...] = ("log_probs",),
    ignore_index: int = -100,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> TokenLogProbs:
    """Computes per-token log-probabilities of `F.linear(hidden, weight, bias)` without storing all
    logits (tokens x vocabulary). Also computes the other values that are listed in `outputs`.

    hidden   X[*n H]   any float dtype
    weight   W[V H]    any float dtype, frozen or trainable
    targets  int[*n]   classes 0..V-1, or ignore_index: those rows are not computed
    bias     B[V]
    ->       TokenLogProbs of fp32[*n]; fp64 for fp64 inputs
    inside   the matrix product in autocast's dtype, or without autocast in the promoted dtype of
             hidden and weight; all other arithmetic in fp32, on softcap * tanh(logit_scale * logits
             / softcap) / temperature
    grads    hidden: X   weight: W   bias: B   through log_probs, entropy and logsumexp, for any
                                               upstream gradient per token
    chunk    the number of rows whose logits exist at once; the default is computed from V and a
             fixed number of bytes, and does not depend on the free memory
    Raises   IsotypeError SH002 for a target out of range; DtypeError DT001, ShapeError SH001;
             UsageError
    """
    check_head(hidden, weight, bias, chunk)
    unknown = set(outputs) - set(OUTPUTS)
    if unknown or not outputs:
        raise UsageError(
            f"outputs names {', '.join(sorted(unknown)) or 'nothing'}: expected some of"
            f" {', '.join(OUTPUTS)}"
        )
    if not temperature > 0.0:
        raise UsageError(f"temperature is {temperature}: expected a positive number")
    rule = LossRule.from_options(
        ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap
    )
    check_targets(targets, tuple(hidden.shape[:-1]), weight.shape[0], rule)
    dtype = product_dtype(hidden, weight)
    needs = required_gradients(hidden, weight, bias)
    if chunk is None:
        chunk = default_chunk(targets.numel(), weight, (dtype,), False)
    # c tanh(s x / c) / T equals (c / T) tanh((s / T) x / (c / T))
    rule = replace(
        rule, logit_scale=rule.logit_scale / temperature, softcap=rule.softcap / temperature
    )
    requested = RequestedValues(
        *(name in outputs for name in ("entropy", "log_sum_sq_probs", "mean_logits", "top1"))
    )
    log_probs, lse, entropy, squares, mean, top1 = apply_function(
        LinearLogProbs,
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        targets.reshape(-1),
        rule.arguments,
        dtype,
        chunk,
        requested,
        next((name for name in ("log_probs", "logsumexp") if name in outputs), ""),
        needs,
    )
    values = (log_probs, entropy, lse, squares, mean, top1)
    return TokenLogProbs(
        *(x.reshape(targets.shape) if name in outputs else None for name, x in zip(OUTPUTS, values))
    )

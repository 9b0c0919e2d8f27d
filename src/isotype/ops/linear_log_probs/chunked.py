"""Per-token values in chunks of rows, and the gradients of hidden, head and bias. T tokens, N tokens not ignored, H hidden, V vocabulary.

A frozen head: the gradient of the log-probability by the hidden row (or of logsumexp, where log-probabilities are not asked for) is made in
forward while the logits exist, for an upstream gradient of 1; two products in all. A trainable head, or a gradient through more than one
output, waits for backward, which computes logits again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..autocast import wide
from ..cross_entropy.rule import LossRule
from ..linear_cross_entropy.chunked import by_vocabulary, largest, rows_to_compute, stored_gradient_dtype
from ..linear_cross_entropy.products import (
    gradient_factors,
    operand_dtype,
    product,
    product_over_classes,
    result_dtype,
    rows_of_logits,
)
from .paths import paths
from .rows import RowValues, Upstream, Wanted, room


class Forward(NamedTuple):
    """`dhidden_TH` is the gradient of one value of each row by its hidden row; empty where it was not asked for."""

    values: RowValues
    dhidden_TH: Tensor


def like(hidden_TH: Tensor, wanted: Wanted, gradient_of: str) -> Forward:
    """Outputs of the right shapes and dtypes; ignored rows stay 0."""
    stored = stored_gradient_dtype(hidden_TH.dtype, hidden_TH.device)
    return Forward(
        room(hidden_TH.shape[0], wide(hidden_TH.dtype), hidden_TH.device, wanted),
        torch.zeros(hidden_TH.shape if gradient_of else (0,), dtype=stored, device=hidden_TH.device),
    )


def forward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    rule: LossRule,
    chunk: int,
    wanted: Wanted,
    gradient_of: str,
) -> Forward:
    """The values of every row that is not ignored; ignored rows are not computed.

    gradient_of  log_probs or logsumexp: its gradient by the hidden row is made too; "" makes none
    """
    out = like(hidden_TH, wanted, gradient_of)
    device, operand = hidden_TH.device, operand_dtype(hidden_TH.dtype, hidden_TH.device)
    counted_N = rows_to_compute(targets_T, rule)
    count = targets_T.numel() if counted_N is None else counted_N.numel()
    weight_VH = weight_VH.to(operand)
    result = result_dtype(operand, device)
    bias_V = None if bias_V is None else bias_V.to(result)
    most, classes = min(chunk, count), weight_VH.shape[0]
    logits = rows_of_logits(most, classes, result, device)
    dlogits = logits if result == operand else rows_of_logits(most if gradient_of else 0, classes, operand, device)
    one = hidden_TH.new_ones((), dtype=wide(hidden_TH.dtype))
    into, back = gradient_factors(operand, one)
    compute = paths(logits)
    for start in range(0, count, chunk):
        rows: slice | Tensor = slice(start, min(start + chunk, count)) if counted_N is None else counted_N[start : start + chunk]
        ignored = targets_T[rows] == rule.ignore_index
        x_NH, targets_N = hidden_TH[rows].to(operand), targets_T[rows].masked_fill(ignored, 0)
        z_NV = product(x_NH, weight_VH.t(), logits[: x_NH.shape[0]])
        if bias_V is not None:
            z_NV.add_(bias_V)
        values = compute.forward(z_NV, targets_N, rule, wanted)
        for whole, part in zip(out.values, values):
            if whole.numel():
                whole[rows] = part.masked_fill(ignored, -1 if whole is out.values.top1 else 0)
        if not gradient_of:
            continue
        g_NV = dlogits[: x_NH.shape[0]]
        one_N = into.expand(x_NH.shape[0]).masked_fill(ignored, 0)
        upstream = Upstream(one_N, None, None, None) if gradient_of == "log_probs" else Upstream(None, one_N, None, None)
        compute.backward(z_NV, targets_N, values.logsumexp.masked_fill(ignored, torch.inf), upstream, rule, g_NV)
        dx_NH = product_over_classes(g_NV, weight_VH, torch.empty_like(x_NH, dtype=result))
        out.dhidden_TH[rows] = (dx_NH if back is None else dx_NH * back).to(out.dhidden_TH.dtype)
    return out


def backward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    lse_T: Tensor,
    entropy_T: Tensor | None,
    upstream_T: tuple[Tensor | None, Tensor | None, Tensor | None],
    rule: LossRule,
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; empty where not wanted.

    upstream_T  of the log-probabilities, of logsumexp and of the entropies; None where there is none
    """
    fp32 = wide(hidden_TH.dtype)
    counted_N = rows_to_compute(targets_T, rule)
    rows: slice | Tensor = slice(None) if counted_N is None else counted_N
    ignored = targets_T[rows] == rule.ignore_index
    targets_N, lse_N = targets_T[rows].masked_fill(ignored, 0), lse_T[rows].masked_fill(ignored, torch.inf)
    entropy_N = None if entropy_T is None else entropy_T[rows]
    given = [None if u is None else u[rows].to(fp32).masked_fill(ignored, 0) for u in upstream_T]

    def gradient(z: Tensor, out: Tensor, first: int, factor: Tensor | None) -> None:
        scaled = [u if u is None or factor is None else u * factor for u in given]
        paths(z).backward(z, targets_N, lse_N, Upstream(scaled[0], scaled[1], scaled[2], entropy_N), rule, out, first)

    unit = largest(*(u for u in given if u is not None))
    return by_vocabulary(hidden_TH, weight_VH, bias_V, counted_N, unit, gradient, want_dhidden, want_dweight)

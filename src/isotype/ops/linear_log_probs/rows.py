"""Per-token values of logits, and their gradient, in blocks of rows that stay in the cache: any device. N rows, V vocabulary.

With z the logits after scale and softcap, p = softmax(z) and H the entropy:
    d log p_target / dz_v = [v = target] - p_v        d H / dz_v = -p_v (log p_v + H)        d logsumexp / dz_v = p_v
"""

from __future__ import annotations

import sys
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..backend import cpp_runs, triton_runs
from ..cross_entropy.eager import blocks, widen_, work_buffer
from ..cross_entropy.rule import LossRule


class Wanted(NamedTuple):
    """Which optional outputs are computed. Log-probability and logsumexp always are."""

    entropy: bool
    log_sum_sq_probs: bool
    mean_logits: bool
    top1: bool


class RowValues(NamedTuple):
    """fp32[N] each (top1 int64[N]); a tensor that was not asked for is empty."""

    log_probs: Tensor
    logsumexp: Tensor
    entropy: Tensor
    log_sum_sq_probs: Tensor
    mean_logits: Tensor
    top1: Tensor


class Upstream(NamedTuple):
    """Upstream gradients a row, fp32[N]; None where one is zero. `entropy` is the entropy itself, needed beside dentropy."""

    dlog_probs: Tensor | None
    dlogsumexp: Tensor | None
    dentropy: Tensor | None
    entropy: Tensor | None


def room(rows: int, dtype: torch.dtype, device: torch.device, wanted: Wanted) -> RowValues:
    """Outputs of the right shapes, for `rows` rows: 0, and -1 for top1, where nothing is written."""

    def zeros(asked: bool) -> Tensor:
        return torch.zeros(rows if asked else 0, dtype=dtype, device=device)

    top1 = torch.full((rows if wanted.top1 else 0,), -1, dtype=torch.int64, device=device)
    return RowValues(zeros(True), zeros(True), zeros(wanted.entropy), zeros(wanted.log_sum_sq_probs), zeros(wanted.mean_logits), top1)


def forward(logits_NV: Tensor, targets_N: Tensor, rule: LossRule, wanted: Wanted) -> RowValues:
    """The values of each row; no target is ignored."""
    work = work_buffer(logits_NV)
    values = room(logits_NV.shape[0], work.dtype, logits_NV.device, wanted)
    for rows in blocks(logits_NV.shape[0], logits_NV.shape[1], logits_NV.device):
        z = widen_(work[: rows.stop - rows.start], logits_NV[rows], rule)
        picked = z.gather(-1, targets_N[rows].long().unsqueeze(-1)).squeeze(-1)
        if wanted.mean_logits:
            values.mean_logits[rows] = z.mean(-1)
        if wanted.top1:
            values.top1[rows] = z.argmax(-1)
        top = z.amax(-1, keepdim=True)
        top = top.masked_fill_(top == -torch.inf, 0.0)
        z.sub_(top)
        e = z.exp()
        total = e.sum(-1)
        values.logsumexp[rows] = total.log() + top.squeeze(-1)
        values.log_probs[rows] = picked - values.logsumexp[rows]
        if wanted.log_sum_sq_probs:
            values.log_sum_sq_probs[rows] = (e * e).sum(-1).log() - 2 * total.log()
        if wanted.entropy:
            # from z - max, whose size is that of the entropy: no cancellation for large logits
            values.entropy[rows] = total.log() - (e * z.clamp_(min=-1e30)).sum(-1) / total
    return values


def backward(
    logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, upstream: Upstream, rule: LossRule, out_NV: Tensor, first: int = 0
) -> Tensor:
    """The gradient of the logits, written to `out_NV`, which may be `logits_NV` itself. Column 0 is the class `first`.

    A row whose logsumexp is inf is an ignored one: its gradient is 0, also where its logits are not finite.
    """
    work = work_buffer(logits_NV)
    for rows in blocks(logits_NV.shape[0], logits_NV.shape[1], logits_NV.device):
        x = logits_NV[rows]
        z = widen_(work[: rows.stop - rows.start], x, rule)
        log_p = z.sub_(lse_N[rows].unsqueeze(-1))
        constant = torch.zeros_like(lse_N[rows], dtype=work.dtype)
        if upstream.dlogsumexp is not None:
            constant += upstream.dlogsumexp[rows]
        if upstream.dlog_probs is not None:
            constant -= upstream.dlog_probs[rows]
        factor = constant.unsqueeze(-1)
        if upstream.dentropy is not None and upstream.entropy is not None:
            # p (log p + H) is 0 where p is, also for a class masked with -inf
            shifted = log_p.clamp(min=-1e30) + upstream.entropy[rows].unsqueeze(-1)
            factor = factor - upstream.dentropy[rows].unsqueeze(-1) * shifted
        g = log_p.exp_().mul_(factor)
        if upstream.dlog_probs is not None:
            local = targets_N[rows] - first
            here = (local >= 0) & (local < g.shape[-1])
            added = upstream.dlog_probs[rows].to(g.dtype).masked_fill(~here, 0.0).unsqueeze(-1)
            g.scatter_add_(-1, local.masked_fill(~here, 0).long().unsqueeze(-1), added)
        if rule.softcap:
            # the logits again: softcapping is rare, and a second buffer would halve the block
            slope = torch.tanh(x.to(g.dtype) * (rule.logit_scale / rule.softcap))
            g.mul_(1 - slope * slope)
        if rule.logit_scale != 1.0:
            g.mul_(rule.logit_scale)
        out_NV[rows] = g.masked_fill_((lse_N[rows] == torch.inf).unsqueeze(-1), 0.0)
    return out_NV


class Paths(Protocol):
    """The functions that each of these modules has."""

    def forward(self, logits_NV: Tensor, targets_N: Tensor, rule: LossRule, wanted: Wanted) -> RowValues: ...
    def backward(
        self, logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, upstream: Upstream, rule: LossRule, out_NV: Tensor, first: int = 0
    ) -> Tensor: ...


def paths(x: Tensor) -> Paths:
    if triton_runs(x):
        from . import triton

        return triton
    from . import cpu

    return cpu if cpp_runs(cpu.KERNELS, x) else sys.modules[__name__]

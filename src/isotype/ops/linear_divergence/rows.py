"""Computes the divergence between the student's and the teacher's logits of each row. The
divergence is computed by C++ kernels, or in blocks by plain PyTorch on any device. N is the number
of rows, and V the vocabulary size.

z is the student's logits, to which scale and softcap were applied and which were divided by the
temperature. p contains the student's probabilities, q the teacher's probabilities, and m their
mixture:
    beta 0   D = sum q ln(q / p)       dD / dz = p - q
    beta 1   D = sum p ln(p / q)       dD / dz = p (ln(p / q) - D)
    between  D = beta sum q ln(q / m) + (1 - beta) K, K = sum p ln(p / m)
             dD / dz = (1 - beta) p (ln(p / m) - K)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backend import arithmetic_dtype
from ..cpp import CppKernels
from ..cross_entropy.rows import NO_SOURCE_ARGUMENTS, LogitsSource
from ..cross_entropy.rule import LossRule, wide_blocks

KERNELS = CppKernels(__file__, divergences="dpiiiffpipiipdpiffpipiipfppppi")
MIN_LOG_PROB = -1e30  # finite, so that p ln p of a masked class is 0 and not NaN


class DivergenceParameters(NamedTuple):
    """The parameters of a divergence. They are beta, and the scale and the softcap of the student's
    and of the teacher's logits. Scale and softcap are already divided by the temperature.
    """

    student: LossRule
    teacher: LossRule
    beta: float


def divergence_(s: Tensor, t: Tensor, beta: float, *, gradient: bool) -> Tensor:
    """Computes the divergence of fp32 or fp64 log-probabilities, as fp32[N]. Both tensors are
    overwritten. If `gradient` is set, `s` is overwritten by the gradient of the student's logits.
    """
    p = s.exp()
    log_ratio = t - s
    if beta == 0.0:
        q = t.exp_()
        if gradient:
            torch.sub(p, q, out=s)
        return q.mul_(log_ratio).sum(-1)
    if beta == 1.0:
        ratio = log_ratio.neg_()
        student_weight = 1.0
        divergence = kl = (p * ratio).sum(-1)
    else:
        # ln(p / m) = -ln(1 - beta + beta q / p) avoids the cancellation of two large logarithms. At
        # a ratio above e^80 one of p and q is 0
        clamped = log_ratio.clamp_(-80, 80)
        student_weight = 1.0 - beta
        ratio = clamped.expm1().mul_(beta).log1p_().neg_()
        kl = (p * ratio).sum(-1)
        divergence = (t.exp_().mul_(clamped.add_(ratio)).sum(-1) * beta).add_(
            kl, alpha=student_weight
        )
    if gradient:
        # the derivatives through the mixture cancel
        torch.sub(ratio, kl.unsqueeze(-1), out=s).mul_(p).mul_(student_weight)
    return divergence


def divergences(
    z_NV: Tensor,
    teacher_NV: Tensor,
    parameters: DivergenceParameters,
    out_NV: Tensor,
    upstream_N: Tensor | None,
    want_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Returns divergences and entropies, fp32[N] each (empty if not needed). If `upstream_N` is
    given, the gradient of z_NV is written to `out_NV`.
    """
    row_count = z_NV.shape[0]
    dtype = arithmetic_dtype(z_NV.dtype)
    device = z_NV.device
    divergence, entropy = (
        torch.empty(size, dtype=dtype, device=device)
        for size in (row_count, row_count if want_entropy else 0)
    )
    (student, teacher, beta), with_gradient = parameters, upstream_N is not None
    for (rows, s), (_, t) in zip(
        wide_blocks(z_NV, student), wide_blocks(teacher_NV, teacher), strict=True
    ):
        slope = 1 - (s / student.softcap).square_() if with_gradient and student.softcap else None
        for z in (s, t):
            z.sub_(z.logsumexp(-1, keepdim=True)).clamp_(min=MIN_LOG_PROB)
        if want_entropy:
            entropy[rows] = -(s.exp() * s).sum(-1)
        divergence[rows] = divergence_(s, t, beta, gradient=with_gradient)
        if upstream_N is not None:
            s.mul_((upstream_N[rows] * student.logit_scale).unsqueeze(-1))
            out_NV[rows] = s if slope is None else s.mul_(slope)
    return divergence, entropy


def divergences_cpp(
    z_NV: Tensor,
    teacher_NV: Tensor,
    parameters: DivergenceParameters,
    out_NV: Tensor,
    upstream_N: Tensor | None,
    want_entropy: bool,
    sources: tuple[LogitsSource | None, LogitsSource | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Computes `divergences` with the C++ kernel, for fp32, bf16 or fp16 logits on a CPU. If matrix
    products in bf16 computed the logits (`sources`), some logits are recomputed in fp32. For each
    row, these are the logits of both heads for two groups of classes: those with the eight largest
    logits of the student, and those with the eight largest logits of the teacher.
    """
    rows = z_NV.shape[0]
    divergence = torch.empty(rows)
    entropy = torch.empty(rows if want_entropy else 0)
    if upstream_N is not None:
        assert out_NV.dtype == z_NV.dtype, "a CPU product's result has its operands' dtype"
        upstream_N = upstream_N.to(torch.float32).contiguous()
    arguments: list[Any] = []
    for z, rule, source in (
        (z_NV, parameters.student, sources[0]),
        (teacher_NV, parameters.teacher, sources[1]),
    ):
        shape = z_NV.shape if z is z_NV else ()
        arguments += [
            z.dtype,
            z,
            *shape,
            z.stride(0),
            rule.logit_scale,
            rule.softcap,
            *(source.cpp_arguments if source else NO_SOURCE_ARGUMENTS),
        ]
    KERNELS(
        "divergences",
        *arguments,
        parameters.beta,
        divergence,
        entropy if want_entropy else None,
        upstream_N,
        out_NV,
        out_NV.stride(0),
    )
    return divergence, entropy

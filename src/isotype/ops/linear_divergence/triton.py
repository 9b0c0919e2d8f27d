"""Triton kernels for the divergence of two rows of logits. In the kernel for the divergence, each
Triton program computes a row. In the kernel for its gradient, each program computes a block of a
row.

V is the vocabulary size. Row offsets are computed in int64. Values are converted to fp32 when they
are loaded, and results are rounded when they are stored. The cross-entropy kernel computes the
logsumexp of student and teacher.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cross_entropy.rule import LossRule
from ..cross_entropy.triton import apply_rule, cross_entropy_forward, load_block
from ..launch import on_tensor_device, warps
from .rows import DivergenceParameters

# 8 values per thread of student and teacher each; with 16 values 8 spill on sm_80
MAX_BLOCK = 2048


@triton.jit
def log_prob(
    start,
    v,
    stop,
    lse,
    scale,
    softcap,
    FULL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Returns log-probabilities in fp32. The log-probabilities are clamped to at least -1e30, so
    that p ln p of a masked class is 0.
    """
    return tl.maximum(
        apply_rule(load_block(start, v, stop, FULL), scale, softcap, HAS_SCALE, HAS_CAP) - lse,
        -1e30,
    )


@triton.jit
def log_mixture_ratio(log_ratio_fp32, beta):
    """Returns ln(p / m) = -ln(1 - beta + beta e^up) from up = ln(q / p). The formula avoids
    subtracting two large logarithms, which would lose precision. `up` is limited to the range -80
    to 80, because outside this range p or q is practically 0.
    """
    clamped_ratio_fp32 = tl.minimum(tl.maximum(log_ratio_fp32, -80.0), 80.0)
    return -tl.log(1.0 + beta * (tl.exp(clamped_ratio_fp32) - 1.0))


@triton.jit
def add_to_divergence(
    student_lanes,
    teacher_lanes,
    entropy_lanes,
    start,
    teacher,
    v,
    classes,
    lse,
    teacher_lse,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    FULL: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_CAP: tl.constexpr,
):
    """Updates the running sums of p ln(p / m), q ln(q / m) and p ln p with a block of logits. Each
    thread keeps its own sums.
    """
    s = log_prob(
        start, v, classes, lse, scale, softcap, FULL, HAS_SCALE, HAS_CAP
    )  # [LANES, LANE_VALUES]
    t = log_prob(
        teacher,
        v,
        classes,
        teacher_lse,
        teacher_scale,
        teacher_softcap,
        FULL,
        TEACHER_SCALE,
        TEACHER_CAP,
    )
    log_ratio = t - s
    p = tl.exp(s)
    q = tl.exp(t)
    if KIND == 0:
        student_term = tl.zeros_like(log_ratio)
        teacher_term = q * log_ratio
    elif KIND == 1:
        student_term = -p * log_ratio
        teacher_term = tl.zeros_like(log_ratio)
    else:
        mixture_log_ratio = log_mixture_ratio(log_ratio, beta)
        student_term = p * mixture_log_ratio
        teacher_term = q * (tl.minimum(log_ratio, 80.0) + mixture_log_ratio)
    if not FULL:
        student_term = tl.where(v < classes, student_term, 0.0)
        teacher_term = tl.where(v < classes, teacher_term, 0.0)
        p = tl.where(v < classes, p, 0.0)
    return (
        student_lanes + tl.sum(student_term, 1),
        teacher_lanes + tl.sum(teacher_term, 1),
        entropy_lanes + tl.sum(p * s, 1),
    )


@triton.jit
def divergence_kernel(
    logits,
    teacher_logits,
    lse,
    teacher_lse,
    divergence,
    student_sum,
    entropy,
    row_stride,
    teacher_stride,
    classes,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    KIND: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_CAP: tl.constexpr,
    LANES: tl.constexpr,
    LANE_VALUES: tl.constexpr,
):
    """Computes the divergence and the entropy of a row. KIND is 0 for beta = 0, 1 for beta = 1, and
    2 for values of beta between 0 and 1. `student_sum` receives the sum of p ln(p / m), which the
    gradient needs.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    teacher = teacher_logits + row * teacher_stride
    row_lse = tl.load(lse + row).to(tl.float32)
    row_teacher_lse = tl.load(teacher_lse + row).to(tl.float32)
    beta_fp32 = beta.to(tl.float32)
    # a lane is one load of one thread. Its sums stay in that thread, so that the loop has no
    # barrier
    lanes = tl.arange(0, LANES)[:, None] * LANE_VALUES + tl.arange(0, LANE_VALUES)[None, :]
    student_lanes = tl.zeros([LANES], tl.float32)
    teacher_lanes = tl.zeros([LANES], tl.float32)
    entropy_lanes = tl.zeros([LANES], tl.float32)
    full_end = classes // (LANES * LANE_VALUES) * (LANES * LANE_VALUES)
    for first in range(0, full_end, LANES * LANE_VALUES):
        student_lanes, teacher_lanes, entropy_lanes = add_to_divergence(
            student_lanes,
            teacher_lanes,
            entropy_lanes,
            start,
            teacher,
            first + lanes,
            classes,
            row_lse,
            row_teacher_lse,
            scale,
            softcap,
            teacher_scale,
            teacher_softcap,
            beta_fp32,
            True,
            KIND,
            HAS_SCALE,
            HAS_CAP,
            TEACHER_SCALE,
            TEACHER_CAP,
        )
    if full_end < classes:
        student_lanes, teacher_lanes, entropy_lanes = add_to_divergence(
            student_lanes,
            teacher_lanes,
            entropy_lanes,
            start,
            teacher,
            full_end + lanes,
            classes,
            row_lse,
            row_teacher_lse,
            scale,
            softcap,
            teacher_scale,
            teacher_softcap,
            beta_fp32,
            False,
            KIND,
            HAS_SCALE,
            HAS_CAP,
            TEACHER_SCALE,
            TEACHER_CAP,
        )
    student_total = tl.sum(student_lanes, 0)
    teacher_total = tl.sum(teacher_lanes, 0)
    tl.store(student_sum + row, student_total)
    tl.store(entropy + row, -tl.sum(entropy_lanes, 0))
    if KIND == 2:
        tl.store(divergence + row, beta_fp32 * teacher_total + (1.0 - beta_fp32) * student_total)
    else:
        tl.store(divergence + row, student_total + teacher_total)


@triton.jit
def divergence_gradient_kernel(
    logits,
    teacher_logits,
    lse,
    teacher_lse,
    student_sum,
    upstream,
    out,
    row_stride,
    teacher_stride,
    out_stride,
    classes,
    blocks,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    KIND: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # the blocks of a row are neighbours in the grid, so that memory is read in order
    row = (tl.program_id(0) // blocks).to(tl.int64)
    v = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    is_full = (tl.program_id(0) % blocks + 1) * BLOCK <= classes
    start = logits + row * row_stride
    teacher = teacher_logits + row * teacher_stride
    if is_full:
        x_fp32 = load_block(start, v, classes, True)  # [BLOCK]
        y_fp32 = load_block(teacher, v, classes, True)  # [BLOCK]
    else:
        x_fp32 = load_block(start, v, classes, False)  # [BLOCK]
        y_fp32 = load_block(teacher, v, classes, False)  # [BLOCK]
    z_fp32 = apply_rule(x_fp32, scale, softcap, HAS_SCALE, HAS_CAP)
    s = tl.maximum(z_fp32 - tl.load(lse + row).to(tl.float32), -1e30)
    t = apply_rule(y_fp32, teacher_scale, teacher_softcap, TEACHER_SCALE, TEACHER_CAP) - tl.load(
        teacher_lse + row
    ).to(tl.float32)
    t = tl.maximum(t, -1e30)
    p = tl.exp(s)
    upstream_fp32 = tl.load(upstream + row).to(tl.float32)
    if KIND == 0:
        g_fp32 = p - tl.exp(t)
    elif KIND == 1:
        g_fp32 = p * (s - t - tl.load(student_sum + row))
    else:
        # the derivatives through the mixture cancel
        beta_fp32 = beta.to(tl.float32)
        g_fp32 = (
            p
            * (log_mixture_ratio(t - s, beta_fp32) - tl.load(student_sum + row))
            * (1.0 - beta_fp32)
        )
    if HAS_CAP:
        u_fp32 = z_fp32 / softcap.to(tl.float32)
        g_fp32 *= 1.0 - u_fp32 * u_fp32
    if HAS_SCALE:
        g_fp32 *= scale.to(tl.float32)
    g_fp32 *= upstream_fp32
    if is_full:
        tl.store(out + row * out_stride + v, g_fp32.to(out.dtype.element_ty))
    else:
        tl.store(out + row * out_stride + v, g_fp32.to(out.dtype.element_ty), mask=v < classes)


def _flags(parameters: DivergenceParameters) -> dict[str, int]:
    kind = int(parameters.beta) if parameters.beta in (0.0, 1.0) else 2
    sides = {"": parameters.student, "TEACHER": parameters.teacher}
    flags: dict[str, int] = {"KIND": kind}
    for name, rule in sides.items():
        flags |= {
            f"{name or 'HAS'}_SCALE": rule.logit_scale != 1.0,
            f"{name or 'HAS'}_CAP": rule.softcap != 0.0,
        }
    return flags


def _row_logsumexp(logits_NV: Tensor, rule: LossRule) -> Tensor:
    dummy_targets_N = torch.zeros(logits_NV.shape[0], dtype=torch.int64, device=logits_NV.device)
    return cross_entropy_forward(logits_NV, dummy_targets_N, rule)[1]


@on_tensor_device
def divergences(
    z_NV: Tensor,
    teacher_NV: Tensor,
    parameters: DivergenceParameters,
    out_NV: Tensor,
    upstream_N: Tensor | None,
    want_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Computes the same as `rows.divergences`."""
    rows, classes = z_NV.shape
    lse_N, teacher_lse_N = (
        _row_logsumexp(z_NV, parameters.student),
        _row_logsumexp(teacher_NV, parameters.teacher),
    )
    divergence_N, student_sum_N, entropy_N = (
        torch.empty_like(lse_N),
        torch.empty_like(lse_N),
        torch.empty_like(lse_N),
    )
    if not rows or not classes:
        return divergence_N, entropy_N
    scalars = (
        parameters.student.logit_scale,
        parameters.student.softcap,
        parameters.teacher.logit_scale,
        parameters.teacher.softcap,
        parameters.beta,
    )
    block = min(MAX_BLOCK, triton.next_power_of_2(classes))
    lane_values = min(block, 16 // max(z_NV.element_size(), teacher_NV.element_size()))
    divergence_kernel[(rows,)](
        z_NV,
        teacher_NV,
        lse_N,
        teacher_lse_N,
        divergence_N,
        student_sum_N,
        entropy_N,
        z_NV.stride(0),
        teacher_NV.stride(0),
        classes,
        *scalars,
        **_flags(parameters),
        LANES=block // lane_values,
        LANE_VALUES=lane_values,
        num_warps=warps(2 * block),
    )
    if upstream_N is not None:
        blocks = triton.cdiv(classes, block)
        divergence_gradient_kernel[(rows * blocks,)](
            z_NV,
            teacher_NV,
            lse_N,
            teacher_lse_N,
            student_sum_N,
            upstream_N.to(torch.float32).contiguous(),
            out_NV,
            z_NV.stride(0),
            teacher_NV.stride(0),
            out_NV.stride(0),
            classes,
            blocks,
            *scalars,
            **_flags(parameters),
            BLOCK=block,
            num_warps=warps(2 * block),
        )
    return divergence_N, entropy_N

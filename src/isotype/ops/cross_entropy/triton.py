"""Triton kernels of the cross-entropy and of per-token values. In forward, each Triton program
reads one row in blocks. In backward, each program computes one block of a row.

V is the vocabulary size. Row offsets are computed in int64.

Every value is converted to fp32 once, when it is loaded. Every result is rounded to its dtype once,
when it is stored. No variable changes its dtype inside an if or a loop. Kernels of other libraries
failed for large vocabularies because the dtype of a variable changed there. Scalars are cast to
fp32, since a compiler may pass a Python float as fp64. Flags are constexpr (constants at compile
time), so that an unused feature costs nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import on_tensor_device, warps
from .rule import LossRule, RequestedValues, RowValues, Upstream, allocate_row_values

# 16 values per thread with 8 warps
MAX_BLOCK = 4096


@triton.jit
def apply_rule(x_fp32, scale, softcap, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr):
    if HAS_SCALE:
        x_fp32 = x_fp32 * scale.to(tl.float32)
    if HAS_CAP:
        cap_fp32 = softcap.to(tl.float32)
        # tanh(u) = 2 sigmoid(2u) - 1 needs no libdevice, so that results agree on every target and
        # in the interpreter
        x_fp32 = cap_fp32 * (2.0 * tl.sigmoid(2.0 * x_fp32 / cap_fp32) - 1.0)
    return x_fp32


@triton.jit
def load_block(start, v, stop, FULL: tl.constexpr):
    """Loads a block of logits as fp32, with zeros at the positions past `stop`. A block that ends
    before `stop` (FULL) is loaded without a mask. One instruction then loads 8 bf16 values. With a
    mask, each value needs its own load instruction.
    """
    if FULL:
        x_fp32 = tl.load(start + v).to(tl.float32)
    else:
        x_fp32 = tl.load(start + v, mask=v < stop, other=0.0).to(tl.float32)
    return x_fp32


@triton.jit
def add_to_loss(
    maxima,
    exp_sums,
    logit_sums,
    start,
    v,
    classes,
    scale,
    softcap,
    FULL: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Updates the running maxima and sums with a block of logits. Each thread keeps its own maxima
    and sums.
    """
    z_fp32 = apply_rule(
        load_block(start, v, classes, FULL), scale, softcap, HAS_SCALE, HAS_CAP
    )  # [LANES, LANE_VALUES]
    if HAS_SMOOTHING:
        logit_sums += tl.sum(z_fp32 if FULL else tl.where(v < classes, z_fp32, 0.0), 1)
    if not FULL:
        z_fp32 = tl.where(v < classes, z_fp32, float("-inf"))
    new_maxima = tl.maximum(maxima, tl.max(z_fp32, 1))
    # a lane that has read only -inf uses 0 as its shift, since exp(-inf - -inf) is nan
    shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
    exp_sums = exp_sums * tl.exp(maxima - shift) + tl.sum(tl.exp(z_fp32 - shift[:, None]), 1)
    return new_maxima, exp_sums, logit_sums


@triton.jit
def cross_entropy_forward_kernel(
    logits,
    targets,
    loss,
    lse,
    row_stride,
    classes,
    ignore_index,
    smoothing,
    scale,
    softcap,
    z_loss,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    LANES: tl.constexpr,
    LANE_VALUES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    ignored = target == ignore_index
    start = logits + row * row_stride
    # A lane is one load of 16 bytes by one thread, LANE_VALUES values. Its maximum and its sum stay
    # in that thread. So the loop has no barrier and takes two registers per lane instead of one per
    # value (32 in all instead of 80 to 93). The loop computes one exp per value and one per lane
    lanes = tl.arange(0, LANES)[:, None] * LANE_VALUES + tl.arange(0, LANE_VALUES)[None, :]
    maxima = tl.full([LANES], float("-inf"), tl.float32)
    exp_sums = tl.zeros([LANES], tl.float32)
    logit_sums = tl.zeros([LANES], tl.float32)
    full_end = classes // (LANES * LANE_VALUES) * (LANES * LANE_VALUES)
    for first in range(0, full_end, LANES * LANE_VALUES):
        maxima, exp_sums, logit_sums = add_to_loss(
            maxima,
            exp_sums,
            logit_sums,
            start,
            first + lanes,
            classes,
            scale,
            softcap,
            True,
            HAS_SMOOTHING,
            HAS_SCALE,
            HAS_CAP,
        )
    if full_end < classes:
        maxima, exp_sums, logit_sums = add_to_loss(
            maxima,
            exp_sums,
            logit_sums,
            start,
            full_end + lanes,
            classes,
            scale,
            softcap,
            False,
            HAS_SMOOTHING,
            HAS_SCALE,
            HAS_CAP,
        )
    row_maximum = tl.max(maxima, 0)
    row_shift = tl.where(row_maximum == float("-inf"), 0.0, row_maximum)
    row_lse = tl.log(tl.sum(exp_sums * tl.exp(maxima - row_shift), 0)) + row_shift
    target_logit_fp32 = tl.load(start + tl.where(ignored, 0, target)).to(tl.float32)
    target_z = apply_rule(target_logit_fp32, scale, softcap, HAS_SCALE, HAS_CAP)
    smoothing_fp32 = smoothing.to(tl.float32)
    row_loss = (1.0 - smoothing_fp32) * (row_lse - target_z) + z_loss.to(
        tl.float32
    ) * row_lse * row_lse
    if HAS_SMOOTHING:
        row_loss += smoothing_fp32 * (row_lse - tl.sum(logit_sums, 0) / classes)
    tl.store(loss + row, tl.where(ignored, 0.0, row_loss))
    tl.store(lse + row, row_lse)


@triton.jit
def cross_entropy_backward_kernel(
    logits,
    targets,
    lse,
    dloss,
    out,
    row_stride,
    out_stride,
    columns,
    classes,
    first_class,
    blocks,
    ignore_index,
    smoothing,
    scale,
    softcap,
    z_loss,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # the blocks of a row are neighbours in the grid, so that memory is read in order
    row = (tl.program_id(0) // blocks).to(tl.int64)
    v = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    is_full = (tl.program_id(0) % blocks + 1) * BLOCK <= columns
    target = tl.load(targets + row).to(tl.int64)
    ignored = target == ignore_index
    # the target's column, which may lie outside this block. 32 bits are enough for any vocabulary
    column = tl.where(ignored, -1, target - first_class).to(tl.int32)
    row_lse = tl.load(lse + row).to(tl.float32)
    dloss_fp32 = tl.load(dloss + row).to(tl.float32)
    if is_full:
        x_fp32 = load_block(logits + row * row_stride, v, columns, True)  # [BLOCK]
    else:
        x_fp32 = load_block(logits + row * row_stride, v, columns, False)  # [BLOCK]
    z_fp32 = apply_rule(x_fp32, scale, softcap, HAS_SCALE, HAS_CAP)
    smoothing_fp32 = smoothing.to(tl.float32)
    g_fp32 = tl.exp(z_fp32 - row_lse) * (1.0 + 2.0 * z_loss.to(tl.float32) * row_lse)
    if HAS_SMOOTHING:
        g_fp32 -= smoothing_fp32 / classes
    g_fp32 -= tl.where(v == column, 1.0 - smoothing_fp32, 0.0)
    if HAS_CAP:
        u_fp32 = z_fp32 / softcap.to(tl.float32)
        g_fp32 *= 1.0 - u_fp32 * u_fp32
    if HAS_SCALE:
        g_fp32 *= scale.to(tl.float32)
    # a select and not a product, since 0 times the exp of a non-finite logit is nan
    g_fp32 = tl.where(ignored, 0.0, g_fp32 * dloss_fp32)
    if is_full:
        tl.store(out + row * out_stride + v, g_fp32.to(out.dtype.element_ty))
    else:
        tl.store(out + row * out_stride + v, g_fp32.to(out.dtype.element_ty), mask=v < columns)


def _flags(rule: LossRule) -> dict[str, bool]:
    return {
        "HAS_SMOOTHING": rule.label_smoothing != 0.0,
        "HAS_SCALE": rule.logit_scale != 1.0,
        "HAS_CAP": rule.softcap != 0.0,
    }


def _choose_tile(classes: int, rule: LossRule) -> tuple[int, int]:
    """Returns (values, warps) of a tile. Each thread has 16 values, or 8 with a softcap. With a
    softcap and 16 values, 2 to 4 registers per thread would be spilled to memory on sm_80 and
    sm_90.
    """
    values = min(MAX_BLOCK // 2 if rule.softcap else MAX_BLOCK, triton.next_power_of_2(classes))
    return values, warps(2 * values if rule.softcap else values)


def _make_rows_contiguous(logits_TV: Tensor) -> Tensor:
    return logits_TV if logits_TV.stride(-1) == 1 else logits_TV.contiguous()


@on_tensor_device
def cross_entropy_forward(
    logits_TV: Tensor,
    targets_T: Tensor,
    rule: LossRule,
    out_TV: Tensor | None = None,
    dloss: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (loss, logsumexp), each fp32[T]. If `out_TV` is not None, the kernel also writes the
    gradient of the logits to it. For this gradient, the upstream gradient of every row is `dloss`.
    """
    logits_TV, targets_T = _make_rows_contiguous(logits_TV), targets_T.contiguous()
    tokens, classes = logits_TV.shape
    loss_T = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    lse_T = torch.empty_like(loss_T)
    if tokens:
        block, num_warps = _choose_tile(classes, rule)
        lane_values = min(block, 16 // logits_TV.element_size())
        cross_entropy_forward_kernel[(tokens,)](
            logits_TV,
            targets_T,
            loss_T,
            lse_T,
            logits_TV.stride(0),
            classes,
            rule.ignore_index,
            rule.label_smoothing,
            rule.logit_scale,
            rule.softcap,
            rule.z_loss,
            **_flags(rule),
            LANES=block // lane_values,
            LANE_VALUES=lane_values,
            num_warps=num_warps,
        )
    if out_TV is not None and dloss is not None:
        cross_entropy_backward(
            logits_TV, targets_T, lse_T, dloss.expand_as(loss_T), rule, out_TV, classes
        )
    return loss_T, lse_T


@on_tensor_device
def cross_entropy_backward(
    logits_TV: Tensor,
    targets_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    rule: LossRule,
    out_TV: Tensor,
    classes: int,
    first_class: int = 0,
) -> Tensor:
    """Writes the gradient of the logits to `out_TV` and returns it. `out_TV` may be `logits_TV`
    itself if the caller no longer needs the logits.
    """
    logits_TV, targets_T, dloss_T = (
        _make_rows_contiguous(logits_TV),
        targets_T.contiguous(),
        dloss_T.to(torch.float32).contiguous(),
    )
    tokens, columns = logits_TV.shape
    if tokens and columns:
        block = min(MAX_BLOCK, triton.next_power_of_2(columns))
        blocks = triton.cdiv(columns, block)
        cross_entropy_backward_kernel[(tokens * blocks,)](
            logits_TV,
            targets_T,
            lse_T,
            dloss_T,
            out_TV,
            logits_TV.stride(0),
            out_TV.stride(0),
            columns,
            classes,
            first_class,
            blocks,
            rule.ignore_index,
            rule.label_smoothing,
            rule.logit_scale,
            rule.softcap,
            rule.z_loss,
            **_flags(rule),
            BLOCK=block,
            num_warps=warps(block),
        )
    return out_TV


# --- per-token values


@triton.jit
def add_to_values(
    maxima,
    exp_sums,
    weighted_sums,
    square_sums,
    logit_sums,
    best_class,
    start,
    v,
    classes,
    scale,
    softcap,
    FULL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SUM_SQ: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_TOP1: tl.constexpr,
):
    """Updates the running maxima, sums and most likely classes with a block of logits. Each thread
    keeps its own.
    """
    z_fp32 = apply_rule(
        load_block(start, v, classes, FULL), scale, softcap, HAS_SCALE, HAS_CAP
    )  # [LANES, LANE_VALUES]
    if HAS_MEAN:
        logit_sums += tl.sum(z_fp32 if FULL else tl.where(v < classes, z_fp32, 0.0), 1)
    if not FULL:
        z_fp32 = tl.where(v < classes, z_fp32, float("-inf"))
    block_top = tl.max(z_fp32, 1)
    if HAS_TOP1:
        # the first of equal maxima
        first_best = tl.min(tl.where(z_fp32 == block_top[:, None], v, 2147483647), 1).to(tl.int32)
        best_class = tl.where(block_top > maxima, first_best, best_class)
    new_maxima = tl.maximum(maxima, block_top)
    # a lane that has read only -inf uses 0 as its shift, since exp(-inf - -inf) is nan
    shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
    previous_shift = tl.where(maxima == float("-inf"), shift, maxima)
    decay = tl.exp(maxima - shift)
    e_fp32 = tl.exp(z_fp32 - shift[:, None])
    if HAS_ENTROPY:
        # the sum of e (z - shift), corrected for the new shift. Differences to the maximum cause no
        # cancellation for large logits
        distance = tl.where(e_fp32 > 0.0, z_fp32 - shift[:, None], 0.0)
        weighted_sums = decay * (weighted_sums + (previous_shift - shift) * exp_sums) + tl.sum(
            e_fp32 * distance, 1
        )
    if HAS_SUM_SQ:
        square_sums = square_sums * decay * decay + tl.sum(e_fp32 * e_fp32, 1)
    exp_sums = exp_sums * decay + tl.sum(e_fp32, 1)
    return new_maxima, exp_sums, weighted_sums, square_sums, logit_sums, best_class


@triton.jit
def row_values_kernel(
    logits,
    targets,
    log_probs,
    lse,
    entropy,
    log_sum_sq,
    mean,
    top1,
    row_stride,
    classes,
    scale,
    softcap,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SUM_SQ: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_TOP1: tl.constexpr,
    LANES: tl.constexpr,
    LANE_VALUES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    # a lane is one load of 16 bytes by one thread. Its maximum and its sums stay in that thread, so
    # that the loop has no barrier
    lanes = tl.arange(0, LANES)[:, None] * LANE_VALUES + tl.arange(0, LANE_VALUES)[None, :]
    maxima = tl.full([LANES], float("-inf"), tl.float32)
    exp_sums = tl.zeros([LANES], tl.float32)
    weighted_sums = tl.zeros([LANES], tl.float32)
    square_sums = tl.zeros([LANES], tl.float32)
    logit_sums = tl.zeros([LANES], tl.float32)
    best_class = tl.zeros([LANES], tl.int32)
    full_end = classes // (LANES * LANE_VALUES) * (LANES * LANE_VALUES)
    for first in range(0, full_end, LANES * LANE_VALUES):
        maxima, exp_sums, weighted_sums, square_sums, logit_sums, best_class = add_to_values(
            maxima,
            exp_sums,
            weighted_sums,
            square_sums,
            logit_sums,
            best_class,
            start,
            first + lanes,
            classes,
            scale,
            softcap,
            True,
            HAS_SCALE,
            HAS_CAP,
            HAS_ENTROPY,
            HAS_SUM_SQ,
            HAS_MEAN,
            HAS_TOP1,
        )
    if full_end < classes:
        maxima, exp_sums, weighted_sums, square_sums, logit_sums, best_class = add_to_values(
            maxima,
            exp_sums,
            weighted_sums,
            square_sums,
            logit_sums,
            best_class,
            start,
            full_end + lanes,
            classes,
            scale,
            softcap,
            False,
            HAS_SCALE,
            HAS_CAP,
            HAS_ENTROPY,
            HAS_SUM_SQ,
            HAS_MEAN,
            HAS_TOP1,
        )
    row_maximum = tl.max(maxima, 0)
    row_shift = tl.where(row_maximum == float("-inf"), 0.0, row_maximum)
    lane_shift = tl.where(maxima == float("-inf"), row_shift, maxima)
    decay = tl.exp(maxima - row_shift)
    row_total = tl.sum(exp_sums * decay, 0)
    log_total = tl.log(row_total)
    row_lse = log_total + row_shift
    target_logit_fp32 = tl.load(start + tl.load(targets + row).to(tl.int64)).to(tl.float32)
    tl.store(
        log_probs + row, apply_rule(target_logit_fp32, scale, softcap, HAS_SCALE, HAS_CAP) - row_lse
    )
    tl.store(lse + row, row_lse)
    if HAS_ENTROPY:
        tl.store(
            entropy + row,
            log_total
            - tl.sum(decay * (weighted_sums + (lane_shift - row_shift) * exp_sums), 0) / row_total,
        )
    if HAS_SUM_SQ:
        tl.store(log_sum_sq + row, tl.log(tl.sum(square_sums * decay * decay, 0)) - 2.0 * log_total)
    if HAS_MEAN:
        tl.store(mean + row, tl.sum(logit_sums, 0) / classes)
    if HAS_TOP1:
        tl.store(
            top1 + row,
            tl.min(tl.where(maxima == row_maximum, best_class, 2147483647), 0).to(tl.int64),
        )


@triton.jit
def row_value_gradients_kernel(
    logits,
    targets,
    lse,
    dlog_probs,
    dlse,
    dentropy,
    entropy,
    out,
    row_stride,
    out_stride,
    columns,
    first_class,
    blocks,
    scale,
    softcap,
    HAS_DLOG_PROBS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # the blocks of a row are neighbours in the grid, so that memory is read in order
    row = (tl.program_id(0) // blocks).to(tl.int64)
    v = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    is_full = (tl.program_id(0) % blocks + 1) * BLOCK <= columns
    if is_full:
        x_fp32 = load_block(logits + row * row_stride, v, columns, True)  # [BLOCK]
    else:
        x_fp32 = load_block(logits + row * row_stride, v, columns, False)  # [BLOCK]
    z_fp32 = apply_rule(x_fp32, scale, softcap, HAS_SCALE, HAS_CAP)
    row_lse = tl.load(lse + row).to(tl.float32)
    log_p = z_fp32 - row_lse
    factor = tl.zeros([BLOCK], tl.float32)
    if HAS_DLSE:
        factor += tl.load(dlse + row).to(tl.float32)
    if HAS_DLOG_PROBS:
        factor -= tl.load(dlog_probs + row).to(tl.float32)
    p_fp32 = tl.exp(log_p)
    if HAS_DENTROPY:
        shifted = tl.where(p_fp32 > 0.0, log_p, 0.0) + tl.load(entropy + row).to(tl.float32)
        factor -= tl.load(dentropy + row).to(tl.float32) * shifted
    g_fp32 = p_fp32 * factor
    if HAS_DLOG_PROBS:
        column = (tl.load(targets + row).to(tl.int64) - first_class).to(tl.int32)
        g_fp32 += tl.where(v == column, tl.load(dlog_probs + row).to(tl.float32), 0.0)
    if HAS_CAP:
        u_fp32 = z_fp32 / softcap.to(tl.float32)
        g_fp32 *= 1.0 - u_fp32 * u_fp32
    if HAS_SCALE:
        g_fp32 *= scale.to(tl.float32)
    # the gradient of an ignored row is selected, since 0 times the exp of a non-finite logit is nan
    g_fp32 = tl.where(row_lse == float("inf"), 0.0, g_fp32)
    if is_full:
        tl.store(out + row * out_stride + v, g_fp32.to(out.dtype.element_ty))
    else:
        tl.store(out + row * out_stride + v, g_fp32.to(out.dtype.element_ty), mask=v < columns)


@on_tensor_device
def row_values(
    logits_NV: Tensor, targets_N: Tensor, rule: LossRule, requested: RequestedValues
) -> RowValues:
    """Computes the requested values of each row, such as its log-probability. No target may be
    ignore_index.
    """
    logits_NV, targets_N = _make_rows_contiguous(logits_NV), targets_N.contiguous()
    rows, classes = logits_NV.shape
    values = allocate_row_values(rows, torch.float32, logits_NV.device, requested)
    if rows:
        block, num_warps = _choose_tile(classes, rule)
        lane_values = min(block, 16 // logits_NV.element_size())
        row_values_kernel[(rows,)](
            logits_NV,
            targets_N,
            values.log_probs,
            values.logsumexp,
            values.entropy,
            values.log_sum_sq_probs,
            values.mean_logits,
            values.top1,
            logits_NV.stride(0),
            classes,
            rule.logit_scale,
            rule.softcap,
            HAS_SCALE=rule.logit_scale != 1.0,
            HAS_CAP=rule.softcap != 0.0,
            HAS_ENTROPY=requested.entropy,
            HAS_SUM_SQ=requested.log_sum_sq_probs,
            HAS_MEAN=requested.mean_logits,
            HAS_TOP1=requested.top1,
            LANES=block // lane_values,
            LANE_VALUES=lane_values,
            num_warps=num_warps,
        )
    return values


@on_tensor_device
def row_value_gradients(
    logits_NV: Tensor,
    targets_N: Tensor,
    lse_N: Tensor,
    upstream: Upstream,
    rule: LossRule,
    out_NV: Tensor,
    first_class: int = 0,
) -> Tensor:
    """Writes the gradient of the logits to `out_NV`, which may be `logits_NV` itself, and returns
    it. Column 0 contains the logits of the class `first_class`.
    """
    logits_NV, targets_N, lse_N = (
        _make_rows_contiguous(logits_NV),
        targets_N.contiguous(),
        lse_N.contiguous(),
    )
    rows, columns = logits_NV.shape
    # Triton needs a tensor also for a pointer that the kernel does not read
    dlog_probs, dlse, dentropy, entropy = (
        lse_N if t is None else t.to(torch.float32).contiguous() for t in upstream
    )
    if rows and columns:
        block = min(MAX_BLOCK, triton.next_power_of_2(columns))
        blocks = triton.cdiv(columns, block)
        row_value_gradients_kernel[(rows * blocks,)](
            logits_NV,
            targets_N,
            lse_N,
            dlog_probs,
            dlse,
            dentropy,
            entropy,
            out_NV,
            logits_NV.stride(0),
            out_NV.stride(0),
            columns,
            first_class,
            blocks,
            rule.logit_scale,
            rule.softcap,
            HAS_DLOG_PROBS=upstream.dlog_probs is not None,
            HAS_DLSE=upstream.dlogsumexp is not None,
            HAS_DENTROPY=upstream.dentropy is not None,
            HAS_SCALE=rule.logit_scale != 1.0,
            HAS_CAP=rule.softcap != 0.0,
            BLOCK=block,
            num_warps=warps(block),
        )
    return out_NV

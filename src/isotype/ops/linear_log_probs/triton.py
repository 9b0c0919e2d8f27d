"""Triton kernels of `linear_log_probs`: one program a row over the vocabulary forward, blocks of rows backward. Offsets in int64.

Values are widened to fp32 once, where they are loaded, and narrowed once, where they are stored; flags are constexpr, so that what was not
asked for costs nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cross_entropy.rule import LossRule
from ..cross_entropy.triton import MAX_BLOCK, capped
from ..launch import on_its_device, warps
from .rows import RowValues, Upstream, Wanted, room


@triton.jit
def forward_kernel(
    logits, targets, log_probs, lse, entropy, log_sum_sq, mean, top1,
    row_stride, classes, scale, softcap,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_SUM_SQ: tl.constexpr, HAS_MEAN: tl.constexpr,
    HAS_TOP1: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    # a lane is one load of 16 bytes of one thread: its maximum and its sums stay in that thread, and the loop has no barrier
    lanes = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    squared = tl.zeros([LANES], tl.float32)
    summed = tl.zeros([LANES], tl.float32)
    best = tl.zeros([LANES], tl.int32)
    for first in range(0, classes, LANES * EACH):
        v = first + lanes
        inside = v < classes
        x_fp32 = tl.load(start + v, mask=inside, other=0.0).to(tl.float32)  # [LANES, EACH]
        z_fp32 = capped(x_fp32, scale, softcap, HAS_SCALE, HAS_CAP)
        if HAS_MEAN:
            summed += tl.sum(tl.where(inside, z_fp32, 0.0), 1)
        z_fp32 = tl.where(inside, z_fp32, float("-inf"))
        block_top = tl.max(z_fp32, 1)
        if HAS_TOP1:
            # the first of equal maxima
            at = tl.min(tl.where(z_fp32 == block_top[:, None], v, 2147483647), 1).to(tl.int32)
            best = tl.where(block_top > top, at, best)
        higher = tl.maximum(top, block_top)
        # a lane that has only -inf so far keeps 0 as its shift: exp(-inf - -inf) would be nan
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        before = tl.where(top == float("-inf"), shift, top)
        decay = tl.exp(top - shift)
        e_fp32 = tl.exp(z_fp32 - shift[:, None])
        if HAS_ENTROPY:
            # sum of e (z - shift), moved to the new shift: no cancellation for large logits
            distance = tl.where(e_fp32 > 0.0, z_fp32 - shift[:, None], 0.0)
            weighted = decay * (weighted + (before - shift) * total) + tl.sum(e_fp32 * distance, 1)
        if HAS_SUM_SQ:
            squared = squared * decay * decay + tl.sum(e_fp32 * e_fp32, 1)
        total = total * decay + tl.sum(e_fp32, 1)
        top = higher
    row_top = tl.max(top, 0)
    row_shift = tl.where(row_top == float("-inf"), 0.0, row_top)
    lane_shift = tl.where(top == float("-inf"), row_shift, top)
    decay = tl.exp(top - row_shift)
    row_total = tl.sum(total * decay, 0)
    log_total = tl.log(row_total)
    row_lse = log_total + row_shift
    picked_fp32 = tl.load(start + tl.load(targets + row).to(tl.int64)).to(tl.float32)
    tl.store(log_probs + row, capped(picked_fp32, scale, softcap, HAS_SCALE, HAS_CAP) - row_lse)
    tl.store(lse + row, row_lse)
    if HAS_ENTROPY:
        tl.store(entropy + row, log_total - tl.sum(decay * (weighted + (lane_shift - row_shift) * total), 0) / row_total)
    if HAS_SUM_SQ:
        tl.store(log_sum_sq + row, tl.log(tl.sum(squared * decay * decay, 0)) - 2.0 * log_total)
    if HAS_MEAN:
        tl.store(mean + row, tl.sum(summed, 0) / classes)
    if HAS_TOP1:
        tl.store(top1 + row, tl.min(tl.where(top == row_top, best, 2147483647), 0).to(tl.int64))


@triton.jit
def backward_kernel(
    logits, targets, lse, dlog_probs, dlse, dentropy, entropy, out,
    row_stride, out_stride, columns, first_class, blocks, scale, softcap,
    HAS_DLOG_PROBS: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_DENTROPY: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # the blocks of a row are neighbours in the grid: memory is swept in order
    row = (tl.program_id(0) // blocks).to(tl.int64)
    v = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = v < columns
    x_fp32 = tl.load(logits + row * row_stride + v, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    z_fp32 = capped(x_fp32, scale, softcap, HAS_SCALE, HAS_CAP)
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
    # an ignored row: a select, as 0 times a non-finite logit's exp would be nan
    g_fp32 = tl.where(row_lse == float("inf"), 0.0, g_fp32)
    tl.store(out + row * out_stride + v, g_fp32.to(out.dtype.element_ty), mask=inside)


def _rows(logits_NV: Tensor) -> Tensor:
    return logits_NV if logits_NV.stride(-1) == 1 else logits_NV.contiguous()


@on_its_device
def forward(logits_NV: Tensor, targets_N: Tensor, rule: LossRule, wanted: Wanted) -> RowValues:
    """The values of each row; no target is ignored."""
    logits_NV, targets_N = _rows(logits_NV), targets_N.contiguous()
    rows, classes = logits_NV.shape
    values = room(rows, torch.float32, logits_NV.device, wanted)
    if rows:
        block = min(MAX_BLOCK, triton.next_power_of_2(classes))
        each = min(block, 16 // logits_NV.element_size())
        forward_kernel[(rows,)](
            logits_NV, targets_N, values.log_probs, values.logsumexp, values.entropy, values.log_sum_sq_probs, values.mean_logits,
            values.top1, logits_NV.stride(0), classes, rule.logit_scale, rule.softcap, HAS_SCALE=rule.logit_scale != 1.0,
            HAS_CAP=rule.softcap != 0.0, HAS_ENTROPY=wanted.entropy, HAS_SUM_SQ=wanted.log_sum_sq_probs, HAS_MEAN=wanted.mean_logits,
            HAS_TOP1=wanted.top1, LANES=block // each, EACH=each, num_warps=warps(block),
        )  # fmt: skip
    return values


@on_its_device
def backward(
    logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, upstream: Upstream, rule: LossRule, out_NV: Tensor, first: int = 0
) -> Tensor:
    """The gradient of the logits, written to `out_NV`, which may be `logits_NV` itself. Column 0 is the class `first`."""
    logits_NV, targets_N, lse_N = _rows(logits_NV), targets_N.contiguous(), lse_N.contiguous()
    rows, columns = logits_NV.shape
    # a pointer that is not read still needs a tensor
    dlog_probs, dlse, dentropy, entropy = (lse_N if t is None else t.to(torch.float32).contiguous() for t in upstream)
    if rows and columns:
        block = min(MAX_BLOCK, triton.next_power_of_2(columns))
        blocks = triton.cdiv(columns, block)
        backward_kernel[(rows * blocks,)](
            logits_NV, targets_N, lse_N, dlog_probs, dlse, dentropy, entropy, out_NV, logits_NV.stride(0), out_NV.stride(0), columns, first,
            blocks, rule.logit_scale, rule.softcap, HAS_DLOG_PROBS=upstream.dlog_probs is not None,
            HAS_DLSE=upstream.dlogsumexp is not None, HAS_DENTROPY=upstream.dentropy is not None, HAS_SCALE=rule.logit_scale != 1.0,
            HAS_CAP=rule.softcap != 0.0, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return out_NV

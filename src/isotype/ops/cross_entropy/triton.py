"""Cross-entropy kernels: one program a row, two passes over the vocabulary in blocks. V vocabulary, offsets in int64.

Every value is widened to fp32 once, where it is loaded, and narrowed once, where it is stored: no value changes dtype inside a branch or a
loop; that fault broke large-vocabulary kernels in other libraries. Scalars are pinned to fp32: a compiler may hand a Python float over as
fp64.
Flags are constexpr, so that an absent feature costs nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import on_its_device, warps
from .rule import LossRule

# 16 values a thread at 8 warps
MAX_BLOCK = 4096


@triton.jit
def capped(x_fp32, scale, softcap, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr):
    if HAS_SCALE:
        x_fp32 = x_fp32 * scale.to(tl.float32)
    if HAS_CAP:
        cap_fp32 = softcap.to(tl.float32)
        # tanh(u) = 2 sigmoid(2u) - 1: no libdevice needed, so that every target and the interpreter agree
        x_fp32 = cap_fp32 * (2.0 * tl.sigmoid(2.0 * x_fp32 / cap_fp32) - 1.0)
    return x_fp32


@triton.jit
def cross_entropy_forward_kernel(
    logits, targets, loss, lse,
    row_stride, classes, ignore_index, smoothing, scale, softcap, z_loss,
    HAS_SMOOTHING: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    ignored = target == ignore_index
    start = logits + row * row_stride
    # A lane is one load of 16 bytes of one thread, EACH values: its maximum and its sum stay in that thread. The loop has no barrier, takes
    # two registers a lane instead of one a value (32 in all instead of 80 to 93), and costs one exp a value and one a lane
    lanes = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    summed = tl.zeros([LANES], tl.float32)
    for first in range(0, classes, LANES * EACH):
        v = first + lanes
        inside = v < classes
        x_fp32 = tl.load(start + v, mask=inside, other=0.0).to(tl.float32)  # [LANES, EACH]
        z_fp32 = capped(x_fp32, scale, softcap, HAS_SCALE, HAS_CAP)
        if HAS_SMOOTHING:
            summed += tl.sum(tl.where(inside, z_fp32, 0.0), 1)
        z_fp32 = tl.where(inside, z_fp32, float("-inf"))
        higher = tl.maximum(top, tl.max(z_fp32, 1))
        # a lane that has only -inf so far keeps 0 as its shift: exp(-inf - -inf) would be nan
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z_fp32 - shift[:, None]), 1)
        top = higher
    row_top = tl.max(top, 0)
    row_shift = tl.where(row_top == float("-inf"), 0.0, row_top)
    row_lse = tl.log(tl.sum(total * tl.exp(top - row_shift), 0)) + row_shift
    picked_fp32 = tl.load(start + tl.where(ignored, 0, target)).to(tl.float32)
    picked_z = capped(picked_fp32, scale, softcap, HAS_SCALE, HAS_CAP)
    smoothing_fp32 = smoothing.to(tl.float32)
    row_loss = (1.0 - smoothing_fp32) * (row_lse - picked_z) + z_loss.to(tl.float32) * row_lse * row_lse
    if HAS_SMOOTHING:
        row_loss += smoothing_fp32 * (row_lse - tl.sum(summed, 0) / classes)
    tl.store(loss + row, tl.where(ignored, 0.0, row_loss))
    tl.store(lse + row, row_lse)


@triton.jit
def cross_entropy_backward_kernel(
    logits, targets, lse, dloss, out,
    row_stride, out_stride, columns, classes, first_class, blocks, ignore_index, smoothing, scale, softcap, z_loss,
    HAS_SMOOTHING: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # the blocks of a row are neighbours in the grid: memory is swept in order
    row = (tl.program_id(0) // blocks).to(tl.int64)
    v = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = v < columns
    target = tl.load(targets + row).to(tl.int64)
    ignored = target == ignore_index
    # a column of this block, or none of it: 32 bits hold any vocabulary
    column = tl.where(ignored, -1, target - first_class).to(tl.int32)
    row_lse = tl.load(lse + row).to(tl.float32)
    dloss_fp32 = tl.load(dloss + row).to(tl.float32)
    x_fp32 = tl.load(logits + row * row_stride + v, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    z_fp32 = capped(x_fp32, scale, softcap, HAS_SCALE, HAS_CAP)
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
    # a select, not a product: 0 times a non-finite logit's exp would be nan
    g_fp32 = tl.where(ignored, 0.0, g_fp32 * dloss_fp32)
    tl.store(out + row * out_stride + v, g_fp32.to(out.dtype.element_ty), mask=inside)


def _flags(rule: LossRule) -> dict[str, bool]:
    return {"HAS_SMOOTHING": rule.label_smoothing != 0.0, "HAS_SCALE": rule.logit_scale != 1.0, "HAS_CAP": rule.softcap != 0.0}


def _rows(logits_TV: Tensor) -> Tensor:
    return logits_TV if logits_TV.stride(-1) == 1 else logits_TV.contiguous()


@on_its_device
def cross_entropy_forward(logits_TV: Tensor, targets_T: Tensor, rule: LossRule) -> tuple[Tensor, Tensor]:
    """(loss, logsumexp), each fp32[T]."""
    logits_TV, targets_T = _rows(logits_TV), targets_T.contiguous()
    tokens, classes = logits_TV.shape
    loss_T = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    lse_T = torch.empty_like(loss_T)
    if tokens:
        block = min(MAX_BLOCK, triton.next_power_of_2(classes))
        each = min(block, 16 // logits_TV.element_size())
        cross_entropy_forward_kernel[(tokens,)](
            logits_TV, targets_T, loss_T, lse_T, logits_TV.stride(0), classes, rule.ignore_index,
            rule.label_smoothing, rule.logit_scale, rule.softcap, rule.z_loss, **_flags(rule),
            LANES=block // each, EACH=each, num_warps=warps(block),
        )  # fmt: skip
    return loss_T, lse_T


@on_its_device
def cross_entropy_backward(
    logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor, dloss_T: Tensor, rule: LossRule, out_TV: Tensor, classes: int, first: int = 0
) -> Tensor:
    """The gradient of the logits, written to `out_TV`, which may be `logits_TV` itself when the caller owns it."""
    logits_TV, targets_T, dloss_T = _rows(logits_TV), targets_T.contiguous(), dloss_T.to(torch.float32).contiguous()
    tokens, columns = logits_TV.shape
    if tokens and columns:
        block = min(MAX_BLOCK, triton.next_power_of_2(columns))
        blocks = triton.cdiv(columns, block)
        cross_entropy_backward_kernel[(tokens * blocks,)](
            logits_TV, targets_T, lse_T, dloss_T, out_TV, logits_TV.stride(0), out_TV.stride(0), columns, classes, first, blocks,
            rule.ignore_index, rule.label_smoothing, rule.logit_scale, rule.softcap, rule.z_loss, **_flags(rule),
            BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return out_TV


def loss_and_gradient(logits_TV: Tensor, targets_T: Tensor, rule: LossRule, out_TV: Tensor, dloss: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, logsumexp), and in `out_TV` the logits' gradient for an upstream gradient of `dloss` in every row."""
    loss_T, lse_T = cross_entropy_forward(logits_TV, targets_T, rule)
    cross_entropy_backward(logits_TV, targets_T, lse_T, dloss.expand_as(loss_T), rule, out_TV, logits_TV.shape[-1])
    return loss_T, lse_T

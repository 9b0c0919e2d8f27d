"""Per-token values of logits and their gradient by the C++ kernels: a CPU, fp32 / bf16 / fp16 logits, rows of any stride."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import CppKernels
from ..cross_entropy.rule import LossRule
from .rows import RowValues, Upstream, Wanted, room

KERNELS = CppKernels(__file__, row_values="dpiiipffpppppp", row_value_gradients="dpiiipppppp" + "ffpii")


def _rows(logits_NV: Tensor) -> Tensor:
    return logits_NV if logits_NV.stride(-1) == 1 else logits_NV.contiguous()


def forward(logits_NV: Tensor, targets_N: Tensor, rule: LossRule, wanted: Wanted) -> RowValues:
    """The values of each row; no target is ignored."""
    logits_NV, targets_N = _rows(logits_NV), targets_N.long().contiguous()
    values = room(logits_NV.shape[0], torch.float32, logits_NV.device, wanted)
    KERNELS(
        "row_values", logits_NV.dtype, logits_NV, *logits_NV.shape, logits_NV.stride(0), targets_N, rule.logit_scale, rule.softcap,
        *(t if t.numel() else None for t in (*values[:5], values.top1)),
    )  # fmt: skip
    return values


def backward(
    logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, upstream: Upstream, rule: LossRule, out_NV: Tensor, first: int = 0
) -> Tensor:
    """The gradient of the logits, written to `out_NV`, which may be `logits_NV` itself. Column 0 is the class `first`."""
    assert out_NV.dtype == logits_NV.dtype, "a CPU product's result has its operands' dtype"
    logits_NV, targets_N = _rows(logits_NV), targets_N.long().contiguous()
    held = [None if t is None else t.to(torch.float32).contiguous() for t in upstream]
    KERNELS(
        "row_value_gradients", logits_NV.dtype, logits_NV, *logits_NV.shape, logits_NV.stride(0), targets_N, lse_N.contiguous(), *held,
        rule.logit_scale, rule.softcap, out_NV, out_NV.stride(0), first,
    )  # fmt: skip
    return out_NV

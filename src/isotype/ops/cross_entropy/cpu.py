"""Cross-entropy and per-token values by the C++ kernels: a CPU, fp32 / bf16 / fp16 logits, rows of any stride. T tokens, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import CppKernels
from .eager import RowValues, Upstream, Wanted, room
from .rule import LossRule

KERNELS = CppKernels(
    __file__,
    losses_and_gradients="dpiiipppiffffpif",
    gradients_from_lse="dpiiipppiffffpiii",
    row_values="dpiiipffpppppp",
    row_value_gradients="dpiiippppppffpii",
)


def _rows(logits_TV: Tensor) -> Tensor:
    return logits_TV if logits_TV.stride(-1) == 1 else logits_TV.contiguous()


def _losses(logits_TV: Tensor, targets_T: Tensor, rule: LossRule, out_TV: Tensor | None, dloss: float) -> tuple[Tensor, Tensor]:
    logits_TV, targets_T = _rows(logits_TV), targets_T.long().contiguous()
    tokens, classes = logits_TV.shape
    loss_T = torch.empty(tokens, dtype=torch.float32)
    lse_T = torch.empty_like(loss_T)
    stride = 0 if out_TV is None else out_TV.stride(0)
    KERNELS(
        "losses_and_gradients", logits_TV.dtype, logits_TV, tokens, classes, logits_TV.stride(0), targets_T, loss_T, lse_T,
        *rule.values, out_TV, stride, dloss,
    )  # fmt: skip
    return loss_T, lse_T


def cross_entropy_forward(logits_TV: Tensor, targets_T: Tensor, rule: LossRule) -> tuple[Tensor, Tensor]:
    """(loss, logsumexp), each fp32[T]; 0 for an ignored row."""
    return _losses(logits_TV, targets_T, rule, None, 0.0)


def loss_and_gradient(logits_TV: Tensor, targets_T: Tensor, rule: LossRule, out_TV: Tensor, dloss: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, logsumexp), and in `out_TV` the logits' gradient for an upstream gradient of `dloss` in every row: one exp for both.

    out_TV   may be `logits_TV` itself when the caller owns it
    """
    assert out_TV.dtype == logits_TV.dtype, "a CPU product's result has its operands' dtype"
    return _losses(logits_TV, targets_T, rule, out_TV, float(dloss))


def cross_entropy_backward(
    logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor, dloss_T: Tensor, rule: LossRule, out_TV: Tensor, classes: int, first: int = 0
) -> Tensor:
    """The gradient of the logits, written to `out_TV`, which may be `logits_TV` itself when the caller owns it."""
    assert out_TV.dtype == logits_TV.dtype, "a CPU product's result has its operands' dtype"
    logits_TV, targets_T = _rows(logits_TV), targets_T.long().contiguous()
    dloss_T = dloss_T.to(torch.float32).contiguous()
    tokens, columns = logits_TV.shape
    KERNELS(
        "gradients_from_lse", logits_TV.dtype, logits_TV, tokens, columns, logits_TV.stride(0), targets_T, lse_T.contiguous(), dloss_T,
        *rule.values, out_TV, out_TV.stride(0), classes, first,
    )  # fmt: skip
    return out_TV


def row_values(logits_NV: Tensor, targets_N: Tensor, rule: LossRule, wanted: Wanted) -> RowValues:
    """The values of each row; no target is ignored."""
    logits_NV, targets_N = _rows(logits_NV), targets_N.long().contiguous()
    values = room(logits_NV.shape[0], torch.float32, logits_NV.device, wanted)
    KERNELS(
        "row_values", logits_NV.dtype, logits_NV, *logits_NV.shape, logits_NV.stride(0), targets_N, rule.logit_scale, rule.softcap,
        *(t if t.numel() else None for t in (*values[:5], values.top1)),
    )  # fmt: skip
    return values


def row_value_gradients(
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

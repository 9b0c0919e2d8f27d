"""Chooses kernels for rows of logits (Triton on a GPU, C++ on a CPU, and blocks of plain PyTorch in
all other cases), and calls the C++ kernels. T tokens, V vocabulary size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backend import uses_cpp, uses_triton
from ..cpp import CppKernels
from . import rule as eager
from .rule import LossRule, RequestedValues, RowValues, Upstream, allocate_row_values

KERNELS = CppKernels(
    __file__,
    losses_and_gradients="dpiiipppiffffpipiippif",
    gradients_from_lse="dpiiipppiffffpiii",
    row_values="dpiiipffpppppppipiippp",
    row_value_gradients="dpiiippppppppffpii",
)


def _make_rows_contiguous(logits_TV: Tensor) -> Tensor:
    if logits_TV.stride(-1) == 1:
        return logits_TV
    return logits_TV.contiguous()


RECOMPUTED_LOGITS = 9  # number of recomputed logits per row; RECOMPUTED in logits.h


class RecomputedLogits(NamedTuple):
    """Logits of each row that the C++ kernels recomputed in fp32.

    classes  int64[N 9]  classes of the recomputed logits, -1 where there are fewer than 9
    logits   fp32[N 9]   the recomputed logits, after scale and softcap
    """

    classes: Tensor
    logits: Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device) -> RecomputedLogits:
        shape = rows, RECOMPUTED_LOGITS
        return cls(
            torch.full(shape, -1, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


class LogitsSource:
    """Holds the two matrices that were multiplied to compute bf16 logits on a CPU. The C++ kernels
    multiply rows of them again to get the logit of the target and the largest logits in fp32.

    A bf16 matrix product rounds its fp32 sums to bf16. The error of a logit of 20 is then up to
    0.06. We measured the error of a token's loss for peaked distributions (mean log-probability
    -1.2, V 32,000). The root mean square of this error is 4.5e-2 with bf16 logits, and 6.2e-4 with
    recomputed logits.

    recomputed  the logits that `row_values` recomputed
    """

    def __init__(self, x_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> None:
        self.x_NH = _make_rows_contiguous(x_NH)
        self.weight_VH = weight_VH
        self.bias_V = bias_V
        self.recomputed: RecomputedLogits | None = None

    @classmethod
    def from_product(
        cls, logits_NV: Tensor, x_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None
    ) -> LogitsSource | None:
        """Returns a `LogitsSource` with the operands from which these logits were computed. Returns
        None if the logits were not computed on a CPU by a matrix product with bf16 operands and a
        bf16 result.
        """
        is_narrow = (
            logits_NV.is_cpu
            and logits_NV.dtype == x_NH.dtype == weight_VH.dtype == torch.bfloat16
            and weight_VH.stride(-1) == 1
        )
        return cls(x_NH, weight_VH, bias_V) if is_narrow else None

    @property
    def cpp_arguments(self) -> tuple[Any, ...]:
        return (
            self.x_NH,
            self.x_NH.stride(0),
            self.weight_VH,
            self.weight_VH.stride(0),
            self.x_NH.shape[1],
            self.bias_V,
        )


NO_SOURCE_ARGUMENTS = (None, 0, None, 0, 0, None)


class CppRowKernels:
    """Calls the C++ kernels, for fp32, bf16 or fp16 logits on a CPU, with rows of any stride. Each
    method computes the same as the function of the same name in `rule`.
    """

    @staticmethod
    def cross_entropy_forward(
        logits_TV: Tensor,
        targets_T: Tensor,
        rule: LossRule,
        out_TV: Tensor | None = None,
        dloss: Tensor | None = None,
        source: LogitsSource | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert out_TV is None or out_TV.dtype == logits_TV.dtype, (
            "a CPU product's result has its operands' dtype"
        )
        logits_TV = _make_rows_contiguous(logits_TV)
        targets_T = targets_T.long().contiguous()
        tokens, classes = logits_TV.shape
        loss_T = torch.empty(tokens, dtype=torch.float32)
        lse_T = torch.empty_like(loss_T)
        stride = 0 if out_TV is None else out_TV.stride(0)
        KERNELS(
            "losses_and_gradients",
            logits_TV.dtype,
            logits_TV,
            tokens,
            classes,
            logits_TV.stride(0),
            targets_T,
            loss_T,
            lse_T,
            *rule.cpp_arguments,
            *(source.cpp_arguments if source else NO_SOURCE_ARGUMENTS),
            out_TV,
            stride,
            0.0 if dloss is None else float(dloss),
        )
        return loss_T, lse_T

    @staticmethod
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
        assert out_TV.dtype == logits_TV.dtype, "a CPU product's result has its operands' dtype"
        logits_TV = _make_rows_contiguous(logits_TV)
        targets_T = targets_T.long().contiguous()
        dloss_T = dloss_T.to(torch.float32).contiguous()
        tokens, columns = logits_TV.shape
        KERNELS(
            "gradients_from_lse",
            logits_TV.dtype,
            logits_TV,
            tokens,
            columns,
            logits_TV.stride(0),
            targets_T,
            lse_T.contiguous(),
            dloss_T,
            *rule.cpp_arguments,
            out_TV,
            out_TV.stride(0),
            classes,
            first_class,
        )
        return out_TV

    @staticmethod
    def row_values(
        logits_NV: Tensor,
        targets_N: Tensor,
        rule: LossRule,
        requested: RequestedValues,
        source: LogitsSource | None = None,
    ) -> RowValues:
        if source:
            source.recomputed = RecomputedLogits.allocate(logits_NV.shape[0], logits_NV.device)
        logits_NV = _make_rows_contiguous(logits_NV)
        targets_N = targets_N.long().contiguous()
        values = allocate_row_values(logits_NV.shape[0], torch.float32, logits_NV.device, requested)
        KERNELS(
            "row_values",
            logits_NV.dtype,
            logits_NV,
            *logits_NV.shape,
            logits_NV.stride(0),
            targets_N,
            rule.logit_scale,
            rule.softcap,
            *(t if t.numel() else None for t in (*values[:5], values.top1)),
            *(
                (*source.cpp_arguments, *(source.recomputed or ()))
                if source
                else (*NO_SOURCE_ARGUMENTS, None, None)
            ),
        )
        return values

    @staticmethod
    def row_value_gradients(
        logits_NV: Tensor,
        targets_N: Tensor,
        lse_N: Tensor,
        upstream: Upstream,
        rule: LossRule,
        out_NV: Tensor,
        first_class: int = 0,
        recomputed: RecomputedLogits | None = None,
    ) -> Tensor:
        assert out_NV.dtype == logits_NV.dtype, "a CPU product's result has its operands' dtype"
        logits_NV = _make_rows_contiguous(logits_NV)
        targets_N = targets_N.long().contiguous()
        upstream_fp32 = [None if t is None else t.to(torch.float32).contiguous() for t in upstream]
        KERNELS(
            "row_value_gradients",
            logits_NV.dtype,
            logits_NV,
            *logits_NV.shape,
            logits_NV.stride(0),
            targets_N,
            lse_N.contiguous(),
            *upstream_fp32,
            *(recomputed or (None, None)),
            rule.logit_scale,
            rule.softcap,
            out_NV,
            out_NV.stride(0),
            first_class,
        )
        return out_NV


def choose_row_kernels(x: Tensor) -> Any:
    """Returns the module or class whose functions compute on rows of `x`. They run Triton kernels
    on a GPU, C++ kernels on a CPU, and blocks of plain PyTorch in all other cases. Each of them has
    functions with the same names and arguments as `CppRowKernels`.
    """
    if uses_triton("cross_entropy", x):
        from . import triton

        return triton
    return CppRowKernels if uses_cpp(KERNELS, x) else eager

"""The module that computes: Triton kernels on a GPU, C++ ones on a CPU, blocks of plain PyTorch elsewhere."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..backend import cpp_runs, triton_runs
from ..cross_entropy.rule import LossRule
from . import cpp, rows
from .rows import RowValues, Upstream, Wanted


class Paths(Protocol):
    """The functions that each of these modules has."""

    def forward(self, logits_NV: Tensor, targets_N: Tensor, rule: LossRule, wanted: Wanted) -> RowValues: ...
    def backward(
        self, logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, upstream: Upstream, rule: LossRule, out_NV: Tensor, first: int = 0
    ) -> Tensor: ...


def paths(x: Tensor) -> Paths:
    if triton_runs(x):
        from . import kernels

        return kernels
    return cpp if cpp_runs(cpp.KERNELS, x) else rows

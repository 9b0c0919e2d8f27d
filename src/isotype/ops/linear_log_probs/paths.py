"""The module that computes: Triton kernels on a GPU, C++ ones on a CPU, blocks of plain PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..backend import cpp_runs, triton_runs
from . import cpp, rows


def paths(x: Tensor) -> Any:
    if triton_runs(x):
        from . import kernels

        return kernels
    return cpp if cpp_runs(cpp.KERNELS, x) else rows

"""The adapters' own products by the C++ kernels, for bf16 on a processor that multiplies it: each large operand is read once.

T tokens, N features, R ranks. Every operand is bf16; sums are fp32, and a result is rounded once.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..ops.backend import cpp_allowed
from ..ops.cpp import CppKernels, fallbacks
from ..ops.library import library_op

KERNELS = CppKernels(
    Path(__file__).with_name("kernels.cpp"), in_graphs=True, native="a", shrink="pppiiiiiiif", expand="pppiiiiiiif", gradient="pppiiiiiiif"
)


# the answer of `native`, for graphs: Dynamo cannot trace the question
_known: dict[str, bool] = {}


@cache
def native() -> bool:
    """Whether the kernels can run: they are built, this processor multiplies bf16, and the compiler supports its instructions."""
    if not KERNELS.loaded():
        return False
    # no tensor, which would be one without data while memory is planned
    answer = ctypes.c_int64()
    KERNELS("native", ctypes.addressof(answer))
    _known["native"] = bool(answer.value)
    return _known["native"]


def why_not() -> str:
    """Why PyTorch's products run on this CPU instead, or ""."""
    if native():
        return ""
    return fallbacks().get(KERNELS.op, "no AVX512-BF16 in this processor, or in its compiler")


def runs(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: bf16 on a CPU with AVX512-BF16, for which a compiler has built them.

    Called a dozen times per layer: it takes 0.4 us, and where the kernels are known not to run 0.1. Comparing the
    names of devices took 4 us.
    """
    if "native" in _known and not _known["native"]:
        return False
    for t in tensors:
        if t.dtype is not torch.bfloat16 or not t.is_cpu:
            return False
    if torch.compiler.is_compiling():
        return _known.get("native", False)
    return native() and cpp_allowed()


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _lines(a_RN: Tensor) -> Tensor:
    """With one of its two strides 1."""
    return a_RN if 1 in a_RN.stride() else a_RN.contiguous()


@library_op("lora_shrink_cpp(Tensor x, Tensor a, float scale) -> Tensor", fake=lambda x, a, scale: x.new_empty(x.shape[0], a.shape[0]))
def shrink(x_TN: Tensor, a_RN: Tensor, scale: float) -> Tensor:
    """scale x aᵀ, bf16[T R]."""
    x_TN, a_RN = _rows(x_TN), _lines(a_RN)
    out_TR = x_TN.new_empty(x_TN.shape[0], a_RN.shape[0])
    KERNELS("shrink", x_TN, a_RN, out_TR, *x_TN.shape, a_RN.shape[0], x_TN.stride(0), *a_RN.stride(), out_TR.stride(0), scale)
    return out_TR


@library_op("lora_expand_cpp(Tensor(a!) y, Tensor left, Tensor right, float scale) -> ()", fake=lambda *_: None)
def expand_(y_TN: Tensor, left_TR: Tensor, right_RN: Tensor, scale: float) -> None:
    """Adds scale left right to y in place, each element rounded once; y's rows are adjacent in memory."""
    assert y_TN.stride(-1) == 1
    left_TR, right_RN = _rows(left_TR), _lines(right_RN)
    ranks, steps = right_RN.shape[0], (left_TR.stride(0), *right_RN.stride())
    KERNELS("expand", y_TN, left_TR, right_RN, *y_TN.shape, ranks, y_TN.stride(0), *steps, scale)


@library_op(
    "lora_gradient_cpp(Tensor left, Tensor right, float scale) -> Tensor",
    fake=lambda left, right, scale: left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32),
)
def gradient(left_TM: Tensor, right_TN: Tensor, scale: float) -> Tensor:
    """scale leftᵀ right, fp32[M N]."""
    left_TM, right_TN = _rows(left_TM), _rows(right_TN)
    out_MN = left_TM.new_empty(left_TM.shape[1], right_TN.shape[1], dtype=torch.float32)
    # the kernel's ranks are the narrower side
    wide, narrow, out_RN = (right_TN, left_TM, out_MN) if left_TM.shape[1] <= right_TN.shape[1] else (left_TM, right_TN, out_MN.t())
    KERNELS("gradient", wide, narrow, out_RN, *wide.shape, narrow.shape[1], wide.stride(0), narrow.stride(0), *out_RN.stride(), scale)
    return out_MN

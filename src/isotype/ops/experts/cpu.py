"""Stacked experts by the C++ kernels, on a CPU: each is one call for all experts of a part.

`ends` are where each expert's rows end. bf16 products with a rank need AVX512-BF16; the others take fp32, bf16 and fp16.
"""

from __future__ import annotations

from array import array
from functools import cache

import torch
from torch import Tensor

from ..cpp import CppKernels
from ..library import library_op

KERNELS = CppKernels(
    __file__, native="a", multiply="pppaiiiiiiii", shrink="pppaiiiiiii", expand="pppaiiiiiiiif", gradient="pppaiiiiiiiif",
    activate="dppiiiff", backward="dppppppiiiff", scatter="dppppii",
)  # fmt: skip
# their numbers in cpu.cpp
NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped": 3}
# up to this rank a kernel is no slower than PyTorch's product
SKINNY = 64


@cache
def native() -> bool:
    """Whether the kernels with a rank can run: they are built, and the processor multiplies bf16."""
    return KERNELS.native()


@cache
def few() -> int:
    """Up to how many rows an expert the kernel for all experts is used. It takes 0.7 to 0.97 of the time of PyTorch's product for each
    at 16 to 1,024 rows (measured without AMX). With AMX, which the kernel does not use, it is not.
    """
    return 0 if torch.cpu._is_amx_tile_supported() else 1024


def _address(ends: list[int]) -> tuple[array[int], int]:
    # the array is returned so that it lives as long as the call
    kept = array("q", ends)
    return kept, kept.buffer_info()[0]


@library_op("experts_multiply_cpp(Tensor x, Tensor matrices, Tensor(a!) out, int[] ends) -> ()", fake=lambda *_: None)
def multiply_(x_SN: Tensor, matrices_ENM: Tensor, out_SM: Tensor, ends: list[int]) -> None:
    """out = x by the matrix of each row's expert; one of a matrix's two strides is 1."""
    kept, address = _address(ends)
    KERNELS(
        "multiply", x_SN, matrices_ENM, out_SM, address, len(kept), x_SN.shape[1], out_SM.shape[1], x_SN.stride(0), *matrices_ENM.stride(),
        out_SM.stride(0),
    )  # fmt: skip


@library_op("experts_shrink_cpp(Tensor x, Tensor a, int[] ends) -> Tensor", fake=lambda x, a, _: x.new_empty(len(x), a.shape[1]))
def shrink(x_SN: Tensor, a_ERN: Tensor, ends: list[int]) -> Tensor:
    """x Aᵀ of each row's expert; one of A's last two strides is 1."""
    _, ranks, features = a_ERN.shape
    out = x_SN.new_empty(x_SN.shape[0], ranks)
    kept, address = _address(ends)
    KERNELS("shrink", x_SN, a_ERN, out, address, len(kept), features, ranks, x_SN.stride(0), *a_ERN.stride())
    return out


@library_op("experts_expand_cpp(Tensor(a!) y, Tensor xa, Tensor b, int[] ends, float scale) -> ()", fake=lambda *_: None)
def expand_(y_SM: Tensor, xa_SR: Tensor, b_EMR: Tensor, ends: list[int], scale: float) -> None:
    """y += scale xa Bᵀ of each row's expert; one of B's last two strides is 1."""
    kept, address = _address(ends)
    expert_step, step, rank_step = b_EMR.stride()
    KERNELS(
        "expand", y_SM, xa_SR, b_EMR, address, len(kept), y_SM.shape[1], b_EMR.shape[2], y_SM.stride(0), xa_SR.stride(0), expert_step,
        rank_step, step, scale,
    )  # fmt: skip


@library_op("experts_gradient_cpp(Tensor left, Tensor right, Tensor(a!) into, int[] ends, float scale) -> ()", fake=lambda *_: None)
def gradient_(left_SM: Tensor, right_SN: Tensor, into_EMN: Tensor, ends: list[int], scale: float) -> None:
    """into = scale leftᵀ right of each expert with rows, in fp32, of any strides."""
    kept, address = _address(ends)
    expert_step, m_step, n_step = into_EMN.stride()
    # the kernel's ranks are the narrower side
    large, small, steps = (
        (right_SN, left_SM, (m_step, n_step)) if left_SM.shape[1] <= right_SN.shape[1] else (left_SM, right_SN, (n_step, m_step))
    )
    KERNELS(
        "gradient", large, small, into_EMN, address, len(kept), large.shape[1], small.shape[1], large.stride(0), small.stride(0),
        expert_step, *steps, scale,
    )  # fmt: skip


def fake_activate(g: Tensor, *_: object) -> Tensor:
    return g.new_empty(g.shape[0], g.shape[1] // 2)


@library_op("experts_activate_cpp(Tensor g, str kind, float alpha, float limit) -> Tensor", fake=fake_activate)
def activate(g_TG: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    h = fake_activate(g_TG)
    KERNELS("activate", g_TG.dtype, g_TG, h, *h.shape, NUMBERS[kind], alpha, limit)
    return h


def fake_backward(g: Tensor, dh: Tensor, w: Tensor, kind: str, alpha: float, limit: float, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(g), torch.empty_like(dh) if again else dh.new_empty(0), torch.empty_like(w)


@library_op(
    "experts_backward_cpp(Tensor g, Tensor dh, Tensor w, str kind, float alpha, float limit, bool again) -> (Tensor, Tensor, Tensor)",
    fake=fake_backward,
)
def backward(g_TG: Tensor, dh_TI: Tensor, w_T: Tensor, kind: str, alpha: float, limit: float, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of g, weighted; h where it is wanted again, else empty; <h, dh> of each row)."""
    made = dg, h, products = fake_backward(g_TG, dh_TI, w_T, kind, alpha, limit, again)
    KERNELS("backward", g_TG.dtype, g_TG, dh_TI, w_T, dg, h if again else None, products, *dh_TI.shape, NUMBERS[kind], alpha, limit)
    return made


@library_op("experts_scatter_cpp(Tensor(a!) total, Tensor y, Tensor tokens, Tensor? w) -> ()", fake=lambda *_: None)
def scatter_(total_TN: Tensor, y_SN: Tensor, tokens_S: Tensor, w_S: Tensor | None) -> None:
    """Adds each row, times w, to its token's fp32 sums."""
    KERNELS("scatter", y_SN.dtype, y_SN, tokens_S, w_S, total_TN, *y_SN.shape)

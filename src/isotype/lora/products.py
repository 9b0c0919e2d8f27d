"""The adapters' own products, one of whose dimensions is a rank: by C++ kernels for bf16 on a CPU that multiplies it, else PyTorch's.

A kernel reads each large operand once, sums in fp32 and rounds a result once. An adapter's gradient is summed and returned in fp32 though
its operands are narrow. On a CPU PyTorch has no such product; without the kernels it is made of two (bf16) or in blocks of rows (fp16), so
that no activation is widened whole.

T tokens, M and N features, R ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from ..environment.planned import stands_for
from ..ops.autocast import wide
from ..ops.backend import cpp_allowed, keeps_fp32_sums
from ..ops.compiled import CppKernels, fallbacks
from ..ops.library import library_op

# Elements of one block of rows once widened: 1 MiB in fp32, which a core's own cache holds; elsewhere 256 MiB, one block for most layers,
# since each is a launch.
BLOCK_ELEMENTS = 2**18
BLOCK_ELSEWHERE = 2**26

# Below this many elements the call overhead of a bf16 product dominates: 128 x (256 + 16) widened take 25 us, in two terms 46;
# 256 x (512 + 16) take 94 and 78.
SMALL_ELEMENTS = 2**16

# Up to this rank a kernel is no slower than PyTorch's product: 2048 x 768 at rank 64 0.52 and 0.53 ms, at 256 2.4 and 2.0.
SKINNY = 64


# --- the kernels

KERNELS = CppKernels(__file__, in_graphs=True, native="a", shrink="pppiiiiiiif", expand="pppiiiiiiif", gradient="pppiiiiiiif")

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


def why_not_native() -> str:
    """Why PyTorch's products run on this CPU instead, or ""."""
    if native():
        return ""
    return fallbacks().get(KERNELS.op, "no AVX512-BF16 in this processor, or in its compiler")


def kernels_run(left: Tensor, right: Tensor) -> bool:
    """Whether the kernels take these: bf16 on a CPU with AVX512-BF16, for which a compiler has built them. Asked 33 times a layer."""
    if left.dtype is not torch.bfloat16 or right.dtype is not torch.bfloat16 or not left.is_cpu or not right.is_cpu:
        return False
    if torch.compiler.is_dynamo_compiling():
        return _known.get("native", False)
    return native() and cpp_allowed()


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _lines(a_RN: Tensor) -> Tensor:
    """With one of its two strides 1."""
    return a_RN if 1 in a_RN.stride() else a_RN.contiguous()


@library_op("lora_shrink_cpp(Tensor x, Tensor a, float scale) -> Tensor", fake=lambda x, a, scale: x.new_empty(x.shape[0], a.shape[0]))
def _shrink(x_TN: Tensor, a_RN: Tensor, scale: float) -> Tensor:
    """scale x aᵀ, bf16[T R]."""
    x_TN, a_RN = _rows(x_TN), _lines(a_RN)
    out_TR = x_TN.new_empty(x_TN.shape[0], a_RN.shape[0])
    KERNELS("shrink", x_TN, a_RN, out_TR, *x_TN.shape, a_RN.shape[0], x_TN.stride(0), *a_RN.stride(), out_TR.stride(0), scale)
    return out_TR


@library_op("lora_expand_cpp(Tensor(a!) y, Tensor left, Tensor right, float scale) -> ()", fake=lambda *_: None)
def _expand_(y_TN: Tensor, left_TR: Tensor, right_RN: Tensor, scale: float) -> None:
    """Adds scale left right to y in place, each element rounded once; y's rows are adjacent in memory."""
    assert y_TN.stride(-1) == 1
    left_TR, right_RN = _rows(left_TR), _lines(right_RN)
    ranks, steps = right_RN.shape[0], (left_TR.stride(0), *right_RN.stride())
    KERNELS("expand", y_TN, left_TR, right_RN, *y_TN.shape, ranks, y_TN.stride(0), *steps, scale)


@library_op(
    "lora_gradient_cpp(Tensor left, Tensor right, float scale) -> Tensor",
    fake=lambda left, right, scale: left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32),
)
def _gradient(left_TM: Tensor, right_TN: Tensor, scale: float) -> Tensor:
    """scale leftᵀ right, fp32[M N]."""
    left_TM, right_TN = _rows(left_TM), _rows(right_TN)
    out_MN = left_TM.new_empty(left_TM.shape[1], right_TN.shape[1], dtype=torch.float32)
    # the kernel's ranks are the narrower side
    wide, narrow, out_RN = (right_TN, left_TM, out_MN) if left_TM.shape[1] <= right_TN.shape[1] else (left_TM, right_TN, out_MN.t())
    KERNELS("gradient", wide, narrow, out_RN, *wide.shape, narrow.shape[1], wide.stride(0), narrow.stride(0), *out_RN.stride(), scale)
    return out_MN


# --- products


def scaled_product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """scale * left @ right in their dtype, where right has a rank's columns; the sum is scaled before it is rounded.

    left    F[T N]
    right   F[N R]
    """
    if right.shape[1] <= SKINNY and kernels_run(left, right):
        return _shrink(left, right.t(), scale)
    if scale == 1.0:
        return left @ right
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0.0, alpha=scale)


def adds_in_place(dtype: torch.dtype, left_TR: Tensor, right_RN: Tensor) -> bool:
    """Whether `add_product_` onto a sum of this dtype adds left @ right unrounded, in one pass."""
    return dtype == left_TR.dtype and 0 < right_RN.shape[0] <= SKINNY and kernels_run(left_TR, right_RN)


def add_product_(y_TN: Tensor, left_TR: Tensor, right_RN: Tensor, scale: float = 1.0) -> Tensor:
    """y + scale * left @ right in place, in their one dtype: the sum is rounded once."""
    # A graph's y is a product's result. Dynamo cannot answer for strides in a backward: it traces that again, and the autocast that was
    # switched off around it stays off for what follows (torch 2.13)
    if adds_in_place(y_TN.dtype, left_TR, right_RN) and (torch.compiler.is_compiling() or y_TN.stride(-1) == 1):
        _expand_(y_TN, left_TR, right_RN, scale)
        return y_TN
    return y_TN.addmm_(left_TR, right_RN, alpha=scale)


def gradient_product(left_TM: Tensor, right_TN: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """scale * leftᵀ @ right in `dtype`, rounded once: through fp32 only where `dtype` can hold more than the operands' own."""
    if dtype == left_TM.dtype and scale == 1.0:
        return left_TM.t() @ right_TN
    return product_fp32(left_TM, right_TN, scale).to(dtype)


def product_fp32(left_TM: Tensor, right_TN: Tensor, scale: float = 1.0) -> Tensor:
    """scale * leftᵀ @ right, summed and returned in fp32 (fp64 for fp64): an adapter's gradient without a rounding to 8 bits.

    Relative error of bf16 operands (2048 tokens, rank 16): 1e-7 on a GPU, 4e-7 by the kernels, 2.5e-6 in two terms, 1.7e-3 for a
    bf16 result.

    left    F[T M]
    right   F[T N]   of left's dtype
    ->      fp32[M N]
    """
    assert left_TM.dtype == right_TN.dtype
    if kernels_run(left_TM, right_TN):
        return _gradient(left_TM, right_TN, scale)
    product_MN = _product_fp32(left_TM, right_TN)
    return product_MN if scale == 1.0 else product_MN.mul_(scale)


def _product_fp32(left_TM: Tensor, right_TN: Tensor) -> Tensor:
    dtype = wide(left_TM.dtype)
    if left_TM.dtype == dtype:
        return left_TM.t() @ right_TN
    if keeps_fp32_sums(left_TM.dtype, left_TM.device):
        return torch.mm(left_TM.t(), right_TN, out_dtype=dtype)
    if left_TM.numel() + right_TN.numel() <= SMALL_ELEMENTS:
        return left_TM.to(dtype).t() @ right_TN.to(dtype)
    if left_TM.dtype == torch.bfloat16:
        return _two_terms(left_TM, right_TN)
    if torch.compiler.is_compiling():
        return left_TM.to(dtype).t() @ right_TN.to(dtype)
    out_MN = torch.zeros(left_TM.shape[1], right_TN.shape[1], dtype=dtype, device=left_TM.device)
    for rows in row_blocks(left_TM.shape[0], left_TM.shape[1] + right_TN.shape[1], left_TM.device):
        out_MN.addmm_(left_TM[rows].to(dtype).t(), right_TN[rows].to(dtype))
    return out_MN


def _two_terms(left_TM: Tensor, right_TN: Tensor) -> Tensor:
    """The product rounded to bf16, plus the rounding error: a second product subtracts the first result inside its fp32 sum.

    bf16 has fp32's range, so the first term overflows no earlier. On a CPU whose addmm rounds before it adds, the second term is zero.
    """
    high_MN = left_TM.t() @ right_TN
    rest_MN = torch.addmm(high_MN, left_TM.t(), right_TN, beta=-1.0)
    return high_MN.float().add_(rest_MN)


def row_blocks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices over `rows`, each of about BLOCK_ELEMENTS elements at `width` elements a row; one slice inside a compiled graph."""
    elements = BLOCK_ELEMENTS if stands_for(device) == "cpu" else BLOCK_ELSEWHERE
    step = rows if torch.compiler.is_compiling() else max(elements // max(width, 1), 16)
    # at least one step, so that an empty batch takes the same path
    return (slice(start, start + step) for start in range(0, max(rows, 1), max(step, 1)))


# --- A and B in the dtype of the products: cast at every use, or once for all micro-batches of a step. A copy outlives its use only inside
# `copies_kept`, which ends before the optimizer writes the weights. Autograd does not see the cast: the fused functions are given the
# matrices themselves, and return gradients in their dtype


class _Copy:
    """A copy with what it was made of: held, so that no other tensor gets its id; a write in place raises its version."""

    __slots__ = ("copy", "of", "storages", "versions")

    def __init__(self, of: Sequence[Tensor], copy: Tensor) -> None:
        self.of, self.copy = tuple(of), copy
        self.versions, self.storages = _versions(of), _storages(of)

    def holds(self, of: Sequence[Tensor]) -> bool:
        return self.versions == _versions(of) and self.storages == _storages(of)


_kept: dict[tuple[object, ...], _Copy] | None = None


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [t._version for t in tensors]


def _storages(tensors: Sequence[Tensor]) -> list[int]:
    return [t.untyped_storage()._cdata for t in tensors]


@contextmanager
def copies_kept() -> Iterator[None]:
    """Within this block each matrix is cast down once, and its copy used again while the matrix is not written."""
    global _kept
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


def narrow(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """`matrix` in `dtype`; itself where that is its own."""
    # asked a dozen times a layer: without copies it is the cast alone
    return matrix.to(dtype) if _kept is None else stacked([matrix], dtype)


def stacked(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The matrices in `dtype`, one below the other."""
    kept = None if torch.compiler.is_dynamo_compiling() else _kept
    if kept is None or (len(matrices) == 1 and matrices[0].dtype == dtype) or any(m.is_inference() for m in matrices):
        return _made(matrices, dtype)
    key = (dtype, *map(id, matrices))
    found = kept.get(key)
    if found is None or not found.holds(matrices):
        found = kept[key] = _Copy(matrices, _made(matrices, dtype))
    return found.copy


def _made(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    cast = [matrix.to(dtype) for matrix in matrices]
    return cast[0] if len(cast) == 1 else torch.cat(cast)

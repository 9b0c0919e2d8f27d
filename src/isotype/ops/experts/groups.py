"""Rows in the order of their experts, and the products of each expert's rows with its own matrix.

On a CPU the rows are walked through in parts of a few experts, each expert's rows one product.
Elsewhere there is one part of all rows, a product of all experts is one call, and the host never
waits for the numbers of rows.

S rows of a part in the order of their experts, N and M features, R rank, E experts of a part.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...environment.planned import planned_device_type
from ..backend import arithmetic_dtype, choose_path, forced_path, uses_triton
from ..cpp import CppKernels
from ..library import library_op

# Rows of a part on a CPU: 512 of 1,024 inner features are 1 MiB in bf16, and a part of 64 rows has
# as many calls as one of 512
ROWS = 512
# packed experts that a GPU widens at a time: 8 of gpt-oss are 265 MB, its whole stack 1 GiB
FEW = 8


# --- the C++ kernels of cpu.cpp: each is one call for all experts of a part. `ends` are where each
# expert's rows end

KERNELS = CppKernels(
    __file__,
    native="a",
    multiply="pppaiiiiiiii",
    shrink="pppaiiiiiii",
    expand="pppaiiiiiiiif",
    gradient="pppaiiiiiiiif",
    activate="dppiiiff",
    backward="dppppppiiiff",
    scatter="dppppii",
)
# up to this rank a kernel is no slower than PyTorch's product
_SKINNY = 64


@cache
def _bf16_products() -> bool:
    """Whether the kernels with a rank can run: they are built, and the processor multiplies bf16."""
    return KERNELS.native()


@cache
def _few() -> int:
    """Up to how many rows an expert the kernel for all experts is used. It takes 0.7 to 0.97 of the
    time of PyTorch's product for each at 16 to 1,024 rows (measured without AMX). With AMX, which
    the kernel does not use, it is not.
    """
    return 0 if torch.cpu._is_amx_tile_supported() else 1024


def _address(ends: list[int]) -> tuple[array[int], int]:
    # the array is returned so that it lives as long as the call
    kept = array("q", ends)
    return kept, kept.buffer_info()[0]


@library_op(
    "experts_multiply_cpp(Tensor x, Tensor matrices, Tensor(a!) out, int[] ends) -> ()",
    fake=lambda *_: None,
)
def _cpp_multiply_(x_SN: Tensor, matrices_ENM: Tensor, out_SM: Tensor, ends: list[int]) -> None:
    """out = x by the matrix of each row's expert; one of a matrix's two strides is 1."""
    kept, address = _address(ends)
    KERNELS(
        "multiply",
        x_SN,
        matrices_ENM,
        out_SM,
        address,
        len(kept),
        x_SN.shape[1],
        out_SM.shape[1],
        x_SN.stride(0),
        *matrices_ENM.stride(),
        out_SM.stride(0),
    )


@library_op(
    "experts_shrink_cpp(Tensor x, Tensor a, int[] ends) -> Tensor",
    fake=lambda x, a, _: x.new_empty(len(x), a.shape[1]),
)
def _cpp_shrink(x_SN: Tensor, a_ERN: Tensor, ends: list[int]) -> Tensor:
    """x Aᵀ of each row's expert; one of A's last two strides is 1."""
    _, ranks, features = a_ERN.shape
    out = x_SN.new_empty(x_SN.shape[0], ranks)
    kept, address = _address(ends)
    KERNELS(
        "shrink",
        x_SN,
        a_ERN,
        out,
        address,
        len(kept),
        features,
        ranks,
        x_SN.stride(0),
        *a_ERN.stride(),
    )
    return out


@library_op(
    "experts_expand_cpp(Tensor(a!) y, Tensor xa, Tensor b, int[] ends, float scale) -> ()",
    fake=lambda *_: None,
)
def _cpp_expand_(y_SM: Tensor, xa_SR: Tensor, b_EMR: Tensor, ends: list[int], scale: float) -> None:
    """y += scale xa Bᵀ of each row's expert; one of B's last two strides is 1."""
    kept, address = _address(ends)
    expert_step, step, rank_step = b_EMR.stride()
    KERNELS(
        "expand",
        y_SM,
        xa_SR,
        b_EMR,
        address,
        len(kept),
        y_SM.shape[1],
        b_EMR.shape[2],
        y_SM.stride(0),
        xa_SR.stride(0),
        expert_step,
        rank_step,
        step,
        scale,
    )


@library_op(
    "experts_gradient_cpp(Tensor left, Tensor right, Tensor(a!) into, int[] ends, float scale)"
    " -> ()",
    fake=lambda *_: None,
)
def _cpp_gradient_(
    left_SM: Tensor, right_SN: Tensor, into_EMN: Tensor, ends: list[int], scale: float
) -> None:
    """into = scale leftᵀ right of each expert with rows, in fp32, of any strides."""
    kept, address = _address(ends)
    expert_step, m_step, n_step = into_EMN.stride()
    # the kernel's ranks are the narrower side
    if left_SM.shape[1] <= right_SN.shape[1]:
        large = right_SN
        small = left_SM
        steps = (m_step, n_step)
    else:
        large = left_SM
        small = right_SN
        steps = (n_step, m_step)
    KERNELS(
        "gradient",
        large,
        small,
        into_EMN,
        address,
        len(kept),
        large.shape[1],
        small.shape[1],
        large.stride(0),
        small.stride(0),
        expert_step,
        *steps,
        scale,
    )


@library_op(
    "experts_scatter_cpp(Tensor(a!) total, Tensor y, Tensor tokens, Tensor? w) -> ()",
    fake=lambda *_: None,
)
def _cpp_scatter_(total_TN: Tensor, y_SN: Tensor, tokens_S: Tensor, w_S: Tensor | None) -> None:
    """Adds each row, times w, to its token's fp32 sums."""
    KERNELS("scatter", y_SN.dtype, y_SN, tokens_S, w_S, total_TN, *y_SN.shape)


# --- the order of the rows, and the products of a part


class Groups:
    """The order of a call's rows.

    order   int64[S]   position in `index` of each row
    tokens  int64[S]   the token of each row
    ends    int32[E]   where each expert's rows end; None on a CPU and for fp64, which no grouped
            product takes
    counts  how many rows each expert has, where the host knows it: where there are no `ends`, and
            with `packed` stacks
    """

    def __init__(
        self, index_TC: Tensor, experts: int, dtype: torch.dtype, *, packed: bool = False
    ) -> None:
        self.experts = experts
        self.places = index_TC.shape[1]
        device = index_TC.device
        at_once = planned_device_type(device) != "cpu" or forced_path() == "triton"
        ordered, self.order = index_TC.reshape(-1).sort(stable=True)
        self.tokens = self.order // self.places
        self.ends: Tensor | None = None
        self.counts: list[int] = []
        if at_once and dtype is not torch.float64:
            bounds = torch.arange(1, experts + 1, dtype=ordered.dtype, device=device)
            self.ends = torch.searchsorted(ordered, bounds).to(torch.int32)
            if not packed:
                return
        if index_TC.is_meta or isinstance(index_TC, FakeTensor):
            # a plan, whose indices have no values: as many rows for each
            self.counts = [ordered.numel() // experts] * (experts - 1)
            self.counts.append(ordered.numel() - sum(self.counts))
        else:
            self.counts = torch.bincount(ordered, minlength=experts).tolist()

    def narrow(
        self, a: Tensor | None, b: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """A and B in the products' dtype; a grouped product takes ranks of multiples of 16 bytes,
        which are filled with zeros.
        """
        if a is None or b is None:
            return None, None
        more = -a.shape[1] % (16 // dtype.itemsize) if self.ends is not None else 0
        if more:
            a = F.pad(a, (0, 0, 0, more))
            b = F.pad(b, (0, more))
        return a.to(dtype).contiguous(), b.to(dtype).contiguous()

    def parts(self) -> Iterator[Part]:
        if self.ends is not None:
            yield AllAtOnce(self)
            return
        first = start = rows = 0
        for expert, count in enumerate(self.counts):
            if rows and rows + count > ROWS:
                yield Part(self, slice(first, expert), slice(start, start + rows))
                first = expert
                start = start + rows
                rows = 0
            rows += count
        if rows:
            yield Part(self, slice(first, self.experts), slice(start, start + rows))


class Part:
    """The rows of a few experts.

    experts  of the stacks
    rows     of the S rows
    """

    def __init__(self, groups: Groups, experts: slice, rows: slice) -> None:
        self.experts, self.rows, self.tokens = experts, rows, groups.tokens[rows]
        self.each: list[tuple[int, slice]] = []
        self.ends: Any = []
        at = 0
        for i, count in enumerate(groups.counts[experts]):
            if count:
                self.each.append((i, slice(at, at + count)))
            at += count
            self.ends.append(at)

    def gathered(self, x_TN: Tensor) -> Tensor:
        """[S N], each row's token."""
        return x_TN.index_select(0, self.tokens)

    def multiply(self, x_SN: Tensor, matrices_ENM: Tensor, out: Tensor | None = None) -> Tensor:
        """[S M], in their one dtype."""
        y = x_SN.new_empty(x_SN.shape[0], matrices_ENM.shape[2]) if out is None else out
        if (
            _native(x_SN)
            and len(x_SN) <= _few() * len(self.each)
            and 1 in matrices_ENM.stride()[1:]
        ):
            _cpp_multiply_(x_SN, matrices_ENM, y, self.ends)
            return y
        for i, rows in self.each:
            torch.mm(x_SN[rows], matrices_ENM[i], out=y[rows])
        return y

    def multiply_few(self, x_SN: Tensor, read: Callable[[slice], Tensor], out_SM: Tensor) -> Tensor:
        """The same with the matrices [E' N M] of a few experts at a time, which `read` makes; an
        expert without rows is not read.
        """
        for i, rows in self.each:
            expert = self.experts.start + i
            torch.mm(x_SN[rows], read(slice(expert, expert + 1))[0], out=out_SM[rows])
        return out_SM

    def shrink(self, x_SN: Tensor, a_ERN: Tensor) -> Tensor:
        """[S R]: x Aᵀ."""
        a_ERN = a_ERN[self.experts]
        if _skinny(x_SN, a_ERN.shape[1]):
            return _cpp_shrink(x_SN, a_ERN, self.ends)
        made = x_SN.new_empty(x_SN.shape[0], a_ERN.shape[1])
        for i, rows in self.each:
            torch.mm(x_SN[rows], a_ERN[i].t(), out=made[rows])
        return made

    def expand_(self, y_SM: Tensor, xa_SR: Tensor, b_EMR: Tensor, scale: float) -> None:
        """y += scale xa Bᵀ."""
        b_EMR = b_EMR[self.experts]
        if _skinny(y_SM, b_EMR.shape[2]):
            _cpp_expand_(y_SM, xa_SR, b_EMR, self.ends, scale)
            return
        for i, rows in self.each:
            y_SM[rows].addmm_(xa_SR[rows], b_EMR[i].t(), alpha=scale)

    def gradient(self, left_SM: Tensor, right_SN: Tensor, scale: float, into_EMN: Tensor) -> None:
        """into = scale leftᵀ right of each expert, summed in fp32."""
        if _skinny(left_SM, min(into_EMN.shape[1:])) and into_EMN.dtype is torch.float32:
            _cpp_gradient_(left_SM, right_SN, into_EMN, self.ends, scale)
            return
        for i, rows in self.each:
            torch.mul(
                left_SM[rows].to(into_EMN.dtype).t() @ right_SN[rows].to(into_EMN.dtype),
                scale,
                out=into_EMN[i],
            )

    def outer(self, left_SM: Tensor, right_SN: Tensor, into_EMN: Tensor) -> None:
        """into = leftᵀ right of each expert, for a weight of any dtype."""
        for i, rows in self.each:
            into_EMN[i] = left_SM[rows].t() @ right_SN[rows]

    def add_bias_(self, y_SM: Tensor, bias_EM: Tensor) -> None:
        for i, rows in self.each:
            y_SM[rows] += bias_EM[self.experts][i].to(y_SM.dtype)

    def inner_with_bias(self, d_SM: Tensor, bias_EM: Tensor) -> Tensor:
        """fp32[S]"""
        dtype = arithmetic_dtype(d_SM.dtype)
        return torch.cat(
            [d_SM[rows].to(dtype) @ bias_EM[self.experts][i].to(dtype) for i, rows in self.each]
        )

    def bias_sums(self, dy_SM: Tensor, w_S: Tensor | None, into_EM: Tensor) -> None:
        for i, rows in self.each:
            dy = dy_SM[rows].to(arithmetic_dtype(dy_SM.dtype))
            into_EM[i] = dy.sum(0) if w_S is None else w_S[rows] @ dy

    def scatter_add_(self, total_TN: Tensor, y_SN: Tensor, w_S: Tensor | None) -> None:
        """Adds each row, times w, to its token's."""
        if total_TN.dtype is torch.float32 and choose_path(KERNELS, y_SN) == "cpp":
            _cpp_scatter_(total_TN, y_SN, self.tokens, w_S)
            return
        wide_SN = y_SN.to(total_TN.dtype)
        total_TN.index_add_(0, self.tokens, wide_SN if w_S is None else wide_SN * w_S[:, None])


def _skinny(x: Tensor, ranks: int) -> bool:
    """Whether the kernels take these products with a rank."""
    return 0 < ranks <= _SKINNY and _native(x)


def _native(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and choose_path(KERNELS, x) == "cpp" and _bf16_products()


class AllAtOnce(Part):
    """All rows, on a GPU."""

    def __init__(self, groups: Groups) -> None:
        count = groups.order.shape[0]
        assert groups.ends is not None
        self.experts = slice(0, groups.experts)
        self.rows = slice(0, count)
        self.tokens = groups.tokens
        self.ends = groups.ends
        self.places = groups.places
        self.counts = groups.counts
        # the row of each (token, place), and the expert of each row
        self.rows_of = torch.empty_like(groups.order).index_put_(
            (groups.order,), torch.arange(count, device=groups.order.device)
        )
        self.owners = torch.searchsorted(
            self.ends, torch.arange(count, dtype=torch.int32, device=self.ends.device), right=True
        )

    def multiply(self, x_SN: Tensor, matrices_ENM: Tensor, out: Tensor | None = None) -> Tensor:
        made: Tensor = F.grouped_mm(x_SN, matrices_ENM, offs=self.ends)
        return made if out is None else out.copy_(made)

    def multiply_few(self, x_SN: Tensor, read: Callable[[slice], Tensor], out_SM: Tensor) -> Tensor:
        start = 0
        for first in range(0, len(self.counts), FEW):
            few = slice(first, min(first + FEW, len(self.counts)))
            rows = slice(start, start + sum(self.counts[few]))
            if rows.stop > start:
                out_SM[rows] = F.grouped_mm(x_SN[rows], read(few), offs=self.ends[few] - start)
            start = rows.stop
        return out_SM

    def shrink(self, x_SN: Tensor, a_ERN: Tensor) -> Tensor:
        return self.multiply(x_SN, a_ERN.transpose(1, 2))

    def expand_(self, y_SM: Tensor, xa_SR: Tensor, b_EMR: Tensor, scale: float) -> None:
        y_SM.add_(self.multiply(xa_SR, b_EMR.transpose(1, 2)), alpha=scale)

    def outer(self, left_SM: Tensor, right_SN: Tensor, into_EMN: Tensor) -> None:
        into_EMN.copy_(F.grouped_mm(left_SM.t(), right_SN, offs=self.ends))

    def gradient(self, left_SM: Tensor, right_SN: Tensor, scale: float, into_EMN: Tensor) -> None:
        if uses_triton(left_SM):
            _gradient_(left_SM, right_SN, self.ends, into_EMN, scale)
        else:
            made = F.grouped_mm(left_SM.t(), right_SN, offs=self.ends)
            into_EMN.copy_(made[:, : into_EMN.shape[1], : into_EMN.shape[2]]).mul_(scale)

    def add_bias_(self, y_SM: Tensor, bias_EM: Tensor) -> None:
        y_SM += bias_EM.to(y_SM.dtype)[self.owners]

    def inner_with_bias(self, d_SM: Tensor, bias_EM: Tensor) -> Tensor:
        dtype = arithmetic_dtype(d_SM.dtype)
        return (d_SM.to(dtype) * bias_EM.to(dtype)[self.owners]).sum(-1)

    def bias_sums(self, dy_SM: Tensor, w_S: Tensor | None, into_EM: Tensor) -> None:
        dy = dy_SM.to(arithmetic_dtype(dy_SM.dtype))
        sums = torch.zeros(into_EM.shape, dtype=dy.dtype, device=dy.device)
        into_EM.copy_(sums.index_add_(0, self.owners, dy if w_S is None else dy * w_S[:, None]))

    def scatter_add_(self, total_TN: Tensor, y_SN: Tensor, w_S: Tensor | None) -> None:
        if uses_triton(y_SN):
            _combine_(total_TN, y_SN, self.rows_of, w_S)
            return
        if w_S is None:
            y = y_SN.to(total_TN.dtype)
        else:
            y = y_SN.to(total_TN.dtype) * w_S[:, None]
        # without atomics: the sum of a token's rows, in one order
        total_TN += y[self.rows_of].view(-1, self.places, y.shape[1]).sum(1)


@library_op(
    "experts_gradient_(Tensor left, Tensor right, Tensor ends, Tensor(a!) into, float scale) -> ()",
    fake=lambda *_: None,
)
def _gradient_(
    left_SM: Tensor, right_SN: Tensor, ends_E: Tensor, into_EMN: Tensor, scale: float
) -> None:
    from . import triton

    triton.gradient_(left_SM, right_SN, ends_E, into_EMN, scale)


@library_op(
    "experts_combine_(Tensor(a!) total, Tensor y, Tensor rows_of, Tensor? w) -> ()",
    fake=lambda *_: None,
)
def _combine_(total_TN: Tensor, y_SN: Tensor, rows_of: Tensor, w_S: Tensor | None) -> None:
    from . import triton

    triton.combine_(total_TN, y_SN, rows_of, w_S)

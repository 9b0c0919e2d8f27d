"""Groups rows by their experts and multiplies each expert's rows by its matrix.

On a CPU the rows are divided into parts, each with the rows of a few experts. One matrix product
multiplies all rows of one expert. On other devices, a single part holds all rows, and one call
computes the matrix products of all experts. The CPU never waits for the GPU to count the rows of
each expert.

S is the number of rows of a part, which are sorted by expert. N and M are numbers of features, R is
the rank, and E is the number of experts of a part.
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

from ...environment.planned_device import target_device_type
from ..backend import arithmetic_dtype, choose_implementation, forced_backend, uses_triton
from ..cpp import CppKernels
from ..library import library_op
from ..widened_products import addmm_, matmul

# number of rows of a part on a CPU. 512 rows of 1,024 inner features are 1 MiB in bf16. A part of
# fewer rows, such as 64, needs as many calls as a part of 512 rows
ROWS_PER_PART = 512
# the number of packed experts that are widened at a time on a GPU. Widened matrices of 8 experts of
# gpt-oss take 265 MB, and those of all experts 1 GiB
EXPERTS_AT_ONCE = 8


# --- the C++ kernels of cpu.cpp. Each is called once for all experts of a part. `ends` is the end
# of each expert's rows

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
# up to this rank a kernel is at least as fast as PyTorch's product
_MAX_RANK = 64


@cache
def _max_rows_per_expert() -> int:
    """Returns the number of rows per expert up to which the kernel `multiply` is used. For 16 to
    1,024 rows, the kernel takes 0.7 to 0.97 times as long as PyTorch's matrix products (measured
    without AMX). The kernel does not use AMX, so the number is 0 on processors with AMX.
    """
    return 0 if torch.cpu._is_amx_tile_supported() else 1024


def _make_c_array(ends: list[int]) -> tuple[array[int], int]:
    # the caller must keep the array, so that its memory lives as long as the call
    values = array("q", ends)
    return values, values.buffer_info()[0]


@library_op(
    "experts_multiply_cpp(Tensor x, Tensor matrices, Tensor(a!) out, int[] ends) -> ()",
    fake=lambda *_: None,
)
def _cpp_multiply_(x_SN: Tensor, matrices_ENM: Tensor, out_SM: Tensor, ends: list[int]) -> None:
    """Multiplies each row of x by the matrix of its expert and writes the result to out. One of the
    two strides of a matrix must be 1.
    """
    c_ends, address = _make_c_array(ends)
    KERNELS(
        "multiply",
        x_SN,
        matrices_ENM,
        out_SM,
        address,
        len(c_ends),
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
    """Returns x Aᵀ. Each row is multiplied by the matrix A of its expert. One of A's last two
    strides must be 1.
    """
    _, ranks, features = a_ERN.shape
    out = x_SN.new_empty(x_SN.shape[0], ranks)
    c_ends, address = _make_c_array(ends)
    KERNELS(
        "shrink",
        x_SN,
        a_ERN,
        out,
        address,
        len(c_ends),
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
    """Adds scale xa Bᵀ to y in place. Each row is multiplied by the matrix B of its expert. One of
    B's last two strides must be 1.
    """
    c_ends, address = _make_c_array(ends)
    expert_step, step, rank_step = b_EMR.stride()
    KERNELS(
        "expand",
        y_SM,
        xa_SR,
        b_EMR,
        address,
        len(c_ends),
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
    "experts_gradient_cpp(Tensor lhs, Tensor rhs, Tensor(a!) out, int[] ends, float scale) -> ()",
    fake=lambda *_: None,
)
def _cpp_gradient_(
    lhs_SM: Tensor, rhs_SN: Tensor, out_EMN: Tensor, ends: list[int], scale: float
) -> None:
    """For each expert that has rows, computes `scale` times the matrix product lhsᵀ rhs and writes
    it to out in fp32. out may have any strides.
    """
    c_ends, address = _make_c_array(ends)
    expert_step, m_step, n_step = out_EMN.stride()
    # the kernel takes the narrower operand as the one whose features are ranks
    if lhs_SM.shape[1] <= rhs_SN.shape[1]:
        wide_side = rhs_SN
        narrow_side = lhs_SM
        out_strides = (m_step, n_step)
    else:
        wide_side = lhs_SM
        narrow_side = rhs_SN
        out_strides = (n_step, m_step)
    KERNELS(
        "gradient",
        wide_side,
        narrow_side,
        out_EMN,
        address,
        len(c_ends),
        wide_side.shape[1],
        narrow_side.shape[1],
        wide_side.stride(0),
        narrow_side.stride(0),
        expert_step,
        *out_strides,
        scale,
    )


@library_op(
    "experts_scatter_cpp(Tensor(a!) total, Tensor y, Tensor tokens, Tensor? w) -> ()",
    fake=lambda *_: None,
)
def _cpp_scatter_(total_TN: Tensor, y_SN: Tensor, tokens_S: Tensor, w_S: Tensor | None) -> None:
    """Multiplies each row by w and adds it to the fp32 sum of its token."""
    KERNELS("scatter", y_SN.dtype, y_SN, tokens_S, w_S, total_TN, *y_SN.shape)


# --- the order of the rows, and the products of a part


class SortedRows:
    """The rows of a call, sorted by expert.

    order   int64[S]   each row's position in the flattened `index`
    tokens  int64[S]   each row's token
    ends    int32[E]   the end of each expert's rows; None on a CPU and for fp64, which PyTorch's
            grouped matrix products do not support
    counts  the number of rows of each expert; the host reads it only if `ends` is None or the
            stacks are `packed`
    """

    def __init__(
        self, index_TC: Tensor, experts: int, dtype: torch.dtype, *, packed: bool = False
    ) -> None:
        self.experts = experts
        self.experts_per_token = index_TC.shape[1]
        device = index_TC.device
        is_grouped = target_device_type(device) != "cpu" or forced_backend() == "triton"
        sorted_experts, self.order = index_TC.reshape(-1).sort(stable=True)
        self.tokens = self.order // self.experts_per_token
        self.ends: Tensor | None = None
        self.counts: list[int] = []
        if is_grouped and dtype is not torch.float64:
            bounds = torch.arange(1, experts + 1, dtype=sorted_experts.dtype, device=device)
            self.ends = torch.searchsorted(sorted_experts, bounds).to(torch.int32)
            if not packed:
                return
        if index_TC.is_meta or isinstance(index_TC, FakeTensor):
            # when memory is planned, indices have no values: the same number of rows is assumed for
            # each expert
            self.counts = [sorted_experts.numel() // experts] * (experts - 1)
            self.counts.append(sorted_experts.numel() - sum(self.counts))
        else:
            self.counts = torch.bincount(sorted_experts, minlength=experts).tolist()

    def cast_adapter(
        self, a: Tensor | None, b: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Casts A and B to the dtype of the matrix products. PyTorch's grouped matrix product
        requires that the rank multiplied by the bytes per value is a multiple of 16. So A and B are
        padded with zeros.
        """
        if a is None or b is None:
            return None, None
        padding = -a.shape[1] % (16 // dtype.itemsize) if self.ends is not None else 0
        if padding:
            a = F.pad(a, (0, 0, 0, padding))
            b = F.pad(b, (0, padding))
        return a.to(dtype).contiguous(), b.to(dtype).contiguous()

    def parts(self) -> Iterator[RowPart]:
        if self.ends is not None:
            yield GroupedRows(self)
            return
        first = start = rows = 0
        for expert, count in enumerate(self.counts):
            if rows and rows + count > ROWS_PER_PART:
                yield RowPart(self, slice(first, expert), slice(start, start + rows))
                first = expert
                start = start + rows
                rows = 0
            rows += count
        if rows:
            yield RowPart(self, slice(first, self.experts), slice(start, start + rows))


class RowPart:
    """The rows of a few experts, and functions that compute the matrix products of these rows.

    experts  the range of experts in the stacks
    rows     the range of rows among all rows of the call
    """

    def __init__(self, groups: SortedRows, experts: slice, rows: slice) -> None:
        self.experts, self.rows, self.tokens = experts, rows, groups.tokens[rows]
        self.expert_rows: list[tuple[int, slice]] = []
        self.ends: Any = []
        start = 0
        for i, count in enumerate(groups.counts[experts]):
            if count:
                self.expert_rows.append((i, slice(start, start + count)))
            start += count
            self.ends.append(start)

    def gather_rows(self, x_TN: Tensor) -> Tensor:
        """Returns [S N], the features of the token of each row."""
        return x_TN.index_select(0, self.tokens)

    def multiply(self, x_SN: Tensor, matrices_ENM: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns [S M]. Each row is multiplied by the matrix of its expert. Rows and matrices must
        have the same dtype.
        """
        y = x_SN.new_empty(x_SN.shape[0], matrices_ENM.shape[2]) if out is None else out
        if (
            _uses_bf16_kernel(x_SN)
            and len(x_SN) <= _max_rows_per_expert() * len(self.expert_rows)
            and 1 in matrices_ENM.stride()[1:]
        ):
            _cpp_multiply_(x_SN, matrices_ENM, y, self.ends)
            return y
        for i, rows in self.expert_rows:
            addmm_(y[rows], x_SN[rows], matrices_ENM[i], beta=0.0)
        return y

    def multiply_packed(
        self, x_SN: Tensor, read: Callable[[slice], Tensor], out_SM: Tensor
    ) -> Tensor:
        """Computes the same as `multiply`, but for packed (quantised) matrices. The function `read`
        dequantises the matrices of a few experts at a time and returns them as [E' N M]. Experts
        without rows are skipped.
        """
        for i, rows in self.expert_rows:
            expert = self.experts.start + i
            addmm_(out_SM[rows], x_SN[rows], read(slice(expert, expert + 1))[0], beta=0.0)
        return out_SM

    def shrink(self, x_SN: Tensor, a_ERN: Tensor) -> Tensor:
        """Returns x Aᵀ as [S R]."""
        a_ERN = a_ERN[self.experts]
        if _uses_rank_kernel(x_SN, a_ERN.shape[1]):
            return _cpp_shrink(x_SN, a_ERN, self.ends)
        xa_SR = x_SN.new_empty(x_SN.shape[0], a_ERN.shape[1])
        for i, rows in self.expert_rows:
            addmm_(xa_SR[rows], x_SN[rows], a_ERN[i].t(), beta=0.0)
        return xa_SR

    def expand_(self, y_SM: Tensor, xa_SR: Tensor, b_EMR: Tensor, scale: float) -> None:
        """Adds scale xa Bᵀ to y in place. Each row is multiplied by the matrix B of its expert."""
        b_EMR = b_EMR[self.experts]
        if _uses_rank_kernel(y_SM, b_EMR.shape[2]):
            _cpp_expand_(y_SM, xa_SR, b_EMR, self.ends, scale)
            return
        for i, rows in self.expert_rows:
            addmm_(y_SM[rows], xa_SR[rows], b_EMR[i].t(), alpha=scale)

    def gradient(self, lhs_SM: Tensor, rhs_SN: Tensor, scale: float, out_EMN: Tensor) -> None:
        """For each expert, computes `scale` times the matrix product lhsᵀ rhs with fp32 sums, and
        writes it to out.
        """
        if _uses_rank_kernel(lhs_SM, min(out_EMN.shape[1:])) and out_EMN.dtype is torch.float32:
            _cpp_gradient_(lhs_SM, rhs_SN, out_EMN, self.ends, scale)
            return
        for i, rows in self.expert_rows:
            torch.mul(
                lhs_SM[rows].to(out_EMN.dtype).t() @ rhs_SN[rows].to(out_EMN.dtype),
                scale,
                out=out_EMN[i],
            )

    def outer_products(self, lhs_SM: Tensor, rhs_SN: Tensor, out_EMN: Tensor) -> None:
        """For each expert, computes the matrix product lhsᵀ rhs and writes it to out. out is the
        gradient of a weight of any dtype.
        """
        for i, rows in self.expert_rows:
            out_EMN[i] = matmul(lhs_SM[rows].t(), rhs_SN[rows])

    def add_bias_(self, y_SM: Tensor, bias_EM: Tensor) -> None:
        for i, rows in self.expert_rows:
            y_SM[rows] += bias_EM[self.experts][i].to(y_SM.dtype)

    def bias_inner_products(self, d_SM: Tensor, bias_EM: Tensor) -> Tensor:
        """Returns the inner product of each row with the bias of its expert, as fp32[S]."""
        dtype = arithmetic_dtype(d_SM.dtype)
        return torch.cat(
            [
                d_SM[rows].to(dtype) @ bias_EM[self.experts][i].to(dtype)
                for i, rows in self.expert_rows
            ]
        )

    def bias_sums(self, dy_SM: Tensor, w_S: Tensor | None, out_EM: Tensor) -> None:
        for i, rows in self.expert_rows:
            dy = dy_SM[rows].to(arithmetic_dtype(dy_SM.dtype))
            out_EM[i] = dy.sum(0) if w_S is None else w_S[rows] @ dy

    def scatter_add_(self, total_TN: Tensor, y_SN: Tensor, w_S: Tensor | None) -> None:
        """Multiplies each row by w and adds it to the sum of its token."""
        if total_TN.dtype is torch.float32 and choose_implementation(KERNELS, y_SN) == "cpp":
            _cpp_scatter_(total_TN, y_SN, self.tokens, w_S)
            return
        wide_SN = y_SN.to(total_TN.dtype)
        total_TN.index_add_(0, self.tokens, wide_SN if w_S is None else wide_SN * w_S[:, None])


def _uses_rank_kernel(x: Tensor, ranks: int) -> bool:
    """True if the kernels for adapters support this LoRA rank."""
    return 0 < ranks <= _MAX_RANK and _uses_bf16_kernel(x)


def _uses_bf16_kernel(x: Tensor) -> bool:
    return (
        x.dtype is torch.bfloat16
        and choose_implementation(KERNELS, x) == "cpp"
        and KERNELS.has_bf16_instructions()
    )


class GroupedRows(RowPart):
    """A part for a GPU. It holds all rows of a call and computes PyTorch's grouped matrix products."""

    def __init__(self, groups: SortedRows) -> None:
        count = groups.order.shape[0]
        assert groups.ends is not None
        self.experts = slice(0, groups.experts)
        self.rows = slice(0, count)
        self.tokens = groups.tokens
        self.ends = groups.ends
        self.experts_per_token = groups.experts_per_token
        self.counts = groups.counts
        # the row of each (token, choice), and the expert of each row
        self.token_rows = torch.empty_like(groups.order).index_put_(
            (groups.order,), torch.arange(count, device=groups.order.device)
        )
        self.row_experts = torch.searchsorted(
            self.ends, torch.arange(count, dtype=torch.int32, device=self.ends.device), right=True
        )

    def multiply(self, x_SN: Tensor, matrices_ENM: Tensor, out: Tensor | None = None) -> Tensor:
        y_SM: Tensor = F.grouped_mm(x_SN, matrices_ENM, offs=self.ends)
        return y_SM if out is None else out.copy_(y_SM)

    def multiply_packed(
        self, x_SN: Tensor, read: Callable[[slice], Tensor], out_SM: Tensor
    ) -> Tensor:
        start = 0
        for first in range(0, len(self.counts), EXPERTS_AT_ONCE):
            experts = slice(first, min(first + EXPERTS_AT_ONCE, len(self.counts)))
            rows = slice(start, start + sum(self.counts[experts]))
            if rows.stop > start:
                out_SM[rows] = F.grouped_mm(
                    x_SN[rows], read(experts), offs=self.ends[experts] - start
                )
            start = rows.stop
        return out_SM

    def shrink(self, x_SN: Tensor, a_ERN: Tensor) -> Tensor:
        return self.multiply(x_SN, a_ERN.transpose(1, 2))

    def expand_(self, y_SM: Tensor, xa_SR: Tensor, b_EMR: Tensor, scale: float) -> None:
        y_SM.add_(self.multiply(xa_SR, b_EMR.transpose(1, 2)), alpha=scale)

    def outer_products(self, lhs_SM: Tensor, rhs_SN: Tensor, out_EMN: Tensor) -> None:
        out_EMN.copy_(F.grouped_mm(lhs_SM.t(), rhs_SN, offs=self.ends))

    def gradient(self, lhs_SM: Tensor, rhs_SN: Tensor, scale: float, out_EMN: Tensor) -> None:
        if uses_triton("experts", lhs_SM):
            _gradient_(lhs_SM, rhs_SN, self.ends, out_EMN, scale)
        else:
            products_EMN = F.grouped_mm(lhs_SM.t(), rhs_SN, offs=self.ends)
            out_EMN.copy_(products_EMN[:, : out_EMN.shape[1], : out_EMN.shape[2]]).mul_(scale)

    def add_bias_(self, y_SM: Tensor, bias_EM: Tensor) -> None:
        y_SM += bias_EM.to(y_SM.dtype)[self.row_experts]

    def bias_inner_products(self, d_SM: Tensor, bias_EM: Tensor) -> Tensor:
        dtype = arithmetic_dtype(d_SM.dtype)
        return (d_SM.to(dtype) * bias_EM.to(dtype)[self.row_experts]).sum(-1)

    def bias_sums(self, dy_SM: Tensor, w_S: Tensor | None, out_EM: Tensor) -> None:
        dy = dy_SM.to(arithmetic_dtype(dy_SM.dtype))
        sums = torch.zeros(out_EM.shape, dtype=dy.dtype, device=dy.device)
        out_EM.copy_(sums.index_add_(0, self.row_experts, dy if w_S is None else dy * w_S[:, None]))

    def scatter_add_(self, total_TN: Tensor, y_SN: Tensor, w_S: Tensor | None) -> None:
        if uses_triton("experts", y_SN):
            _combine_(total_TN, y_SN, self.token_rows, w_S)
            return
        if w_S is None:
            y = y_SN.to(total_TN.dtype)
        else:
            y = y_SN.to(total_TN.dtype) * w_S[:, None]
        # a token's rows are added in a fixed order, without atomics
        total_TN += y[self.token_rows].view(-1, self.experts_per_token, y.shape[1]).sum(1)


@library_op(
    "experts_gradient_(Tensor lhs, Tensor rhs, Tensor ends, Tensor(a!) out, float scale) -> ()",
    fake=lambda *_: None,
)
def _gradient_(
    lhs_SM: Tensor, rhs_SN: Tensor, ends_E: Tensor, out_EMN: Tensor, scale: float
) -> None:
    from . import triton

    triton.gradient_(lhs_SM, rhs_SN, ends_E, out_EMN, scale)


@library_op(
    "experts_combine_(Tensor(a!) total, Tensor y, Tensor token_rows, Tensor? w) -> ()",
    fake=lambda *_: None,
)
def _combine_(total_TN: Tensor, y_SN: Tensor, token_rows: Tensor, w_S: Tensor | None) -> None:
    from . import triton

    triton.combine_(total_TN, y_SN, token_rows, w_S)

"""Computes matrix products of bf16 or fp16 operands on a CPU without instructions for them.

Such a CPU computes PyTorch's own bf16 products many times slower than fp32 products. We measured
320 x 768 by 3072 x 768 with one thread of an AMD EPYC (AVX2) and torch 2.13: x Wᵀ takes 165 ms in
bf16 and 20 to 40 ms in fp32, and dy W, the gradient of the input, takes 2115 ms and 18 ms.

The functions of this module cast blocks of the operands to fp32, multiply them with PyTorch's fp32
product, and round the result once. A product of two bf16 or fp16 numbers is exact in fp32, so the
result is at least as exact as PyTorch's. On any other processor, and for other dtypes, they call
PyTorch's product of the operands' dtype.

In a dispatch mode or a compiled graph a product is one operator, `isotype::widened_product`.

I, J and K are the dimensions of a product: [I K] @ [K J] -> [I J].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from ..environment.hardware import GENERATIONS, detect
from .backend import PLAIN_TENSOR_TYPES, autocast_off, eager_apply, fast_autocast_off, product_dtype
from .library import library_op

# Elements of a cast block: 16 MiB in fp32. A product of 2048 x 3072 by 768 x 3072 takes 141 ms, 151 ms
# with half as many, and 124 ms in fp32. A block has at least MIN_ROWS rows or MIN_COLUMNS columns.
# Casting an element of the weight takes as long as its products with 14 rows, and the weight is
# cast once for each block of rows
BLOCK_ELEMENTS = 2**22
MIN_ROWS = 512
MIN_COLUMNS = 128

# Up to this number of rows PyTorch's own product x Wᵀ is faster, because it does not store the cast
# weight: with a weight of 3072 x 768, 0.5 ms for one row and 2.4 ms for four, and 1.8 and 2.5 ms
# with a cast
MAX_UNCAST_ROWS = 3


def find_widened_dtypes() -> frozenset[torch.dtype]:
    """Returns the dtypes whose products this machine computes in fp32 blocks. A CPU with bf16
    instructions computes all products with PyTorch, because we measured fp16 only on CPUs without
    them.
    """
    if GENERATIONS[detect("cpu").generation].bf16 == "native":
        return frozenset()
    return frozenset({torch.bfloat16, torch.float16})


_widened_dtypes = find_widened_dtypes()
# memory is planned with tensors without values
_WIDENED_TYPES = (*PLAIN_TENSOR_TYPES, FakeTensor)


def emulated_dtypes() -> frozenset[torch.dtype]:
    """Returns the dtypes whose products on a CPU are computed in fp32 blocks."""
    return _widened_dtypes


@contextmanager
def widen_dtypes(dtypes: Collection[torch.dtype]) -> Iterator[None]:
    """Within this block, products of these dtypes are computed in fp32 blocks on any CPU. Tests and
    comparisons use this function.
    """
    global _widened_dtypes
    previous = _widened_dtypes
    _widened_dtypes = frozenset(dtypes)
    try:
        yield
    finally:
        _widened_dtypes = previous


def widens_products(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether products with x are computed in fp32 blocks.

    dtype  the dtype of the operands; by default the dtype of x
    """
    return (x.dtype if dtype is None else dtype) in _widened_dtypes and x.is_cpu


# --- the blocks


def product_blocks(count: int, width: int, minimum: int) -> list[slice]:
    """Divides `count` rows (or columns, or samples) of `width` elements into equal blocks."""
    if 0 < count * width <= BLOCK_ELEMENTS:
        return [slice(0, count)]
    largest = max(BLOCK_ELEMENTS // max(width, 1), minimum)
    parts = max(1, -(-count // largest))
    size = max(1, -(-count // parts))
    return [slice(start, start + size) for start in range(0, count, size)]


def _write_product(
    out_IJ: Tensor,
    left_IK: Tensor,
    right_KJ: Tensor,
    alpha: float,
    beta: float,
    bias_J: Tensor | None = None,
    extra_left_IR: Tensor | None = None,
    extra_right_RJ: Tensor | None = None,
    extra_alpha: float = 1.0,
) -> None:
    """Writes beta out + alpha left @ right + bias + extra_alpha extra_left @ extra_right to out.
    All sums are fp32, and each element is rounded once.
    """
    inner = left_IK.shape[1]
    is_one_block = inner * max(out_IJ.shape) <= BLOCK_ELEMENTS
    if is_one_block and bias_J is None and extra_left_IR is None and alpha == 1.0 and not beta:
        # most products of a small model, which the slices below would slow down
        out_IJ.copy_(torch.mm(left_IK.float(), right_KJ.float()))
        return
    row_blocks = product_blocks(out_IJ.shape[0], inner, MIN_ROWS)
    column_blocks = product_blocks(out_IJ.shape[1], inner, MIN_COLUMNS)
    for rows in row_blocks:
        left = left_IK[rows].float()
        extra_left = None if extra_left_IR is None else extra_left_IR[rows].float()
        for columns in column_blocks:
            right = right_KJ[:, columns].float()
            block = out_IJ[rows, columns]
            if beta:
                total = block.float() if block.dtype != torch.float32 else block
                total = torch.addmm(total, left, right, beta=beta, alpha=alpha)
            elif alpha == 1.0:
                total = torch.mm(left, right)
            else:
                total = torch.mm(left, right).mul_(alpha)
            if extra_left is not None and extra_right_RJ is not None:
                total.addmm_(extra_left, extra_right_RJ[:, columns].float(), alpha=extra_alpha)
            if bias_J is not None:
                total.add_(bias_J[columns])
            block.copy_(total)
            # the next blocks take the memory of these
            del right, total
        del left


@library_op(
    "widened_product(Tensor left, Tensor right, Tensor? bias, Tensor? extra_left,"
    " Tensor? extra_right, float alpha, float extra_alpha, bool returns_fp32) -> Tensor",
    fake=lambda left, right, *rest: left.new_empty(
        left.shape[0], right.shape[1], dtype=torch.float32 if rest[-1] else left.dtype
    ),
    is_product=True,
)
def _widened_product(
    left_IK: Tensor,
    right_KJ: Tensor,
    bias_J: Tensor | None,
    extra_left_IR: Tensor | None,
    extra_right_RJ: Tensor | None,
    alpha: float,
    extra_alpha: float,
    returns_fp32: bool,
) -> Tensor:
    out_IJ = left_IK.new_empty(
        left_IK.shape[0],
        right_KJ.shape[1],
        dtype=torch.float32 if returns_fp32 else left_IK.dtype,
    )
    with fast_autocast_off():
        _write_product(
            out_IJ,
            left_IK,
            right_KJ,
            alpha,
            0.0,
            bias_J,
            extra_left_IR,
            extra_right_RJ,
            extra_alpha,
        )
    return out_IJ


@library_op(
    "add_widened_product(Tensor(a!) out, Tensor left, Tensor right, float alpha, float beta) -> ()",
    fake=lambda *_: None,
    is_product=True,
)
def _add_widened_product_(
    out_IJ: Tensor, left_IK: Tensor, right_KJ: Tensor, alpha: float, beta: float
) -> None:
    with fast_autocast_off():
        _write_product(out_IJ, left_IK, right_KJ, alpha, beta)


def product_scratch_bytes(
    left_IK: Tensor,
    right_KJ: Tensor,
    bias_J: Tensor | None = None,
    extra_left_IR: Tensor | None = None,
    *_: Any,
) -> int:
    """Returns the bytes of the fp32 blocks that exist at the same time in `widened_product`."""
    rows, inner = left_IK.shape
    columns = right_KJ.shape[1]
    rows = min(rows, max(BLOCK_ELEMENTS // max(inner, 1), MIN_ROWS))
    columns = min(columns, max(BLOCK_ELEMENTS // max(inner, 1), MIN_COLUMNS))
    ranks = 0 if extra_left_IR is None else extra_left_IR.shape[1]
    return 4 * (rows * inner + inner * columns + rows * columns + ranks * (rows + columns))


def _sum_scratch_bytes(out_IJ: Tensor, left_IK: Tensor, right_KJ: Tensor, *_: Any) -> int:
    return product_scratch_bytes(left_IK, right_KJ)


def scratch_estimators() -> dict[Any, Callable[..., int]]:
    """Returns estimators for memory plans. Each operator is mapped to a function that gets the
    operator's arguments, and returns the number of bytes of temporary memory that it needs.
    """
    return {
        torch.ops.isotype.widened_product.default: product_scratch_bytes,
        torch.ops.isotype.add_widened_product.default: _sum_scratch_bytes,
    }


# --- products. The caller has switched autocast off


def _is_small(left_IK: Tensor, right_KJ: Tensor) -> bool:
    """Whether PyTorch's own product is faster: few rows, with the elements of a column adjacent."""
    if torch.compiler.is_dynamo_compiling() or left_IK.shape[0] > MAX_UNCAST_ROWS:
        return False
    return right_KJ.stride(0) == 1


def matmul(left_IK: Tensor, right_KJ: Tensor, alpha: float = 1.0) -> Tensor:
    """Computes alpha * left @ right in the dtype of the operands, and rounds once."""
    if widens_products(left_IK) and not (alpha == 1.0 and _is_small(left_IK, right_KJ)):
        return _widened_product(left_IK, right_KJ, None, None, None, alpha, 1.0, False)
    if alpha == 1.0:
        return left_IK @ right_KJ
    return left_IK.new_empty(left_IK.shape[0], right_KJ.shape[1]).addmm_(
        left_IK, right_KJ, beta=0.0, alpha=alpha
    )


def matmul_fp32(left_IK: Tensor, right_KJ: Tensor, alpha: float = 1.0) -> Tensor:
    """Computes alpha * left @ right and returns the fp32 sums. Only for operands with
    `widens_products`.
    """
    return _widened_product(left_IK, right_KJ, None, None, None, alpha, 1.0, True)


def addmm_(
    out_IJ: Tensor, left_IK: Tensor, right_KJ: Tensor, *, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Computes out = beta out + alpha left @ right in place. `out` has the dtype of the operands,
    or is fp32 if `widens_products`.
    """
    if widens_products(left_IK):
        _add_widened_product_(out_IJ, left_IK, right_KJ, alpha, beta)
        return out_IJ
    return out_IJ.addmm_(left_IK, right_KJ, alpha=alpha, beta=beta)


def linear(x: Tensor, weight_JK: Tensor, bias_J: Tensor | None = None) -> Tensor:
    """Computes x Wᵀ + bias in the dtype of the operands. Autograd does not record it; for that
    there is `differentiable_linear`.
    """
    if not widens_products(x):
        return F.linear(x, weight_JK, bias_J)
    x_IK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if _is_small(x_IK, weight_JK.t()):
        return F.linear(x, weight_JK, bias_J)
    y_IJ = _widened_product(x_IK, weight_JK.t(), bias_J, None, None, 1.0, 1.0, False)
    return y_IJ if x.dim() == 2 else y_IJ.view(*x.shape[:-1], y_IJ.shape[-1])


def matmul_with_branch(
    left_IK: Tensor,
    right_KJ: Tensor,
    branch_IR: Tensor,
    branch_RJ: Tensor,
    scale: float,
    bias_J: Tensor | None = None,
) -> Tensor:
    """Computes left @ right + bias + scale branch_left @ branch_right, such as the output of a layer
    with an adapter. Only for operands with `widens_products`.
    """
    return _widened_product(left_IK, right_KJ, bias_J, branch_IR, branch_RJ, 1.0, scale, False)


# --- a linear layer that autograd records


def widened_call_dtype(x: Tensor, *tensors: Tensor) -> torch.dtype | None:
    """Returns the dtype, by autocast's rules, of a product of these tensors, if it is computed in
    fp32 and rounded to this dtype. Returns None if PyTorch computes the product in this dtype.
    """
    dtype = product_dtype(x, *tensors)
    has_one_dtype = torch.is_autocast_enabled("cpu") or all(t.dtype == x.dtype for t in tensors)
    if (
        not has_one_dtype
        or not all(type(t) in _WIDENED_TYPES for t in (x, *tensors))
        or not widens_products(x, dtype)
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    return dtype


class WidenedLinear(Function):
    """Computes x Wᵀ + bias and its gradients in `dtype`, like `nn.Linear`. The sums of the weight's
    gradient are rounded to the dtype of the weight only.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        with autocast_off(x):
            x_cast = x.to(dtype)
            y = linear(x_cast, weight.to(dtype), None if bias is None else bias.to(dtype))
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x_cast if needs_weight else None, weight if needs_x else None)
        ctx.dtype = dtype
        ctx.leaf_dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.leaf_dtypes
        dx = dweight = dbias = None
        # second derivatives need operators that autograd records
        is_recorded = torch.is_grad_enabled()
        with autocast_off(dy):
            dy_IJ = dy.reshape(-1, dy.shape[-1])
            if weight is not None:
                weight_cast = weight.to(ctx.dtype)
                if is_recorded:
                    dx_IK = dy_IJ @ weight_cast
                else:
                    dx_IK = matmul(dy_IJ, weight_cast)
                dx = dx_IK.to(x_dtype).view(*dy.shape[:-1], weight.shape[1])
            if x is not None:
                x_IK = x.reshape(-1, x.shape[-1])
                if is_recorded or weight_dtype == ctx.dtype:
                    product = dy_IJ.t() @ x_IK if is_recorded else matmul(dy_IJ.t(), x_IK)
                else:
                    product = matmul_fp32(dy_IJ.t(), x_IK)
                dweight = product.to(weight_dtype)
            if bias_dtype is not None and ctx.needs_input_grad[2]:
                dbias = dy_IJ.sum(0).to(bias_dtype)
        return dx, dweight, dbias, None


_apply_eagerly = eager_apply(WidenedLinear)


def differentiable_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `F.linear(x, weight, bias)` with autocast's rules. The products are computed in fp32
    blocks where the CPU has no instructions for their dtype.
    """
    tensors: Sequence[Tensor] = (weight,) if bias is None else (weight, bias)
    dtype = widened_call_dtype(x, *tensors)
    if dtype is None or x.shape[-1] != weight.shape[-1]:
        return F.linear(x, weight, bias)
    if torch.compiler.is_dynamo_compiling():
        y: Tensor = WidenedLinear.apply(x, weight, bias, dtype)
    else:
        y = _apply_eagerly(x, weight, bias, dtype)
    return y

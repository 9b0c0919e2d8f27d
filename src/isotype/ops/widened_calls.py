"""Replaces calls of PyTorch's batched matrix products and attention in the code of a model, on a
CPU without instructions for bf16 and fp16.

Modules whose own code calls `torch.matmul` or `F.scaled_dot_product_attention`, such as eager
attention or the attention of a text encoder, run within `WidenedCalls`. PyTorch's bf16 products of
2 x 8 x 128 x 64 matrices take 14 to 20 ms there and 0.8 ms in fp32, and their gradients 17 to 23
and 2 ms (one thread of an AMD EPYC with AVX2, torch 2.13).

N, I, J and K are the dimensions of a batched product: [N I K] @ [N K J] -> [N I J].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from . import widened_convolution, widened_products
from .attention import widened as attention_in_fp32
from .attention.op import kernel_attention
from .attention.widened import widened_attention
from .backend import fast_autocast_off
from .library import library_op
from .widened_products import differentiable_linear, product_blocks, widened_call_dtype


@library_op(
    "widened_bmm(Tensor left, Tensor right, Tensor? total, float alpha, float beta) -> Tensor",
    fake=lambda left, right, *_: left.new_empty(*left.shape[:2], right.shape[2]),
    is_product=True,
)
def _widened_bmm(
    left_NIK: Tensor, right_NKJ: Tensor, total_NIJ: Tensor | None, alpha: float, beta: float
) -> Tensor:
    """Computes alpha left @ right + beta total in fp32 and rounds once."""
    count, rows, inner = left_NIK.shape
    columns = right_NKJ.shape[2]
    out_NIJ = left_NIK.new_empty(count, rows, columns)
    elements = rows * inner + inner * columns + rows * columns
    with fast_autocast_off():
        for block in product_blocks(count, elements, 1):
            product = torch.bmm(left_NIK[block].float(), right_NKJ[block].float())
            if alpha != 1.0:
                product.mul_(alpha)
            if total_NIJ is not None and beta:
                product.add_(total_NIJ[block], alpha=beta)
            out_NIJ[block] = product
            del product  # the next block takes its memory
    return out_NIJ


def _bmm_scratch_bytes(left_NIK: Tensor, right_NKJ: Tensor, *_: Any) -> int:
    count, rows, inner = left_NIK.shape
    columns = right_NKJ.shape[2]
    elements = rows * inner + inner * columns + rows * columns
    return 4 * elements * product_blocks(count, elements, 1)[0].stop if count else 0


def scratch_estimators() -> dict[Any, Callable[..., int]]:
    """Returns estimators for memory plans for all operators that compute in fp32."""
    return {
        **widened_products.scratch_estimators(),
        **widened_convolution.scratch_estimators(),
        **attention_in_fp32.scratch_estimators(),
        torch.ops.isotype.widened_bmm.default: _bmm_scratch_bytes,
    }


class WidenedBmm(Function):
    """Computes alpha left @ right + beta total and its gradients in fp32 blocks. All tensors have
    one narrow dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        left_NIK: Tensor,
        right_NKJ: Tensor,
        total_NIJ: Tensor | None,
        alpha: float,
        beta: float,
    ) -> Tensor:
        ctx.save_for_backward(left_NIK, right_NKJ)
        ctx.factors = alpha, beta
        return _widened_bmm(left_NIK, right_NKJ, total_NIJ, alpha, beta)

    @staticmethod
    def backward(ctx: Any, dy_NIJ: Tensor) -> tuple[Tensor | None, ...]:
        left_NIK, right_NKJ = ctx.saved_tensors
        alpha, beta = ctx.factors
        # second derivatives need operators that autograd records
        is_recorded = torch.is_grad_enabled()
        gradients: list[Tensor | None] = [None, None, None]
        operands = (
            (dy_NIJ, right_NKJ.transpose(1, 2)),
            (left_NIK.transpose(1, 2), dy_NIJ),
        )
        for i, (first, second) in enumerate(operands):
            if not ctx.needs_input_grad[i]:
                continue
            if is_recorded:
                gradients[i] = torch.bmm(first, second) * alpha
            else:
                gradients[i] = _widened_bmm(first, second, None, alpha, 0.0)
        if ctx.needs_input_grad[2]:
            gradients[2] = dy_NIJ * beta
        return *gradients, None, None


def _bmm(
    original: Callable[..., Tensor], input: Tensor, mat2: Tensor, *args: Any, **options: Any
) -> Tensor:
    dtype = None
    if not args and not options:
        dtype = widened_call_dtype(input, mat2)
    if dtype is None or not _are_batches(input, mat2):
        return original(input, mat2, *args, **options)
    y: Tensor = WidenedBmm.apply(input.to(dtype), mat2.to(dtype), None, 1.0, 0.0)
    return y


def _baddbmm(
    original: Callable[..., Tensor],
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *args: Any,
    beta: float = 1,
    alpha: float = 1,
    **options: Any,
) -> Tensor:
    dtype = None
    if not args and not options:
        dtype = widened_call_dtype(input, batch1, batch2)
    if dtype is None or not _are_batches(batch1, batch2):
        return original(input, batch1, batch2, *args, beta=beta, alpha=alpha, **options)
    total = None
    if beta:
        total = input.to(dtype).expand(batch1.shape[0], batch1.shape[1], batch2.shape[2])
    y: Tensor = WidenedBmm.apply(batch1.to(dtype), batch2.to(dtype), total, alpha, beta)
    return y


def _are_batches(left: Tensor, right: Tensor) -> bool:
    return (
        left.dim() == right.dim() == 3
        and left.shape[0] == right.shape[0]
        and left.shape[2] == right.shape[1]
    )


def _matmul(
    original: Callable[..., Tensor], input: Tensor, other: Any, *args: Any, **options: Any
) -> Tensor:
    if args or options or not isinstance(other, Tensor):
        return original(input, other, *args, **options)
    dtype = widened_call_dtype(input, other)
    if dtype is None or min(input.dim(), other.dim()) < 2 or input.shape[-1] != other.shape[-2]:
        return original(input, other)
    if other.dim() == 2:
        return differentiable_linear(input, other.t())
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    left = input.to(dtype).expand(*batch, *input.shape[-2:])
    right = other.to(dtype).expand(*batch, *other.shape[-2:])
    y: Tensor = WidenedBmm.apply(
        left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:]), None, 1.0, 0.0
    )
    return y.view(*batch, *y.shape[-2:])


def _attention(
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not dropout_p and widened_call_dtype(query, key, value) is not None:
        has_heads = query.dim() == key.dim() == 4
        if has_heads and (enable_gqa or query.shape[1] == key.shape[1]):
            output = None
            if attn_mask is None or not is_causal:
                output = _fast_attention(query, key, value, attn_mask, is_causal, scale)
            if output is not None:
                return output
    return original(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _fast_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor | None:
    """Returns the result of the C++ kernel or of fp32, or None if neither supports the call."""
    if key.shape == value.shape and query.shape[-1] == key.shape[-1]:
        output = kernel_attention(query, key, value, mask=mask, causal=causal, scale=scale)
        if output is not None:
            return output
    return widened_attention(query, key, value, mask, causal=causal, scale=scale)


# a function of PyTorch -> its replacement, which gets the function and its arguments
_REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    F.scaled_dot_product_attention: _attention,
}


class WidenedCalls(TorchFunctionMode):
    """Within this context, products and attention of bf16 and fp16 tensors on a CPU that emulates
    these dtypes are computed in fp32 and rounded once. Their gradients are too. All other calls are
    not changed.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            return replacement(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def run_with_widened_calls(class_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the forward of a module, so that it runs within `WidenedCalls`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return class_forward(self, *args, **kwargs)
        with WidenedCalls():
            return class_forward(self, *args, **kwargs)

    return forward

"""Contains the cases with which the kernels of `products` are checked, as in `ops.kernel_cases`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.contract import OpContract
from ..ops.kernel_cases import OpCase
from .products import add_product_, product_fp32, scaled_product

_SCALE = 0.5


def _shrink(x: Tensor, a: Tensor) -> Tensor:
    return scaled_product(x, a.t(), _SCALE)


def _shrink_reference(x: Tensor, a: Tensor) -> Tensor:
    return (x @ a.t()) * _SCALE


def _expand(y: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return add_product_(y.clone(), left, right, _SCALE)


def _expand_reference(y: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.addmm(y, left, right, alpha=_SCALE)


def _gradient(left: Tensor, right: Tensor) -> Tensor:
    return product_fp32(left, right, _SCALE)


def _gradient_reference(left: Tensor, right: Tensor) -> Tensor:
    wide = torch.promote_types(left.dtype, torch.float32)
    return (left.to(wide).t() @ right.to(wide)) * _SCALE


CASES = {
    "adapter: x A": OpCase(
        "lora",
        _shrink,
        _shrink_reference,
        OpContract("x: F[t n], a: F[r n] -> F[t r]"),
        ((2048, 4096), (16, 4096)),
        ((40, 72), (8, 72)),
        dtypes=(torch.bfloat16,),
    ),
    "adapter: y + x B": OpCase(
        "lora",
        _expand,
        _expand_reference,
        OpContract("y: F[t n], left: F[t r], right: F[r n] -> F[t n]"),
        ((2048, 4096), (2048, 16), (16, 4096)),
        ((40, 72), (40, 8), (8, 72)),
        dtypes=(torch.bfloat16,),
    ),
    "adapter: gradient": OpCase(
        "lora",
        _gradient,
        _gradient_reference,
        OpContract("left: F[t m], right: F[t n] -> fp32[m n]"),
        ((2048, 16), (2048, 4096)),
        ((40, 8), (40, 72)),
        dtypes=(torch.bfloat16,),
    ),
}

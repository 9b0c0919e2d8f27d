"""Contains the cases with which the kernels of `products` are checked, as in `ops.kernel_cases`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.contract import OpContract
from ..ops.kernel_cases import OpCase
from .few_rows import RowLayers, can_run_row_layers
from .linear import LoraDtypes, Projection, adapted_product
from .products import add_product_, can_call_kernels_directly, product_fp32, scaled_product

_SCALE = 0.5  # of the adapters


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


def _few_rows(x: Tensor, weight: Tensor, xa: Tensor, b: Tensor) -> Tensor:
    return adapted_product(
        x,
        weight,
        None,
        None,
        xa,
        b,
        _SCALE,
        adapter_first=False,
        calls_kernels_directly=can_call_kernels_directly(x.dtype, x),
    )


def _few_rows_reference(x: Tensor, weight: Tensor, xa: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(x @ weight.t(), xa, b.t(), alpha=_SCALE)


def _project_rows(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    projection = Projection(weight, None, a, b, None, _SCALE)
    dtypes = LoraDtypes(x.dtype, x.dtype, widens_branch=False)
    with torch.no_grad():
        if can_run_row_layers(x, [projection], dtypes):
            layers = RowLayers((), [projection], x.dtype)
            if layers.is_usable(x):
                return layers.project(x)[0]
    return _project_rows_reference(x, weight, a, b)


def _project_rows_reference(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _few_rows_reference(x, weight, x @ a.t(), b)


# In the contracts, T is the number of tokens, K and N are numbers of features, M is the rank in the
# gradient of A, and R the rank elsewhere. F is any float dtype
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
    "generation: x W + x A B of a few rows": OpCase(
        "lora",
        _few_rows,
        _few_rows_reference,
        OpContract("x: F[t k], weight: F[n k], xa: F[t r], b: F[n r] -> F[t n]"),
        ((16, 4096), (4096, 4096), (16, 16), (4096, 16)),
        ((5, 72), (39, 72), (5, 8), (39, 8)),
        dtypes=(torch.bfloat16,),
    ),
    "generation: x W + x A B of a few rows, with x A": OpCase(
        "lora",
        _project_rows,
        _project_rows_reference,
        OpContract("x: F[t k], weight: F[n k], a: F[r k], b: F[n r] -> F[t n]"),
        ((12, 4096), (4096, 4096), (16, 4096), (4096, 16)),
        ((5, 75), (39, 75), (7, 75), (39, 7)),
        dtypes=(torch.float32, torch.bfloat16),
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

"""Contains the cases with which the kernels of `products` are checked, as in `ops.kernel_cases`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.contract import OpContract
from ..ops.gated.op import silu_mul_reference
from ..ops.kernel_cases import OpCase
from ..ops.rms_norm.op import rms_norm_reference
from .decode import (
    are_norm_kernels_usable,
    compute_mlp_half,
    mlp_half_arguments,
    project_normed_rows,
)
from .few_rows import RowLayers, can_run_row_layers, copy_exactly
from .linear import LoraDtypes, Projection, adapted_product
from .products import (
    KERNELS,
    add_product_,
    can_call_kernels_directly,
    keep_cast_adapters,
    product_fp32,
    scaled_product,
)

_SCALE = 0.5  # of the adapters
_EPSILON = 1e-6  # of the norms


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


def _copy_in_bf16(weight: Tensor) -> Tensor:
    exact_weight = weight.bfloat16().to(weight.dtype)
    if weight.dtype is not torch.float32 or not KERNELS.load():
        return exact_weight
    narrow_weight = torch.zeros_like(exact_weight, dtype=torch.bfloat16)
    if not copy_exactly(exact_weight, narrow_weight):
        return torch.zeros_like(weight)
    return narrow_weight.to(weight.dtype)


def _copy_in_bf16_reference(weight: Tensor) -> Tensor:
    return weight.bfloat16().to(weight.dtype)


def _project_bf16_weight(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    with keep_cast_adapters():
        return _project_rows(x, weight.bfloat16().to(weight.dtype), a, b)


def _project_bf16_weight_reference(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _project_rows_reference(x, weight.bfloat16().to(weight.dtype), a, b)


def _make_rows(x: Tensor, *projections: Projection) -> RowLayers | None:
    dtypes = LoraDtypes(x.dtype, x.dtype, widens_branch=False)
    if not can_run_row_layers(x, projections, dtypes) or not are_norm_kernels_usable(x):
        return None
    rows = RowLayers((), projections, x.dtype)
    return rows if rows.is_usable(x) else None


def _project_normed(x: Tensor, norm: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        rows = _make_rows(x, Projection(weight, None, a, b, None, _SCALE))
        if rows is None:
            return _project_normed_reference(x, norm, weight, a, b)
        normed, (y,) = project_normed_rows(x, norm.float(), _EPSILON, rows)
        return y + normed.sum()


def _project_normed_reference(
    x: Tensor, norm: Tensor, weight: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    normed = rms_norm_reference(x, norm, _EPSILON)
    return _project_rows_reference(normed, weight, a, b) + normed.sum()


def _mlp_half(
    x: Tensor, residual: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    with torch.no_grad():
        inner = _make_rows(x, Projection(gate, None, None, None), Projection(up, None, None, None))
        outer = _make_rows(x.new_zeros(1, down.shape[1]), Projection(down, None, None, None))
        if inner is None or outer is None:
            return _mlp_half_reference(x, residual, norm, gate, up, down)
        weight = norm.float()
        arguments = mlp_half_arguments(weight, "silu_mul", inner, outer)
        return compute_mlp_half(x, residual, _EPSILON, arguments)


def _mlp_half_reference(
    x: Tensor, residual: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    total = x + residual
    normed = rms_norm_reference(total, norm, _EPSILON)
    return total + silu_mul_reference(normed @ gate.t(), normed @ up.t()) @ down.t()


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
    "generation: a weight in bf16": OpCase(
        "lora",
        _copy_in_bf16,
        _copy_in_bf16_reference,
        OpContract("weight: F[n k] -> F[n k]"),
        ((4096, 4096),),
        ((39, 75),),
        dtypes=(torch.float32,),
    ),
    "generation: x W + x A B of a few rows, with a weight in bf16": OpCase(
        "lora",
        _project_bf16_weight,
        _project_bf16_weight_reference,
        OpContract("x: F[t k], weight: F[n k], a: F[r k], b: F[n r] -> F[t n]"),
        ((12, 4096), (4096, 4096), (16, 4096), (4096, 16)),
        ((5, 75), (39, 75), (7, 75), (39, 7)),
        dtypes=(torch.float32,),
    ),
    "generation: a norm, and x W + x A B of it": OpCase(
        "lora",
        _project_normed,
        _project_normed_reference,
        OpContract("x: F[t k], norm: F[k], weight: F[n k], a: F[r k], b: F[n r] -> F[t n]"),
        ((12, 4096), (4096,), (4096, 4096), (16, 4096), (4096, 16)),
        ((5, 75), (75,), (39, 75), (7, 75), (39, 7)),
        dtypes=(torch.float32, torch.bfloat16),
    ),
    "generation: the second half of a layer": OpCase(
        "lora",
        _mlp_half,
        _mlp_half_reference,
        OpContract(
            "x: F[t k], residual: F[t k], norm: F[k], gate: F[n k], up: F[n k], down: F[k n]"
            " -> F[t k]"
        ),
        ((12, 1024), (12, 1024), (1024,), (4096, 1024), (4096, 1024), (1024, 4096)),
        ((5, 75), (5, 75), (75,), (39, 75), (39, 75), (75, 39)),
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

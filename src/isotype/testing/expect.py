"""`isotype.expect(x, "bf16[T D]")`: the assertion for users' own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..dtypes import TensorSpec, name
from ..errors import DtypeError, ShapeError

if TYPE_CHECKING:
    from torch import Tensor


def expect(x: Tensor, spec: str, *, name_of: str = "tensor") -> Tensor:
    """Returns `x` unchanged when it keeps `spec`.

    spec    `bf16[T D]`, `fp32|bf16[*n 64]`, `F[...]`, `int[T]`; see `isotype.dtypes.TensorSpec`
    Raises  DtypeError DT001, ShapeError SH001
    """
    bound: dict[str, Any] = {}
    declared = TensorSpec.parse(spec)
    observed = name(x.dtype)
    got = f"{observed}[{' '.join(map(str, x.shape))}]"
    wrong_dtype = declared.dtype_fault(observed, bound)
    if wrong_dtype is not None:
        raise DtypeError(f"{name_of} is {got}, declared {spec}: dtype {observed} where {wrong_dtype} was declared", code="DT001")
    wrong_shape = declared.shape_fault(tuple(x.shape), bound)
    if wrong_shape is not None:
        raise ShapeError(f"{name_of} is {got}, declared {spec}: {wrong_shape}", code="SH001")
    return x

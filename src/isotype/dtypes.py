"""Names of dtypes: `fp32 bf16 fp16 nf4`. Configuration, code, messages and documents use the same
names. This module imports no torch.

Legend of a tensor spec: `bf16[T D]`, `F[*n d]` (F a free float dtype), `int[T]`, `any[...]`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import DtypeError, ShapeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# name -> (torch attribute or None, bits, exponent bits, mantissa bits)
_TABLE: dict[str, tuple[str | None, float, int, int]] = {
    "fp64": ("float64", 64, 11, 52),
    "fp32": ("float32", 32, 8, 23),
    "tf32": (None, 32, 8, 10),
    "bf16": ("bfloat16", 16, 8, 7),
    "fp16": ("float16", 16, 5, 10),
    "fp8_e4m3": ("float8_e4m3fn", 8, 4, 3),
    "fp8_e5m2": ("float8_e5m2", 8, 5, 2),
    "nf4": (None, 4, 0, 0),
    "fp4": (None, 4, 0, 0),
    "int64": ("int64", 64, 0, 0),
    "int32": ("int32", 32, 0, 0),
    "int16": ("int16", 16, 0, 0),
    "int8": ("int8", 8, 0, 0),
    "uint8": ("uint8", 8, 0, 0),
    "bool": ("bool", 8, 0, 0),
    "complex64": ("complex64", 64, 8, 23),
    "complex128": ("complex128", 128, 11, 52),
}
_ALIASES = {
    "float64": "fp64", "double": "fp64", "f64": "fp64",
    "float32": "fp32", "float": "fp32", "f32": "fp32",
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "f16": "fp16",
    "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "fp8e4nv": "fp8_e4m3", "fp8e5": "fp8_e5m2",
    "long": "int64", "int": "int32", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8", "i1": "bool",
}  # fmt: skip
FLOATS = ("fp64", "fp32", "bf16", "fp16")  # float dtypes that are not quantised
TRAINING_FLOATS = ("fp32", "bf16", "fp16")  # dtypes in which weights can be trained
NO_FP8_PRODUCTS = (
    "fp8 products are refused until they are measured on a GPU that has them: precision.base: fp8"
    " is a frozen base in fp8"
)


def parse(text: str) -> str:
    """Returns Isotype's name of a dtype that is written in any common spelling (`torch.bfloat16`,
    `BFloat16`, `c10::Half`, `f32`).

    Raises  ValueError for an unknown name; the message lists the known names.
    """
    dtype_name = (
        str(text)
        .strip()
        .lower()
        .removeprefix("torch.")
        .removeprefix("c10::")
        .removesuffix("tensor")
    )
    dtype_name = _ALIASES.get(dtype_name, dtype_name)
    if dtype_name not in _TABLE:
        raise ValueError(f"unknown dtype {text!r}: expected one of {' '.join(FLOATS)} nf4")
    return dtype_name


@functools.cache
def format_dtype(dtype: torch.dtype | str) -> str:
    """Returns Isotype's name of a dtype (`bf16` for `torch.bfloat16`); unknown dtypes keep torch's
    name.
    """
    try:
        return parse(str(dtype))
    except ValueError:
        return str(dtype).removeprefix("torch.")


def to_torch(dtype: str) -> torch.dtype:
    """Returns the torch dtype of a name: `torch.bfloat16` for `bf16`.

    Raises  ValueError for names that are not tensor dtypes (`nf4`, `tf32`).
    """
    import torch

    attribute = _TABLE[parse(dtype)][0]
    if attribute is None:
        raise ValueError(f"{dtype} is a storage format, not a tensor dtype")
    torch_dtype: torch.dtype = getattr(torch, attribute)
    return torch_dtype


def torch_dtype_name(dtype: str) -> str:
    """Returns the name of a dtype in torch and in the configurations of other tools: `bfloat16` for
    `bf16`. An unknown name is returned unchanged.
    """
    return _TABLE.get(dtype, (None,))[0] or dtype


@functools.cache
def itemsize(dtype: str) -> float:
    """Bytes per element (0.5 for nf4)."""
    return _TABLE[parse(dtype)][1] / 8


def eps(dtype: str) -> float:
    """Returns the distance from 1 to the next larger value."""
    return 2.0 ** -_TABLE[parse(dtype)][3]


def significant_bits(dtype: str) -> int:
    """Returns the number of significant bits, the leading bit included. Integers up to 2 to this
    power are exact.
    """
    return _TABLE[parse(dtype)][3] + 1


_SPEC = re.compile(r"^\s*(?P<dtype>[A-Za-z_][A-Za-z0-9_|]*)\s*\[(?P<dims>[^\]]*)\]\s*$")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A declared dtype and shape: `bf16[T D]`.

    dtype  one dtype name, several names joined by `|`, `any`, `float`, `int`, or a capital letter.
           A letter takes the first observed dtype
    dims   a name takes the first observed size; a number is the required size; `*name` and `...`
           match any number of dimensions
    """

    dtype: str
    dims: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        match = _SPEC.match(text)
        if match is None:
            raise ValueError(f"tensor spec {text!r}: expected something like 'bf16[T D]'")
        dims = tuple(match["dims"].replace(",", " ").split())
        if sum(dim.startswith("*") or dim == "..." for dim in dims) > 1:
            raise ValueError(
                f"tensor spec {text!r}: at most one of *name or ... may stand for a run of"
                " dimensions"
            )
        dtype_names = match["dtype"].split("|")
        if not (
            len(dtype_names) == 1
            and (
                dtype_names[0] in ("any", "float", "int")
                or (len(dtype_names[0]) == 1 and dtype_names[0].isupper())
            )
        ):
            dtype_names = [parse(dtype_name) for dtype_name in dtype_names]
        return cls("|".join(dtype_names), dims)

    @property
    def is_free(self) -> bool:
        """Returns True if the dtype is a letter, which stands for the first dtype that is observed."""
        return len(self.dtype) == 1 and self.dtype.isupper()

    def __str__(self) -> str:
        return f"{self.dtype}[{' '.join(self.dims)}]"

    def dtype_fault(self, observed: str, bindings: dict[str, str]) -> str | None:
        """Returns the declared dtype if `observed` differs from it, else None. If the declared
        dtype is a letter without an entry in `bindings`, an entry with the observed dtype is added.
        """
        if self.dtype == "any":
            return None
        if self.is_free:
            expected = bindings.setdefault(self.dtype, observed)
            return None if expected == observed else expected
        if self.dtype == "float":
            if observed in _TABLE and significant_bits(observed) > 1:
                return None
            return "float"
        if self.dtype == "int":
            if observed.startswith(("int", "uint")):
                return None
            return "int"
        if observed in self.dtype.split("|"):
            return None
        return self.dtype

    def shape_fault(self, shape: tuple[int, ...], bindings: dict[str, Any]) -> str | None:
        """Returns a sentence about the first dimension that differs from the spec, else None. If a
        dimension is a name without an entry in `bindings`, an entry with the observed size is
        added.
        """
        wildcard_index = next(
            (i for i, dim in enumerate(self.dims) if dim.startswith("*") or dim == "..."), None
        )
        fixed_count = len(self.dims) - (wildcard_index is not None)
        if (wildcard_index is None and len(shape) != fixed_count) or len(shape) < fixed_count:
            return (
                f"{len(shape)} dimensions where {self} has"
                f" {'at least ' if wildcard_index is not None else ''}{fixed_count}"
            )
        if wildcard_index is None:
            pairs = list(zip(self.dims, shape))
        else:
            tail = len(self.dims) - wildcard_index - 1
            wildcard_sizes = tuple(shape[wildcard_index : len(shape) - tail])
            pairs = [
                *zip(self.dims[:wildcard_index], shape[:wildcard_index]),
                *zip(self.dims[wildcard_index + 1 :], shape[len(shape) - tail :]),
            ]
            if self.dims[wildcard_index] != "...":
                expected = bindings.setdefault(self.dims[wildcard_index], wildcard_sizes)
                if expected != wildcard_sizes:
                    return f"{self.dims[wildcard_index]} is {wildcard_sizes} here and {expected} before"
        for dim, size in pairs:
            if dim == "_":
                continue
            expected = int(dim) if dim.isdigit() else bindings.setdefault(dim, size)
            if expected != size:
                return f"dimension {dim} is {size}, expected {expected}"
        return None


def expect(x: Tensor, spec: str, *, name_of: str = "tensor") -> Tensor:
    """Returns `x` unchanged if its dtype and shape match `spec`.

    spec    `bf16[T D]`, `fp32|bf16[*n 64]`, `F[...]`, `int[T]`; see `isotype.dtypes.TensorSpec`
    Raises  DtypeError DT001, ShapeError SH001
    """
    bindings: dict[str, Any] = {}
    declared = TensorSpec.parse(spec)
    observed = format_dtype(x.dtype)
    actual = f"{observed}[{' '.join(map(str, x.shape))}]"
    wrong_dtype = declared.dtype_fault(observed, bindings)
    if wrong_dtype is not None:
        raise DtypeError(
            f"{name_of} is {actual}, declared {spec}: dtype {observed} where {wrong_dtype} was"
            " declared",
            code="DT001",
        )
    wrong_shape = declared.shape_fault(tuple(x.shape), bindings)
    if wrong_shape is not None:
        raise ShapeError(f"{name_of} is {actual}, declared {spec}: {wrong_shape}", code="SH001")
    return x

"""What the ops share that scale, shift or gate all tokens of a picture alike. B pictures, T tokens, H hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError

# at most so many partial sums of such a vector's gradient a picture, and no fewer rows in each than pay for one
PARTIAL_SUMS, ROWS = 64, 16


def check_vectors(x: Tensor, **vectors: Tensor) -> None:
    """Raises ShapeError SH001 where x is not [B T H] or a vector not [B H], DtypeError DT001 where the vectors have several dtypes."""
    for name, vector in vectors.items():
        if x.dim() != 3 or vector.shape != (x.shape[0], x.shape[2]):
            raise ShapeError(f"{name} is {list(vector.shape)} where x is {list(x.shape)}: expected [B H] and [B T H]", code="SH001")
    (name, first), *others = vectors.items()
    for other, vector in others:
        if vector.dtype != first.dtype:
            raise DtypeError(f"{name} is {first.dtype} and {other} is {vector.dtype}, declared one float dtype", code="DT001")


def rows_of(x_BTH: Tensor) -> Tensor:
    """[B*T H], each row's values side by side in memory."""
    x_RH = x_BTH.reshape(-1, x_BTH.shape[-1])
    return x_RH if x_RH.stride(-1) == 1 else x_RH.contiguous()


def fp32_vector(vector_BH: Tensor, offset: float = 0.0) -> Tensor:
    v = vector_BH.to(torch.float32).contiguous()
    return v + offset if offset else v


def block_rows(tokens: int) -> int:
    """Rows of a picture that make one partial sum."""
    return max(ROWS, -(-tokens // PARTIAL_SUMS))

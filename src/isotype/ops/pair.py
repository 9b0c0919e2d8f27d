"""What the gated products check of their two inputs."""

from __future__ import annotations

from torch import Tensor

from ..errors import DtypeError, ShapeError


def check_pair(gate: Tensor, up: Tensor) -> None:
    """Raises DtypeError DT001 when the dtypes differ, ShapeError SH001 when the shapes do."""
    if gate.dtype != up.dtype or not gate.is_floating_point():
        raise DtypeError(f"gate is {gate.dtype} and up is {up.dtype}, declared one float dtype", code="DT001", fix="up.to(gate.dtype)")
    if gate.shape != up.shape:
        raise ShapeError(f"gate is {list(gate.shape)} and up is {list(up.shape)}, declared one shape", code="SH001")

"""The rotation as a formula; its backward is the rotation by minus the angle."""

from __future__ import annotations

from torch import Tensor

from .reference import rotate_reference


def rotate(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool, back: bool) -> Tensor:
    return rotate_reference(x_BNSD, cos_BSR, -sin_BSR if back else sin_BSR, interleaved)

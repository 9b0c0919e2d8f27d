"""GeGLU's product in plain PyTorch, right at fp64."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..autocast import autocast_off, wide


def gelu_mul_reference(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    with autocast_off(gate):
        return (F.gelu(gate.to(wide(gate.dtype)), approximate=approximate) * up.to(wide(up.dtype))).to(gate.dtype)

"""GELU in plain PyTorch, right at fp64."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..autocast import autocast_off, wide


def gelu_reference(x: Tensor, *, approximate: str = "none") -> Tensor:
    with autocast_off(x):
        return F.gelu(x.to(wide(x.dtype)), approximate=approximate).to(x.dtype)

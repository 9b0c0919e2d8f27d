"""Chooses the back end of an attention from the device, dtypes, sizes and options, without reading a value.

`cpp`    the C++ kernels of this op: bf16 on a CPU
`cudnn`  cuDNN's kernel, for plain causal attention on Hopper and Blackwell; it builds a plan for each new length (about 170 ms)
`flash`  PyTorch's FlashAttention: also packed documents and sliding windows, heads up to 256
`flex`   PyTorch's flex_attention, compiled: softcaps on a GPU
`sdpa`   PyTorch's scaled_dot_product_attention, which chooses among its own: other dtypes, masks, older GPUs, a CPU without kernels
`plain`  the reference, with all scores at once: softcaps where flex_attention is not compiled
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from ...environment.planned import is_planned, stands_for

Backend = Literal["cpp", "cudnn", "flash", "flex", "sdpa", "plain"]

_HALF = (torch.bfloat16, torch.float16)
# the GPU that a plan assumes where none is present: Hopper
PLANNED = (9, 0)


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability; None off CUDA, and for AMD's GPUs, whose numbers mean something else."""
    if is_planned(device) and stands_for(device) == "cuda":
        return PLANNED if not torch.cuda.is_available() else _capability(torch.cuda.current_device())
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _capability(device.index)


def on_a_gpu(
    dtype: torch.dtype,
    query: Tensor,
    key: Tensor,
    *,
    causal: bool,
    masked: bool,
    window: int | None,
    softcap: float | None,
    packed: bool,
    device: torch.device | None = None,
) -> Backend:
    """The back end for tensors of these shapes on a GPU, their own or `device`: what no fast kernel computes goes to `sdpa`, softcaps to
    `flex`."""
    found = capability(device or query.device)
    if softcap is not None:
        return "flex" if found is not None and found >= (8, 0) else "plain"
    depth, square = query.shape[3], query.shape[2] == key.shape[2]
    fits = found is not None and found >= (8, 0) and dtype in _HALF and depth % 8 == 0 and depth <= 256 and square and not masked
    if not fits:
        return "sdpa"
    assert found is not None
    if packed or window is not None or not causal:
        return "flash"
    return "cudnn" if found[0] in (9, 10) and depth <= 128 else "flash"

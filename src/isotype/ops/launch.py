"""Launching Triton kernels: on the device that holds the tensors, with as many warps as the tile
fills; and a kernel that shows whether any runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

# Number of multiprocessors assumed where there is no device: in the interpreter, and when launches
# are only compiled
DEFAULT_MULTIPROCESSORS = 32


def on_tensor_device(function: Callable[P, T]) -> Callable[P, T]:
    """Triton launches on the current device; a model spread over several has its tensors on others.
    The first argument says which.
    """

    @functools.wraps(function)
    def launch(*args: P.args, **kwargs: P.kwargs) -> T:
        x = args[0]
        if (
            not isinstance(x, Tensor)
            or not x.is_cuda
            or x.device.index == torch.cuda.current_device()
        ):
            return function(*args, **kwargs)
        with torch.cuda.device(x.device):
            return function(*args, **kwargs)

    return launch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else DEFAULT_MULTIPROCESSORS
    )


def warps(elements: int) -> int:
    """For a tile of this many elements: 16 a thread, which is two loads of 16 bytes in bf16, up to
    16,384 of them.
    """
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16 if elements <= 16384 else 32


@triton.jit
def add_one(x):  # type: ignore[no-untyped-def]  # Triton reads an annotation as an instruction
    tl.store(x, tl.load(x) + 1.0)


def probe(device: torch.device) -> None:
    """Adds one to a value on `device` and checks the result. Raises the errors of compiling and
    launching.
    """
    x = torch.ones(1, device=device)
    with torch.cuda.device(device):
        add_one[(1,)](x)
    if float(x) != 2.0:
        raise RuntimeError(f"1 + 1 was {float(x)}")

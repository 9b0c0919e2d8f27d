"""Launches Triton kernels on the device of their tensors, and tests with a small kernel whether
Triton works on a device.
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
    """Runs `function` with the device of its first argument as the current device. Triton launches
    a kernel on the current device. A model that is spread over several devices also has tensors on
    other devices.
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
    """The number of multiprocessors of a device."""
    if device.type != "cuda":
        return DEFAULT_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def warps(elements: int) -> int:
    """Returns the number of warps for a tile of this many elements. In a tile of up to 16,384
    elements, each thread computes at most 16 elements. It can load 16 elements in bf16 with two
    loads of 16 bytes.
    """
    if elements <= 2048:
        return 4
    if elements <= 8192:
        return 8
    if elements <= 16384:
        return 16
    return 32


@triton.jit
def add_one(x):  # type: ignore[no-untyped-def]  # Triton reads an annotation as an instruction
    tl.store(x, tl.load(x) + 1.0)


def probe(device: torch.device) -> None:
    """Adds one to a value on `device` and checks the result. Raises the errors of Triton if the
    kernel cannot be compiled or launched.
    """
    x = torch.ones(1, device=device)
    with torch.cuda.device(device):
        add_one[(1,)](x)
    if float(x) != 2.0:
        raise RuntimeError(f"1 + 1 was {float(x)}")

"""Tests that need a GPU: `@on_a_gpu` marks them, and they put what they make on `DEVICE`.

`ISOTYPE_GPU_TESTS_ON=cpu pytest -m gpu` runs the same code on a CPU, with kernels in the
interpreter: to see that a test runs before there is a GPU for it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

DEVICE = os.environ.get("ISOTYPE_GPU_TESTS_ON", "cuda")
T = TypeVar("T", bound=Callable[..., object])


_MARKS = (
    pytest.mark.full, pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
)  # fmt: skip
# the same test on the CPU and on a GPU
everywhere = pytest.mark.parametrize(
    "device", ["cpu", pytest.param(DEVICE, marks=_MARKS, id="gpu")]
)


def on_a_gpu(test: T) -> T:
    for mark in _MARKS:
        test = mark(test)
    return test


@contextmanager
def kernels(device: str | None = None) -> Iterator[None]:
    """Within this block ops run their Triton kernels: on the GPU, or in the interpreter."""
    from isotype.ops.backend import force_backend

    if (device or DEVICE) == "cuda":
        with force_backend("triton"):
            yield
        return
    from isotype.testing.interpreter import interpreted

    with interpreted(), force_backend("triton"):
        yield

"""The plain twin of a hand-written Function: its own forward, run as ordinary differentiable PyTorch.

Where no reference is given, the twin measures the error of plain PyTorch at the same dtypes. It counts only where
autograd's derivative of that forward agrees with the hand-written backward at fp64 (a straight-through estimator has no twin).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class _PlainContext:
    """Takes what forward stores and keeps none of it."""

    def __init__(self, wanted: tuple[bool, ...]) -> None:
        self.needs_input_grad = wanted
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Tensor) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


@contextmanager
def plain_functions() -> Iterator[None]:
    """Within this block `SomeFunction.apply(...)` runs its forward under autograd and never its backward."""
    original = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.setup_context is not Function.setup_context:
            return cls.forward(*args, **kwargs)
        return cls.forward(_PlainContext(tuple(isinstance(a, Tensor) and a.requires_grad for a in args)), *args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]  # for every function of the program, in this block
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]  # gives the method back


def is_low(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).bits < 32

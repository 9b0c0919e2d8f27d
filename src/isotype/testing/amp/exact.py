"""The truth: the same function with every floating tensor in fp64, even where its code names another dtype for a cast or a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Exact(TorchDispatchMode):
    """Within this mode every operator computes in fp64 and a cast to a narrower float does nothing.

    Code that is not made of torch operators (a Triton kernel) is not reached; it computes as it is written.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it; True would import torch._dynamo, a second of every check

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        written = func._schema.is_mutable
        args, given = pytree.tree_map(_widened(tensors=not written), (args, dict(kwargs or {})))
        return pytree.tree_map(_widened(tensors=not written), func(*args, **given))


def _widened(*, tensors: bool) -> Any:
    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value in _NARROW else value
        if tensors and isinstance(value, Tensor) and value.dtype in _NARROW:
            return value.to(torch.float64)
        return value

    return widen


@contextmanager
def exact() -> Iterator[None]:
    """`Exact`, with fp64 as the default dtype, so that what is made without one is exact too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Exact():
            yield
    finally:
        torch.set_default_dtype(before)

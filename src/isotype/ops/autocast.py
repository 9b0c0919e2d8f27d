"""How an op uses autocast: it reads the dtype that autocast would use, and then switches autocast off."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..environment import planned

# looked up once: three lookups take 2 us, ten times a layer
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast would use on `x`'s device, or None where it is off."""
    kind = x.device.type
    if kind == "meta":
        # it has no autocast, and raises when it is asked
        return planned.autocast_dtype() if planned.is_planned(x.device) else None
    # torch.is_autocast_enabled() without an argument answers for CUDA only
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Switches autocast off on `x`'s device; costs nothing where it is already off."""
    kind = x.device.type
    if kind == "meta":
        return planned.autocast_off() if planned.is_planned(x.device) else nullcontext()
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    # a graph knows torch's own; that one takes 5 us, and is entered six times a layer
    return torch.autocast(kind, enabled=False) if torch.compiler.is_compiling() else _Off(kind)


# Outside graphs and plans, for code that does not ask whether autocast is on (`autocast_dtype` still answers as outside): a context manager
# in C++, which PyTorch's own compiled graphs use too
now_without_autocast = torch._C._DisableAutocast


class _Off:
    """Autocast of one kind of device, switched off within the block; it was on."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.kind, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.kind, True)


def wide(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of an op's arithmetic: fp32, or fp64 when any input is fp64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, and `x` itself where that is its own: how a result leaves an autograd function's forward.

    In a graph of torch 2.11 a forward whose output is a `.to` that changes nothing has no gradient: every input gets zeros, without an
    error.
    """
    return x if x.dtype == dtype else x.to(dtype)


def no_view(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` in another shape, on its own memory: how an autograd function's forward shapes its result.

    A view made there cannot be written to in place, as models do (OLMo clamps its queries); this is what `F.linear` itself returns.
    """
    reshaped: Tensor = _UNSAFE_VIEW(x, list(shape))
    return reshaped


def product_dtype(x: Tensor, *others: Tensor) -> torch.dtype:
    """The dtype a matrix product of these tensors has, decided once: autocast's where it is on (fp64 is exempt), else the promoted one."""
    dtype = x.dtype
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype)
    cast = autocast_dtype(x)
    return dtype if cast is None or dtype == torch.float64 else cast

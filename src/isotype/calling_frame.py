"""The code that called a module whose forward runs now: the frame before PyTorch's call of a module and Isotype's of a method.

What stands between, as a wrapper around the module's forward, may read or write what the module is given and gives in ways that no tensor
counts (`.data`, NumPy, inference mode).
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from types import CodeType, FrameType
from typing import Any

from torch import nn

from .instance_method import InstanceMethod

_CALL = nn.Module._call_impl.__code__
# `inner` runs the forward of a module that has hooks
_CALLS = {
    _CALL, nn.Module._wrapped_call_impl.__code__, InstanceMethod.__call__.__code__,
    *(part for part in _CALL.co_consts if isinstance(part, CodeType) and part.co_name == "inner"),
}  # fmt: skip


def calling_frame(forward: FrameType | None) -> FrameType | None:
    """Of the call whose forward runs in this frame."""
    frame = forward.f_back if forward is not None else None
    while frame is not None and frame.f_code in _CALLS:
        frame = frame.f_back
    return frame


def forward_above(depth: int) -> FrameType | None:
    """The frame that stands so many calls above the function that asks."""
    return sys._getframe(depth + 1)


@cache
def code_of(kind: Any) -> Any:
    """The code of the forward of a class, without decorators that are marked as such; None where it is not written in Python."""
    return getattr(inspect.unwrap(kind.forward), "__code__", None)

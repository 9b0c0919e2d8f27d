"""What a layer's last sum notes on its result: the norm that reads it next has been computed with it, in one pass.

The note stands on the tensor itself. A norm that is given another tensor (a hook's, another device's, one that was written to since) finds
none that holds, and computes its own result. No note holds inside a checkpoint of the caller's (`tensors_are_packed`): its recompute would
find none, and save other tensors than its first run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_NOTE = "_isotype_ahead"


class Next:
    """The norm that reads a layer's output next.

    model   the class whose forward calls the layer and then the norm
    hooks   the dictionaries of hooks at which the sum is made alone: the norm's, and those on what the next layer is given
    misses  results in a row that the norm was not asked for
    """

    def __init__(self, model: type[nn.Module], norm: nn.Module, hooks: tuple[dict[int, Any], ...]) -> None:
        self.model, self.norm, self.hooks, self.misses = model, norm, hooks, 0


class Ahead:
    """The norm of a tensor, with what it depends on besides."""

    __slots__ = ("following", "moment", "normed")

    def __init__(self, following: Next, x: Tensor, normed: Tensor) -> None:
        self.following, self.normed, self.moment = following, normed, _moment(following.norm, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _moment(norm: nn.Module, x: Tensor) -> tuple[Any, ...]:
    weight: Any = norm._parameters["weight"]
    return torch.is_grad_enabled(), 0 if x.is_inference() else x._version, id(weight), weight._version


def tensors_are_packed() -> bool:
    """Whether hooks take what autograd saves now, as in both runs of a `torch.utils.checkpoint` around several layers."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def note(following: Next, x: Tensor, normed: Tensor) -> None:
    following.misses += 1
    setattr(x, _NOTE, Ahead(following, x, normed))


def take(norm: nn.Module, x: Tensor) -> Tensor | None:
    """`norm(x)` where it has been computed, once; else None."""
    if torch.compiler.is_compiling():
        return None
    found: Ahead | None = getattr(x, _NOTE, None)
    if found is None:
        return None
    delattr(x, _NOTE)
    if found.following.norm is not norm or found.moment != _moment(norm, x) or tensors_are_packed():
        return None
    found.following.misses = 0
    return found.normed


def forget(x: Tensor) -> None:
    """Before a checkpoint: its first run would take what its recompute does not find."""
    if not torch.compiler.is_compiling() and getattr(x, _NOTE, None) is not None:
        delattr(x, _NOTE)

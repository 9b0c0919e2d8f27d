"""Groups of deferred logits whose real tensors would share memory: a write to one of them must change all.

A view of deferred logits is a recipe of its own, so that a loss of shifted rows needs no logits. A write in place, or a hook on the tensor,
needs the real memory: then all of them become real at once, as views of one tensor, before it happens. PyTorch decides what shares memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

# besides names that end in one underscore: what needs the memory or the graph of the tensor itself
_IN_PLACE = {"__setitem__", *(f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"))}
HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}

VIEWS = {
    *(Tensor.detach, torch.detach, Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous, Tensor.__getitem__),
    *(Tensor.flatten, torch.flatten),
}  # what may share its argument's memory


def needs_the_memory(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes to a tensor that it is given, or hooks it."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or name in HOOKS or kwargs.get("out") is not None


class Member(Protocol):
    """What a view knows of deferred logits.

    made_from  the logits that it is a view of, and the call that makes it; None for the first of a memory
    in_place   whether it lies in the memory of those
    """

    made_from: tuple[Any, Callable[[Tensor], Tensor]] | None
    in_place: bool
    computed: Tensor | None

    @property
    def grad_was_on(self) -> bool: ...
    def materialise(self, asked_by: str = ...) -> Tensor: ...


class Views:
    """The members of one memory, in the order in which they were made; they hold this, and their parents, and it holds none of them."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[Member]] = []
        self.real = False

    def __iter__(self) -> Iterator[Member]:
        return (member for ref in self.members if (member := ref()) is not None)

    def add(self, member: Member) -> None:
        self.members.append(weakref.ref(member))

    def make_real(self) -> None:
        if self.real:
            return
        self.real = True
        for member in self:
            _place(member)


def _place(member: Member) -> Tensor:
    """The member's real tensor, in its parent's memory where it is a view."""
    if member.made_from is None:
        return member.materialise("a write in place")
    if not member.in_place:
        parent, again = member.made_from
        with torch.set_grad_enabled(member.grad_was_on):
            member.computed, member.in_place = again(_place(parent)), True
    assert member.computed is not None
    return member.computed


def again(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The same call on another tensor."""
    return lambda parent: func(parent, *args, **kwargs)

"""Attention's output and logsumexp, kept from a layer's first forward for its recompute, which then runs no attention kernel.

They are what the kernel's backward needs besides query, key and value: with 32 heads of 128 in bf16, 8 KiB and 128 bytes a token and layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# what the layer that runs now keeps, or has kept; None outside a recomputed layer
_current: list[KeptAttention] = []


class KeptAttention:
    """Of one call of one layer, which `run` calls for the forward and again for every recompute. Attentions are told apart by order."""

    def __init__(self) -> None:
        self.results: list[tuple[Tensor, ...]] = []
        self.ran = False

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.replaying, self.ran, self.next = self.ran, True, 0
        _current.append(self)
        try:
            return function(*args)
        finally:
            _current.pop()

    def take(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if not self.replaying:
            made = compute()
            # aliases: autograd writes the graph onto the very tensors that a function returns
            self.results.append(tuple(t.detach() for t in made))
            return made
        # a recompute calls what the forward called, in its order
        made, self.next = self.results[self.next], self.next + 1
        return tuple(t.detach() for t in made)


def kept_or_computed(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`compute()`, or what it gave in the forward that is recomputed now."""
    return _current[-1].take(compute) if _current else compute()

"""Counts the cost of a run instead of timing it, so that the result is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

CALL, NUMBER, OPERATION = 2e-7, 2e-9, 2e-10  # seconds that a call in Python, a number written and an operation take on a nominal machine


@dataclass
class Cost:
    """calls: of Python functions; numbers: written by operators; operations: of products, as `flop_counter` counts them."""

    calls: int = 0
    numbers: int = 0
    operations: int = 0

    @property
    def seconds(self) -> float:
        """On a nominal machine."""
        return CALL * self.calls + NUMBER * self.numbers + OPERATION * self.operations


class _Counting(TorchDispatchMode):
    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self.cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.cost.numbers += sum(t.numel() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.cost.operations += int(count(*args, **(kwargs or {}), out_val=out))
        return out


@contextmanager
def counted() -> Iterator[Cost]:
    """Counts what runs inside."""
    cost = Cost()
    former = sys.getprofile()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            cost.calls += 1

    with _Counting(cost):
        sys.setprofile(count)
        try:
            yield cost
        finally:
            sys.setprofile(former)

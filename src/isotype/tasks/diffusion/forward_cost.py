"""Counts the FLOPs and bytes of a denoiser's forward pass for one picture, on the meta device, without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class ForwardCost:
    """flops: of products, convolutions and attention; made: bytes of everything that its operators make, views included"""

    flops: int
    made: int

    @classmethod
    def of(cls, run: Callable[[], Any]) -> ForwardCost:
        """run  a forward pass on the meta device"""
        with torch.no_grad(), _Made() as seen, FlopCounterMode(display=False) as counted:
            run()
        return cls(counted.get_total_flops(), seen.made)


class _Made(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.made += sum(t.numel() * t.element_size() for t in tree_leaves(made) if isinstance(t, torch.Tensor))
        return made

"""Counts the bytes of tensors that are alive, operator by operator: on real tensors, or on fake ones that hold no data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While active, `now` is the size of the live tensors that were made in it, and `peak` its maximum, in bytes.

    device_type  counts only tensors on this device
    scratch      operator -> function from its arguments to the bytes it needs besides its results; 0 for other operators
    Each storage is counted once, however many views it has.
    """

    def __init__(self, device_type: str = "cpu", scratch: Mapping[Any, Callable[..., int]] | None = None) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.device_type, self.scratch = device_type, scratch or {}
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.device_type:
                self._count(leaf)
        if function in self.scratch:
            self.peak = max(self.peak, self.now + self.scratch[function](*args, **(kwargs or {})))
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)

    def restart_peak(self) -> None:
        self.peak = self.now

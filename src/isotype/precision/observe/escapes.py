"""Detects values that leave PyTorch as a NumPy array, a list or an address, and Python's numbers that become tensors.

The later use of what leaves cannot be observed, and the record says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .callers import OURS, PRACTICE, Caller, caller
from .made_narrow import ENTRIES

_WAYS = {
    "numpy": "NumPy", "__array__": "NumPy", "tolist": "a Python list", "__dlpack__": "DLPack", "data_ptr": "an address",
    "untyped_storage": "its storage", "storage": "its storage", "__reduce_ex__": "a pickle",
}  # fmt: skip


_ATTENTION = (torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.multi_head_attention_forward)
# PyTorch makes them of other operators: the place between two sorted values is floored and becomes an integer
_QUANTILES = ("quantile", "nanquantile")


class Escapes(TorchFunctionMode):
    """Calls `said(way, tensor, caller)` for each tensor whose values leave, and `entered` with each call that made one of numbers.

    attention  gets the dtype of the query of each attention of PyTorch while it runs: its inside may be made of wide products
    quantiles  gets an entry for each quantile while it runs
    entries    gets an entry for each call that makes a tensor of numbers while it runs
    """

    def __init__(
        self,
        said: Callable[[str, Tensor, Caller], None],
        entered: Callable[..., None],
        attention: list[torch.dtype],
        quantiles: list[str],
        entries: list[str],
    ) -> None:
        super().__init__()
        self.said, self.entered, self.attention, self.quantiles, self.entries = said, entered, attention, quantiles, entries

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ATTENTION and args and isinstance(args[0], Tensor):
            device = args[0].device.type
            self.attention.append(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else args[0].dtype)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.attention.pop()
        called = getattr(func, "__name__", "")
        if called in _QUANTILES:
            self.quantiles.append(called)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.quantiles.pop()
        if called in ENTRIES:
            self.entries.append(called)
            try:
                out = func(*args, **(kwargs or {}))
            finally:
                self.entries.pop()
            made = args[0] if out is None else out
            if type(made) is Tensor and not made.is_meta:
                with torch._C.DisableTorchFunction():
                    self.entered(called, args, kwargs or {}, made, caller())
            return out
        way = _WAYS.get(called)
        if way is not None and args and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction():
                tensor = args[0]
                # a subclass of its own may have no values yet, as what is on the meta device has none
                plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
                if plain and not _expected(way, by := caller()):
                    self.said(way, tensor, by)
        return func(*args, **(kwargs or {}))


def _expected(way: str, by: Caller) -> bool:
    """Whether this use is harmless: our own kernels take addresses, and transformers reads the addresses of storages."""
    return by.kind == OURS or (by.kind == PRACTICE and way in ("its storage", "an address", "a pickle"))

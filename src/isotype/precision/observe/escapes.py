"""Values that leave PyTorch: NumPy, a list, an address. What happens to them there is not seen, and is said so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .callers import OURS, Caller, caller

_WAYS = {
    "numpy": "NumPy", "__array__": "NumPy", "tolist": "a Python list", "__dlpack__": "DLPack", "data_ptr": "an address",
    "untyped_storage": "its storage", "storage": "its storage", "__reduce_ex__": "a pickle",
}  # fmt: skip


class Escapes(TorchFunctionMode):
    """Calls `said(way, tensor, caller)` for each floating tensor of more than one element whose values leave."""

    def __init__(self, said: Callable[[str, Tensor, Caller], None]) -> None:
        super().__init__()
        self.said = said

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        way = _WAYS.get(getattr(func, "__name__", ""))
        if way is not None and args and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction():
                tensor = args[0]
                plain = type(tensor) in (Tensor, torch.nn.Parameter)  # a subclass of its own may have no values yet
                if plain and tensor.is_floating_point() and tensor.numel() > 1 and (by := caller()).kind != OURS:
                    self.said(way, tensor, by)
        return func(*args, **(kwargs or {}))

"""A mode that refuses what makes the host wait for a device: reading a value, and results whose
size depends on values.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.nonzero_static.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten.item.default, aten.unique_consecutive.default, aten._unique2.default, aten.unique_dim.default,
    aten.repeat_interleave.Tensor, aten.argwhere.default,
}  # fmt: skip


class HostReadError(AssertionError):
    pass


class NoHostReads(TorchDispatchMode):
    """Within this block such an operator on tensors of `device_type` raises HostReadError.

    seen          the others that ran
    largest_bool  elements of the largest tensor of bools that any of them made
    """

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self.device_type, self.seen = device_type, list[str]()
        self.largest_bool = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        there = [
            a
            for a in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(a, torch.Tensor)
        ]
        there = [a for a in there if a.device.type == self.device_type]
        if there and (function in WAITS or _indexed_by_bools(function, args)):
            raise HostReadError(f"{function}: the host waits for the device")
        result = function(*args, **(kwargs or {}))
        if there and any(
            t.device.type == "cpu"
            for t in torch.utils._pytree.tree_leaves(result)
            if isinstance(t, torch.Tensor)
        ):
            raise HostReadError(f"{function}: a copy to the host")
        self.seen.append(str(function))
        made = [
            t
            for t in torch.utils._pytree.tree_leaves(result)
            if isinstance(t, torch.Tensor) and t.dtype == torch.bool
        ]
        self.largest_bool = max([self.largest_bool, *(t.numel() for t in made)])
        return result


def _indexed_by_bools(function: Any, args: Any) -> bool:
    if function not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return False
    # index_put_ by one mask and one value is a masked fill; every other index of bools is counted
    # first
    return any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    )

"""Weights that processes share by rows: the rows that this process holds of a distributed tensor,
and those that it will keep.

FSDP2 gives each process some rows of every weight. Where each process holds the whole model, the
part is the whole tensor.

A model's weights come from files that are mapped into memory: a weight in the file's dtype takes no
memory until it is read. A cast would read it whole, in every process. `Part` casts its own rows
only, into a tensor of the whole shape. The system gives memory to the pages that are written, so
that the tensor takes what these rows take.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor: its shape is the whole tensor's, and this process holds some rows
    of it.
    """
    return hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """The rows that this process holds: a view without a graph, possibly of no row. An ordinary
    tensor is returned as it is.
    """
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # a DTensor has it
    return part


def gather_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process: all of them call it. An ordinary tensor is returned as it
    is.
    """
    if not is_sharded(tensor):
        return tensor
    full_tensor: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor has it
    return full_tensor


def local_rows(tensor: Tensor) -> range:
    """The indices of the local rows in the first dimension of the whole tensor."""
    if not is_sharded(tensor):
        return range(tensor.shape[0] if tensor.dim() else 0)
    sharded: Any = tensor
    (dim,) = (
        dim_index for dim_index, placement in enumerate(sharded.placements) if placement.is_shard(0)
    )
    rows = tensor.shape[0]
    processes = sharded.device_mesh.size(dim)
    rank = sharded.device_mesh.get_local_rank(dim)
    rows_per_process = math.ceil(rows / processes)
    return range(min(rows, rank * rows_per_process), min(rows, (rank + 1) * rows_per_process))


def first_element(tensor: Tensor) -> int:
    """Index of the part's first element in the whole tensor, flattened."""
    if is_sharded(tensor):
        return local_rows(tensor).start * (tensor.numel() // max(1, tensor.shape[0]))
    return 0


def gathered_weights(model: nn.Module) -> Iterator[Tensor]:
    """The tensor that FSDP puts in the place of a part while its unit runs: the same tensor each
    time, whose memory is allocated and freed.
    """
    for unit in _fsdp_units(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            yield from (
                p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")
            )


def reshard_units(model: nn.Module) -> None:
    """Frees the weights that a forward without a backward has left gathered, so that every
    parameter is a part again.
    """
    for unit in _fsdp_units(model):
        unit.reshard()


def _fsdp_units(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def loading_device(device: torch.device, part: Part | None, offload: str = "none") -> torch.device:
    """Where a model's weights are loaded: on the device of the run, or on the CPU. On the CPU if
    several processes share the model, since each unit's part is moved from there to the device, and
    if its blocks stay there (`model.offload`).
    """
    if part is None and offload == "none":
        return device
    return torch.device("cpu")


def _unwritten_tensor(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor whose memory the system gives page by page as it is written, and gets back when the
    tensor is freed. malloc would reuse blocks that were freed before, and keep them.
    """
    size = shape.numel() * dtype.itemsize
    if size:
        return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Part:
    """Process `rank` of `parts` that share each weight by rows.

    on_loaded  called once with the model as it was loaded, while every weight has all its rows
    """

    rank: int
    parts: int
    on_loaded: Callable[[nn.Module], None] = lambda model: None

    def cast_rows(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, in its whole shape, on the CPU. Only the rows of this process have
        values; vectors, which are small, have all.

        weight  any dtype [rows ...]
        ->      dtype     [rows ...]
        """
        if weight.dim() < 2:
            return weight.to(dtype)
        output = _unwritten_tensor(weight.shape, dtype)
        for output_rows, weight_rows in zip(
            output.chunk(self.parts)[self.rank :][:1], weight.chunk(self.parts)[self.rank :][:1]
        ):
            output_rows.copy_(weight_rows)
        return output

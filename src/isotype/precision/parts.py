"""Handles weights whose rows are divided over several processes. For a sharded tensor, it finds the
rows that this process holds. For a tensor that is not sharded yet, it finds the rows that this
process will keep.

FSDP2 gives each process some rows of every weight. These rows are called the local part of the
weight. If the model is not sharded, the local part is the whole tensor.

A model's weights come from files that are mapped into memory. A weight that keeps the dtype of the
file takes no memory until it is read. A cast would read the whole weight in every process. `Part`
casts only the rows of this process and writes them into a tensor with the shape of the whole
weight. The operating system allocates only the memory pages that are written. So this tensor takes
only as much memory as the rows of this process.
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
    """Whether this is a DTensor. A DTensor has the shape of the whole tensor, but this process
    holds only some of its rows.
    """
    return hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """Returns the rows that this process holds, as a view without an autograd graph. There may be
    no rows. An ordinary tensor is returned unchanged.
    """
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # a DTensor has it
    return part


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gathers the whole tensor in every process. All processes must call it. An ordinary tensor is
    returned unchanged.
    """
    if not is_sharded(tensor):
        return tensor
    full_tensor: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor has it
    return full_tensor


def local_rows(tensor: Tensor) -> range:
    """Returns the indices of the local rows in the first dimension of the whole tensor."""
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


def first_element_index(tensor: Tensor) -> int:
    """Returns the index of the local part's first element in the flattened whole tensor."""
    if is_sharded(tensor):
        return local_rows(tensor).start * (tensor.numel() // max(1, tensor.shape[0]))
    return 0


def gathered_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yields the gathered weights. While a unit of FSDP runs, FSDP replaces the local part of each
    weight by the gathered weight. FSDP uses the same tensor objects each time, and only allocates
    and frees their memory.
    """
    for unit in _fsdp_units(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            yield from (
                p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")
            )


def reshard_units(model: nn.Module) -> None:
    """Frees gathered weights, so that every parameter is its local part again. After a forward
    without a backward, the weights are still gathered.
    """
    for unit in _fsdp_units(model):
        unit.reshard()


def has_sharded_units(model: nn.Module) -> bool:
    """Whether FSDP gathers the weights of a model for each forward, and frees them after it."""
    return bool(_fsdp_units(model))


def _fsdp_units(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    # a model is sharded over the processes of a group
    if fsdp is None or not torch.distributed.is_initialized():
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def loading_device(device: torch.device, part: Part | None, offload: str = "none") -> torch.device:
    """Returns the device on which a model's weights are loaded. This is the CPU if the blocks stay
    on the CPU (`model.offload`). It is also the CPU if the model is sharded. In this case, each
    process later moves its part of the weights to the device. Otherwise it is the device of the
    run.
    """
    if part is None and offload == "none":
        return device
    return torch.device("cpu")


def _unwritten_tensor(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Creates a tensor whose memory the operating system allocates page by page when it is written.
    When the tensor is freed, its memory is returned to the system. `malloc` would keep it.
    """
    size = shape.numel() * dtype.itemsize
    if size:
        return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Part:
    """States which rows of each weight one process keeps, if a model is sharded over several
    processes.

    rank       the number of this process among the processes over which the model is sharded
    part_count  the number of these processes
    on_loaded  a function that is called once with the loaded model, while every weight still has
               all its rows
    """

    rank: int
    part_count: int
    on_loaded: Callable[[nn.Module], None] = lambda model: None

    def cast_rows(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Casts only the rows of the weight that this process keeps. The result is on the CPU and
        has the shape of the whole weight, but only the rows of this process contain values. Vectors
        are cast as a whole, because they are small.

        weight  any dtype [rows ...]
        ->      dtype     [rows ...]
        """
        if weight.dim() < 2:
            return weight.to(dtype)
        output = _unwritten_tensor(weight.shape, dtype)
        for output_rows, weight_rows in zip(
            output.chunk(self.part_count)[self.rank :][:1],
            weight.chunk(self.part_count)[self.rank :][:1],
        ):
            output_rows.copy_(weight_rows)
        return output

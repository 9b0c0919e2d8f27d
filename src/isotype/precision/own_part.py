"""The part of a distributed tensor that this process holds: FSDP2 gives each process some rows of every weight. Where each process holds
the whole model, the part is the whole tensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor: its shape is the whole tensor's, and this process holds some rows of it."""
    return hasattr(tensor, "placements")


def own_part(tensor: Tensor) -> Tensor:
    """The rows that this process holds: a view without a graph, possibly of no row. An ordinary tensor is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # a DTensor has it
    return part


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process: all of them call it. An ordinary tensor is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    whole: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor has it
    return whole


def own_rows(tensor: Tensor) -> range:
    """Their indices in the first dimension of the whole tensor."""
    if not is_sharded(tensor):
        return range(tensor.shape[0] if tensor.dim() else 0)
    sharded: Any = tensor
    (dim,) = (at for at, placement in enumerate(sharded.placements) if placement.is_shard(0))
    rows, processes, rank = tensor.shape[0], sharded.device_mesh.size(dim), sharded.device_mesh.get_local_rank(dim)
    most = math.ceil(rows / processes)
    return range(min(rows, rank * most), min(rows, (rank + 1) * most))


def first_element(tensor: Tensor) -> int:
    """Index of the part's first element in the whole tensor, flattened."""
    return own_rows(tensor).start * (tensor.numel() // max(1, tensor.shape[0])) if is_sharded(tensor) else 0


def gathered_weights(model: nn.Module) -> Iterator[Tensor]:
    """The tensor that FSDP puts in the place of a part while its unit runs: the same tensor each time, whose memory is allocated and
    freed."""
    for unit in _units(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            yield from (p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param"))


def settle(model: nn.Module) -> None:
    """Frees the weights that a forward without a backward has left gathered, so that every parameter is a part again."""
    for unit in _units(model):
        unit.reshard()


def _units(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]

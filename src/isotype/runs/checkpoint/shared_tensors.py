"""Prepares tensors that share memory for storage: a tensor with several names is stored once, other overlapping tensors are copied.

A safetensors file cannot contain shared memory. bitsandbytes gives the state of every weight the same table of 8-bit values, on a CPU in
the same memory; tied weights and buffers are other cases.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def stored_once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors on the CPU that share no memory, other name -> the name under which the same tensor is saved)."""
    saved: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(view, name) != name:
            same[name] = first[view]
            continue
        value = tensor.detach().contiguous().cpu()
        storage = value.untyped_storage().data_ptr()
        saved[name] = value.clone() if storage in memory else value
        if tensor.numel():
            memory.add(storage)
    return saved, same


def under_every_name(tensors: dict[str, Tensor], same: Mapping[str, str]) -> dict[str, Tensor]:
    """Undoes `stored_once`: the names of one tensor hold the same object again. Raises KeyError for a name without a tensor."""
    return tensors | {name: tensors[saved] for name, saved in same.items()}

"""Tensors and their memory: every tensor in nested values, the storage of one, and what it was computed from in an observed step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..dtypes import name

INPUT, WEIGHT, BUFFER, FLOAT_INPUT = 1, 2, 4, 8

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def float_word(dtype: torch.dtype) -> str | None:
    """The word of a floating dtype, or of the parts of a complex one; else None."""
    real = _REAL.get(dtype, dtype)
    return name(real) if real.is_floating_point else None


def plain_tensors(value: object, into: list[Tensor]) -> list[Tensor]:
    """Every tensor in arguments or results, however nested."""
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, list | tuple):
        for part in value:
            plain_tensors(part, into)
    elif isinstance(value, dict):
        for part in value.values():
            plain_tensors(part, into)
    return into


def floating_tensors(output: object) -> list[Tensor]:
    """Every floating tensor in what a module returned, however it is nested."""
    return [tensor for tensor in plain_tensors(output, []) if tensor.is_floating_point()]


def stored(tensor: Tensor) -> Tensor | None:
    """The tensor whose storage holds its values: itself, or the values of a sparse one. None for oneDNN's layout, which has no storage."""
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return None if tensor.is_mkldnn else tensor.values()


def is_wrapper(tensor: Tensor) -> bool:
    """Whether its class computes itself, with other tensors than its dtype says, as those of quantisation libraries do. PyTorch's own
    (sharded tensors, rows of several lengths) and Isotype's have the dtype that they say."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:
        return False
    own = getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    return own and not kind.__module__.startswith(("torch.", "isotype."))


def readable(tensor: Tensor) -> Tensor | None:
    """Its values as a dense tensor, to look at them. None for the meta device, rows of several lengths and oneDNN's layout."""
    values = stored(tensor)
    return None if values is None or values.is_nested or values.device.type == "meta" else values


def address(tensor: Tensor) -> int:
    """Of its storage; 0 where it has none."""
    try:
        values = stored(tensor)
        return 0 if values is None else int(values.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0  # a subclass that stands for something else has no storage


@dataclass(frozen=True, slots=True)
class Lineage:
    """What is known of a value.

    from_     what it was made of: bits
    added     how many narrow additions in Python code of backward it is the end of
    products  products outside `compute` that it depends on and whose use is not known yet
    """

    from_: int = 0
    added: int = 0
    products: frozenset[int] = frozenset()

    @property
    def activation(self) -> bool:
        """Whether it depends on both the model's inputs and its weights, as every hidden state does, or was given as floats."""
        return bool(self.from_ & FLOAT_INPUT) or (self.from_ & (INPUT | WEIGHT)) == INPUT | WEIGHT


NOTHING = Lineage()


def joined(parts: list[Lineage]) -> Lineage:
    """The lineage of a value that was computed from several others."""
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    from_ = 0
    for part in parts:
        from_ |= part.from_
    return Lineage(from_, max(part.added for part in parts), frozenset().union(*(part.products for part in parts)))


class Lineages:
    """Storage -> lineage.

    The record belongs to a storage, not to a tensor, so that views and in-place operators need no rules of their own. A weak reference
    keeps the storage's address from being reused, but not its memory from being freed.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, Lineage]] = {}

    def of(self, tensor: Tensor) -> Lineage | None:
        key = address(tensor)
        found = self._known.get(key) if key else None
        return found[1] if found else None

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether both tensors share one storage."""
        return bool(found := address(one)) and found == address(other)

    def set(self, tensor: Tensor, lineage: Lineage) -> None:
        key, values = address(tensor), stored(tensor)
        if not key or values is None:
            return
        found = self._known.get(key)
        self._known[key] = (found[0] if found else StorageWeakRef(values.untyped_storage()), lineage)

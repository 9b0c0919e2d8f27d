"""Records, during an observed step, what each value was computed from and which precision it lost.

The record belongs to a storage, not to a tensor, so that views and in-place operators need no rules of their own. A weak reference keeps
the storage's address from being reused, but not its memory from being freed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

INPUT, WEIGHT, BUFFER, STATE, GRADIENT, FLOAT_INPUT = 1, 2, 4, 8, 16, 32
MADE, KEPT = "made", "kept"  # kinds of marks of numbers


class Mark(NamedTuple):
    """A loss of precision: the narrow dtype, the operator, its module and its line.

    kind  rounded (a cast from a wider dtype), reduced (a sum), table (arithmetic on no activation),
          made (numbers that an operator writes), kept (numbers that were made before the step)
    """

    kind: str
    operator: str
    dtype: str
    module: str
    place: str
    anywhere: bool


@dataclass(frozen=True, slots=True)
class Lineage:
    """What is known of a value.

    from_     what it was made of: bits
    marks     what it lost
    written   whether an operator wrote it
    bits      floats seen as integers
    integers  floats cast to integers, or the bins of floats
    added     how many narrow additions in Python code of backward it is the end of
    products  products outside `compute` that it depends on and whose use is not known yet
    shift     the sum of the constants that were added to it
    """

    from_: int = 0
    marks: tuple[Mark, ...] = ()
    written: bool = True
    bits: bool = False
    integers: bool = False
    added: int = 0
    products: frozenset[int] = frozenset()
    shift: float = 0.0

    @property
    def activation(self) -> bool:
        """Whether it depends on both the model's inputs and its weights, as every hidden state does, or was given as floats."""
        return bool(self.from_ & FLOAT_INPUT) or (self.from_ & (INPUT | WEIGHT)) == INPUT | WEIGHT

    @property
    def data(self) -> bool:
        """Whether training depends on it, unlike a mask or a table of positions."""
        return self.activation or bool(self.from_ & (WEIGHT | STATE | GRADIENT))


NOTHING = Lineage()


def joined(parts: list[Lineage]) -> Lineage:
    """The lineage of a value that was computed from several others."""
    if not parts:
        return NOTHING
    if len(parts) == 1:
        return replace(parts[0], written=True)
    marks = tuple(dict.fromkeys(mark for part in parts for mark in part.marks))
    from_ = 0
    for part in parts:
        from_ |= part.from_
    return Lineage(
        from_,
        marks,
        True,
        any(p.bits for p in parts),
        any(p.integers for p in parts),
        max(p.added for p in parts),
        frozenset().union(*(p.products for p in parts)),
        max((p.shift for p in parts), key=abs),
    )


class Lineages:
    """Storage -> lineage."""

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


def stored(tensor: Tensor) -> Tensor | None:
    """The tensor whose storage holds its values: itself, or the values of a sparse one. None for oneDNN's layout, which has no storage."""
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return None if tensor.is_mkldnn else tensor.values()


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


def wide(dtype: torch.dtype) -> torch.dtype:
    """The real dtype of complex numbers, else the dtype itself."""
    return {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)

"""Adapters' matrices in the dtype of the products: cast at every use, or once for all micro-batches of a step.

A copy outlives its use only inside `copies_kept`, which ends before the optimizer writes the weights. Autograd does not see the cast: the
fused functions are given the matrices themselves, and return gradients in their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class _Copy:
    """A copy with what it was made of: held, so that no other tensor gets its id; a write in place raises its version."""

    __slots__ = ("copy", "of", "storages", "versions")

    def __init__(self, of: Sequence[Tensor], copy: Tensor) -> None:
        self.of, self.copy = tuple(of), copy
        self.versions, self.storages = _versions(of), _storages(of)

    def holds(self, of: Sequence[Tensor]) -> bool:
        return self.versions == _versions(of) and self.storages == _storages(of)


_kept: dict[tuple[object, ...], _Copy] | None = None


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [t._version for t in tensors]


def _storages(tensors: Sequence[Tensor]) -> list[int]:
    return [t.untyped_storage()._cdata for t in tensors]


@contextmanager
def copies_kept() -> Iterator[None]:
    """Within this block each matrix is cast down once, and its copy used again while the matrix is not written."""
    global _kept
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


def narrow(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """`matrix` in `dtype`; itself where that is its own."""
    # asked a dozen times a layer: without copies it is the cast alone
    return matrix.to(dtype) if _kept is None else stacked([matrix], dtype)


def stacked(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The matrices in `dtype`, one below the other."""
    kept = None if torch.compiler.is_compiling() else _kept
    if kept is None or (len(matrices) == 1 and matrices[0].dtype == dtype) or any(m.is_inference() for m in matrices):
        return _made(matrices, dtype)
    key = (dtype, *map(id, matrices))
    found = kept.get(key)
    if found is None or not found.holds(matrices):
        found = kept[key] = _Copy(matrices, _made(matrices, dtype))
    return found.copy


def _made(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    cast = [matrix.to(dtype) for matrix in matrices]
    return cast[0] if len(cast) == 1 else torch.cat(cast)

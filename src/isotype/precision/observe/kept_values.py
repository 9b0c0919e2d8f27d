"""Recognises buffers that hold values of the observed step, as a cache of keys and values does, and no table.

A table is made before the step and read in it, and a running mean is read before it is written. Such a buffer is written by the forward
with activations, and what is read of it was written in the same step, but for the empty rest that attention masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .lineage import Lineages, address
from .operators import EXACT, PRODUCT, Operator

# operators that write nothing but copies of their source, which is this argument
_COPIES = {"copy": 1, "index_put": 2, "_index_put_impl": 2, "index_copy": 3, "scatter": 3}
_FEW = 8


class KeptValues:
    """Of the buffers that are followed: which elements this step wrote, and whether others were read."""

    def __init__(self) -> None:
        self._written: dict[int, Tensor] = {}  # bool, flat, an element for each of the storage
        self._dtypes: dict[int, torch.dtype] = {}
        self._kept: set[int] = set()
        self._older: set[int] = set()

    def follow(self, buffer: Tensor) -> None:
        key = address(buffer) if type(buffer) is Tensor and buffer.layout is torch.strided else 0
        if key and key not in self._written:
            count = buffer.untyped_storage().nbytes() // buffer.itemsize
            self._written[key] = torch.zeros(count, dtype=torch.bool, device=buffer.device)
            self._dtypes[key] = buffer.dtype

    def holds_values(self, buffer: Tensor) -> bool:
        """Whether the step wrote activations into it, and read no table from it."""
        return address(buffer) in self._kept - self._older

    def see(self, op: Operator, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor], known: Lineages) -> None:
        """Looks at one operator, after it ran."""
        if not self._written:
            return
        into = self._copied_into(op, args, kwargs)
        for tensor in inputs:
            key = address(tensor)
            if key not in self._written or tensor is into or (op.kind == EXACT and any(known.same(tensor, made) for made in outputs)):
                continue
            if tensor.dtype != self._dtypes[key] or self._reads_older(op, tensor, self._elements(tensor)):
                self._older.add(key)
        if into is None or (key := address(into)) not in self._written:
            return
        source = known.of(args[_COPIES[op.name]])
        if into.dtype == self._dtypes[key] and source is not None and source.activation:
            true = torch.ones_like(args[_COPIES[op.name]], dtype=torch.bool)
            func(*(self._elements(into) if a is into else true if a is args[_COPIES[op.name]] else a for a in args), **kwargs)
            self._kept.add(key)

    def _copied_into(self, op: Operator, args: Any, kwargs: Any) -> Tensor | None:
        """The tensor into which this operator copies another one."""
        at = _COPIES.get(op.name)
        if at is None or at >= len(args) or not any(op.writes) or kwargs.get("accumulate") or "reduce" in kwargs:
            return None
        if len(args) > at + 1 and op.name != "copy" and args[at + 1]:
            return None  # accumulate
        return args[0] if isinstance(args[0], Tensor) and isinstance(args[at], Tensor) else None

    def _elements(self, tensor: Tensor) -> Tensor:
        return self._written[address(tensor)].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _reads_older(self, op: Operator, tensor: Tensor, written: Tensor) -> bool:
        """Whether it reads what this step did not write. A product may, where that has only a few values, as an empty cache has."""
        older = tensor.detach()[~written]
        return bool(older.numel()) and (op.kind != PRODUCT or int(older.float().unique().numel()) > _FEW)

"""Sums in low precision that grow over many steps, against the same sums in fp32.

A sum is whatever `add_` or `sub_` writes again and again with nothing else in between: `.grad` over micro-batches, gradient
buffers, totals of a metric. `updates` finds additions that are lost one by one; here each loses little and the sum much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ....dtypes import eps
from ....dtypes import name as dtype_name
from ....finding import Finding, listed
from ....observe.operators import LOW, Operator
from ....observe.origin import Site, here, place_of
from ..context import Context, Watcher, at, say

SAMPLE = 4_096  # elements of a sum that are followed in fp32
_ENOUGH = 8  # forwards a sum must span: within one forward it may be a residual stream, which is bf16 by design
_OFF = 5e-3  # relative error of a sum above which it is reported; one rounding to bf16 is 2e-3


@dataclass(slots=True)
class _Sum:
    storage: StorageWeakRef
    dtype: torch.dtype
    name: str
    site: Site | None
    gradient: bool
    fp32: torch.Tensor
    version: int
    inside: bool  # added to by a forward or a backward
    additions: int = 0
    forwards: set[int] = field(default_factory=set)
    last: int = 0
    off: float = 0.0
    after: int = 0  # additions when `off` was measured
    remainders: bool = False  # stores the rounding errors of additions to another tensor (Kahan)


class Sums(Watcher):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._told: dict[tuple[bool, Any], list[_Sum]] = {}

    def added(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
        """Before an in-place addition to a low-precision tensor that is no parameter, outside an optimizer's step."""
        target, other = args[0], args[1]
        if not isinstance(other, torch.Tensor) or isinstance(target, torch.nn.Parameter) or not target.numel():
            return
        storage = target.untyped_storage()
        key = (storage._cdata, target.storage_offset())
        known = self._sums.get(key)
        if known is None or known.storage.expired() or known.version != target._version or known.dtype != target.dtype:
            if known is not None:
                self._keep(known)
            known = self._sums[key] = self._begin(target, storage)
        elif known.additions >= _ENOUGH and known.additions & (known.additions - 1) == 0:
            self._measure(known, target)
        factor = (kwargs or {}).get("alpha", 1) * (-1 if op.name == "sub_" else 1)
        known.fp32.add_(_sample(other.detach().expand_as(target)).float(), alpha=factor)
        known.additions += 1
        known.version += 1
        known.last = self._context.forwards
        known.forwards.add(known.last)

    def compensates(self, tensor: torch.Tensor) -> None:
        """Marks a tensor that stores the rounding errors of additions to a weight: its own rounding is harmless."""
        known = self._sums.get((tensor.untyped_storage()._cdata, int(tensor.storage_offset())))
        if known is not None:
            known.remainders = True

    def grows(self) -> bool:
        """Whether the last forward or its backward added to a sum that earlier ones began."""
        before = self._context.forwards - 1
        return any(known.inside and known.last == before and len(known.forwards) > 1 for known in self._sums.values())

    def _begin(self, target: torch.Tensor, storage: Any) -> _Sum:
        node = torch._C._current_autograd_node()
        variable = getattr(node, "variable", None) if node is not None else None
        name = self._context.names.parameter_name(variable) if variable is not None else None
        return _Sum(
            StorageWeakRef(storage),
            target.dtype,
            name or f"of shape {tuple(target.shape)}",
            here(),
            variable is not None,
            _sample(target).float(),
            target._version,
            bool(self._context.stack) or node is not None,
        )

    @staticmethod
    def _measure(known: _Sum, target: torch.Tensor) -> None:
        size = float(known.fp32.norm())
        if size > 0 and torch.isfinite(known.fp32).all():
            known.off, known.after = float((_sample(target).float() - known.fp32).norm()) / size, known.additions

    def settled(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer's step: the gradients as they are used."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or gradient.dtype not in LOW:
                    continue
                known = self._sums.get((gradient.untyped_storage()._cdata, gradient.storage_offset()))
                if known is not None and known.version == gradient._version and known.additions >= _ENOUGH - 1:
                    self._measure(known, gradient)

    def _keep(self, known: _Sum) -> None:
        if known.off >= _OFF and not known.remainders and len(known.forwards) >= _ENOUGH - 1:
            kept = self._told.setdefault((known.gradient, None if known.gradient else known.site), [])
            if len(kept) < 64:
                kept.append(known)

    def forward_begins(self) -> None:
        for key in [key for key, known in self._sums.items() if known.storage.expired()]:
            self._keep(self._sums.pop(key))

    def findings(self) -> list[Finding]:
        for known in self._sums.values():
            self._keep(known)
        self._sums.clear()
        return [_of_sums(kept) for kept in self._told.values()]


def _of_sums(kept: list[_Sum]) -> Finding:
    worst = max(kept, key=lambda known: known.off)
    word, names = dtype_name(worst.dtype), list(dict.fromkeys(known.name for known in kept))
    return say(
        "TR024",
        place_of(worst.site, names[0] if worst.gradient else None),
        at("added at", worst.site),
        word=word,
        gradient=worst.gradient,
        off=100 * worst.off,
        after=worst.after,
        shown=listed(names, 4),
        unit=eps(word) / 2,
        sample=SAMPLE,
        tensors=len(names),
    )


def _sample(value: torch.Tensor) -> torch.Tensor:
    flat = value.detach().reshape(-1) if value.is_contiguous() else value.detach().flatten()
    return flat[:SAMPLE]

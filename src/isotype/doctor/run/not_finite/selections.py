"""Determines which NaN or inf stays in the result of an operator that selects values, such as
`torch.where`: that of an operand, or a constant that the operator writes.

`torch.where(x == 1, inf * sign, y)` discards `inf * 0`, which is then no cause of a NaN in its
result; `torch.where(gradient == 0, nan, y)` is the cause itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....observe.operators import Operator

_SELECTORS = frozenset(("where", "masked_fill", "index_fill", "index_put", "_index_put_impl"))


@dataclass(frozen=True, slots=True)
class Selected:
    """An operand of an operator that selects values, or its number.

    stays       whether NaN or inf of the operand stays in the result
    constant    the NaN or inf that each value of the operand is, as "NaN"; "" if it has others.
                -inf is usual in masks, and is not named
    is_scalar   whether the operand is a number or has no dimension
    count       how many values of the result it gives
    condition   whether the mask of the operator is True at these values; None if it has indices that
                are no mask
    """

    value: Any
    stays: bool
    constant: str
    is_scalar: bool
    count: int
    condition: bool | None


@torch.no_grad()
def read_selection(op: Operator, args: tuple) -> list[Selected]:
    """Must be called before the operator runs, because it may overwrite its inputs. Returns the
    operand that is taken where the mask is True, and the other one. Returns nothing if the operator
    does not select values.
    """
    if op.base_name not in _SELECTORS or len(args) < 3:
        return []
    if op.base_name == "index_fill":
        kept, dim, indices, written = args[:4]
        mask = torch.zeros_like(kept, dtype=torch.bool).index_fill(dim, indices, True)
        return [_select(written, mask, condition=None), _select(kept, ~mask, condition=False)]
    if op.base_name == "where":
        mask, written, kept = args[:3]
    elif op.base_name == "masked_fill":
        kept, mask, written = args[:3]
    else:
        adds_values = len(args) > 3 and args[3]
        if adds_values:
            return []
        kept, indices, written = args[:3]
        mask = _mark_indices(kept, indices)
        is_mask = all(index is None or index.dtype == torch.bool for index in indices)
        condition = True if is_mask else None
        return [_read_values(written, mask, condition), _select(kept, ~mask, condition=False)]
    mask = mask.bool().expand(_broadcast_shape(mask, written, kept))
    return [_select(written, mask, condition=True), _select(kept, ~mask, condition=False)]


def _broadcast_shape(*values: Any) -> torch.Size:
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    return torch.Size(torch.broadcast_shapes(*shapes))


def _mark_indices(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Returns the mask of the values of a tensor that `index_put` overwrites."""
    mask = torch.zeros_like(tensor, dtype=torch.bool)
    one = torch.ones((), dtype=torch.bool, device=tensor.device)
    marked: Tensor = torch.ops.aten.index_put(mask, indices, one)
    return marked


def _select(value: Any, mask: Tensor, *, condition: bool | None) -> Selected:
    tensor = torch.as_tensor(value, device=mask.device)
    stays = bool((mask & ~tensor.isfinite()).any())
    is_scalar = tensor.dim() == 0
    return Selected(value, stays, _read_constant(tensor), is_scalar, int(mask.sum()), condition)


def _read_values(tensor: Tensor, mask: Tensor, condition: bool | None) -> Selected:
    """Returns the operand that `index_put` writes. Its shape is that of the indices."""
    count = int(mask.sum())
    stays = count > 0 and not bool(tensor.isfinite().all())
    return Selected(tensor, stays, _read_constant(tensor), tensor.numel() == 1, count, condition)


def _read_constant(tensor: Tensor) -> str:
    if bool(tensor.isnan().all()):
        return "NaN"
    return "inf" if bool((tensor == float("inf")).all()) else ""

"""AC025: an output wider than everything that was given, because forward mixes in a table made without a dtype.

An explicit cast (`.float()` before a loss, a router in fp32) is intended and not reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...dtypes import name
from ...finding import Place, Severity
from .attempt import Outcome, attempt
from .fault import Fault, fault
from .locate import _floats, _users_line
from .numerics import Numerics
from .settings import Setting


class _Promotions(TorchDispatchMode):
    """Follows what was made from nothing, and where such a tensor widens another one."""

    def __init__(self) -> None:
        super().__init__()
        self.widened: list[tuple[Tensor, Place | None]] = []
        self.casts = False  # whether a tensor of the caller's was widened by a cast
        self._made: list[Tensor] = []  # kept, so that none takes another's place

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, dict(kwargs or {}))) if isinstance(x, Tensor)]
        given, made = _floats((args, dict(kwargs or {}))), _floats(result)
        if not tensors or all(self._is_made(t) for t in tensors):
            self._made += [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]
            return result
        wide = [t for t in made if any(t.dtype.itemsize > g.dtype.itemsize for g in given)]
        if wide:
            if func._schema.name.endswith("::_to_copy"):
                self.casts = True
            elif any(g.dtype == wide[0].dtype and g.dim() and self._is_made(g) for g in given):
                self.widened.append((wide[0], _users_line()))
        return result

    def _is_made(self, tensor: Tensor) -> bool:
        return any(tensor is known for known in self._made)


def promoted_outputs(numerics: Numerics, setting: Setting, outcome: Outcome) -> list[Fault]:
    """Checks a setting in which all inputs have one low dtype, without autocast."""
    subject, sample = numerics.subject, numerics.sample
    given = sample.met(setting.by_group)
    low = setting.lowest(sample)
    dims = max((sample.tensor(s).dim() for s in sample.slots), default=0)
    if not any(t.dtype not in given and t.dtype.itemsize > low.itemsize and t.dim() >= dims for t in outcome.values):
        return []
    seen = _Promotions()
    if not attempt(subject, sample, setting, around=lambda: seen, forward_only=True).ran or seen.casts or not seen.widened:
        return []
    wide, place = seen.widened[0]
    if place is None:
        return []
    word, narrow = name(str(wide.dtype)), name(str(low))
    return [
        fault(
            "AC025",
            f"{subject.label} returns {word} for {narrow} inputs: a table made in forward promotes them",
            place,
            f"everything given is {narrow}; a tensor made without dtype= is {word}, and arithmetic with it is {word} from here on: twice "
            "the memory, and the first matrix product that cannot mix dtypes raises",
            "cast the table where it is used (`table.to(x.dtype)`), after it was computed in fp32",
            Severity.WARNING,
            observed=setting.describe(),
        )
    ]

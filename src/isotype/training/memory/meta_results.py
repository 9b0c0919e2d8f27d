"""Runs operators on meta tensors, and computes the layout of equal results only once.

PyTorch computes the shapes of many operators in Python. The plan of a step of FLUX.1-dev calls
75,000 operators, of which 8,000 are matrix products that take 0.5 ms each. The 57 blocks of this
model have only two different forms, so that most calls have the arguments of an earlier call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
# the kinds of calls whose result is not a new tensor
_RETURNS_FIRST_ARGUMENT = "first argument"
_ALWAYS_RUNS = "always runs"


class MetaResults:
    """Runs operators on meta tensors. An operator is not run again if it was called before with
    tensors of the same layouts and with the same other arguments. If the earlier result was a new
    tensor, the result is a new meta tensor with the same layout. If the operator changed its first
    argument in place, the result is this argument.

    An operator always runs if it returns a view, several tensors, or a tensor on another device.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Layout | str] = {}

    def compute(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns `function(*args, **kwargs)`."""
        call = (function, _describe(args), tuple(kwargs), _describe(tuple(kwargs.values())))
        earlier_result = self._results.get(call)
        if earlier_result is None:
            result = function(*args, **kwargs)
            self._results[call] = _classify_result(result, args, kwargs)
            return result
        if isinstance(earlier_result, tuple):
            shape, stride, dtype = earlier_result
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if earlier_result == _RETURNS_FIRST_ARGUMENT:
            return args[0]
        return function(*args, **kwargs)


class ReuseMetaResults(TorchDispatchMode):
    """Within this block, all operators run with `MetaResults`."""

    def __init__(self) -> None:
        super().__init__()
        self._results = MetaResults()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._results.compute(function, args, kwargs or {})


def _describe(value: Any) -> Hashable:
    """Describes an argument. Calls whose arguments have equal descriptions give results with equal
    layouts.
    """
    kind = type(value)
    if kind is Tensor or isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.device)
    if kind in (list, tuple):
        return tuple([_describe(item) for item in value])
    # 1, 1.0 and True are equal, but may give results of different dtypes
    return (kind, value)


def _classify_result(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Layout | str:
    """Returns the layout of a result that is one new tensor. For any other result, returns the kind
    of the call.
    """
    if not isinstance(result, Tensor) or result.device.type != "meta":
        return _ALWAYS_RUNS
    if args and result is args[0]:
        return _RETURNS_FIRST_ARGUMENT
    layout = (result.shape, result.stride(), result.dtype)
    copy = torch.empty_strided(*layout[:2], dtype=result.dtype, device="meta")
    storage = result.untyped_storage()
    argument_storages = [
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
    ]
    is_new = type(result) is Tensor and storage._cdata not in argument_storages
    if is_new and storage.nbytes() == copy.untyped_storage().nbytes():
        return layout
    return _ALWAYS_RUNS

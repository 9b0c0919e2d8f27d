"""Computes each operator of a step a second time, in fp32.

For each tensor that is narrower than fp32, or was computed from such a tensor, the module stores a
second tensor, which is called the shadow. The shadow has the values that the same operators compute
in fp32. All other tensors need no shadow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from ....observe.operators import NARROW_FLOATS, Operator

# operators with an argument that says that their input is narrow
_WIDENING = ("_softmax", "_log_softmax")

Value = TypeVar("Value")


class TensorTable(Generic[Value]):
    """Maps tensors to values. Autograd saves the result of an operator such as softmax as a new
    tensor with the same memory: such a tensor has the value of the result.
    """

    def __init__(self) -> None:
        self._by_tensor = WeakTensorKeyDictionary()
        self._by_memory: dict[tuple, tuple[StorageWeakRef, Value]] = {}
        self._limit = 1024  # entries before those of freed memory are removed

    def __contains__(self, tensor: Tensor) -> bool:
        return self.get(tensor) is not None

    def __setitem__(self, tensor: Tensor, value: Value) -> None:
        self._by_tensor[tensor] = value
        if tensor.layout != torch.strided:
            return
        # the address of a storage is not used again while a weak reference to it exists
        self._by_memory[_memory_key(tensor)] = (StorageWeakRef(tensor.untyped_storage()), value)
        if len(self._by_memory) > self._limit:
            alive = {key: pair for key, pair in self._by_memory.items() if not pair[0].expired()}
            self._by_memory = alive
            self._limit = 2 * len(alive) + 1024

    def get(self, tensor: Tensor) -> Value | None:
        value: Value | None = self._by_tensor.get(tensor)
        if value is not None or tensor.layout != torch.strided:
            return value
        reference, value = self._by_memory.get(_memory_key(tensor), (None, None))
        return None if reference is None or reference.expired() else value


def _memory_key(tensor: Tensor) -> tuple:
    place = (tensor.untyped_storage()._cdata, tensor.storage_offset())
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())


class Shadows:
    """Stores the fp32 copies ("shadows") of the tensors of one run."""

    def __init__(self) -> None:
        self._shadows: TensorTable[Tensor] = TensorTable()

    def get(self, tensor: Tensor) -> Tensor:
        """Returns the fp32 copy ("shadow") of a low-precision tensor. If the tensor has no such
        copy yet, its values are converted to fp32.
        """
        shadow = self._shadows.get(tensor)
        if shadow is not None:
            return shadow
        return tensor.float() if tensor.dtype in NARROW_FLOATS else tensor

    def prepare(self, op: Operator, args: tuple, kwargs: dict) -> Callable[[Any], None] | None:
        """Must be called before the operator runs, because the operator may overwrite its inputs.
        Returns a function that stores the shadow of the result. The caller must call this function
        with the result of the operator. Returns None if the result needs no shadow.
        """
        tensors = _collect_tensors((args, kwargs))
        has_shadow = any(t in self._shadows or t.dtype in NARROW_FLOATS for t in tensors)
        if not has_shadow and not _names_narrow_dtype((args, kwargs)):
            return None
        if torch.Tag.nondeterministic_seeded in getattr(op.func, "tags", ()):
            return self._store_result
        shadow_args, shadow_kwargs = self._convert(op, args, kwargs)

        def finish(result: Any) -> None:
            try:
                with torch.no_grad():
                    shadow_result = op.func(*shadow_args, **shadow_kwargs)
            except (RuntimeError, NotImplementedError):
                self._store_result(result)  # a kernel that has no fp32 form
                return
            self._store(result, shadow_result)

        return finish

    def _convert(self, op: Operator, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        writes = iter(op.is_written)

        def convert(value: Any, *, is_written: bool = False) -> Any:
            if isinstance(value, Tensor):
                shadow = self.get(value)
                if is_written and value not in self._shadows:
                    shadow = shadow.clone() if shadow is value else shadow
                    self._shadows[value] = shadow
                return shadow
            if isinstance(value, torch.dtype) and value in NARROW_FLOATS:
                return torch.float32
            if isinstance(value, (list, tuple)):
                return type(value)(convert(item, is_written=is_written) for item in value)
            return value

        converted = [convert(value, is_written=next(writes, False)) for value in args]
        if op.base_name in _WIDENING and len(converted) > 2:
            converted[2] = False
        names = {name: convert(value, is_written=name == "out") for name, value in kwargs.items()}
        return tuple(converted), names

    def _store(self, result: Any, shadow_result: Any) -> None:
        if isinstance(result, Tensor):
            if result.is_floating_point() and isinstance(shadow_result, Tensor):
                self._shadows[result] = shadow_result
        elif isinstance(result, (list, tuple)):
            for item, shadow in zip(result, shadow_result):
                self._store(item, shadow)

    def _store_result(self, result: Any) -> None:
        """Converts the results of the run itself to fp32 and stores them as the shadows of these
        tensors.
        """
        for tensor in _collect_tensors(result):
            if tensor.dtype in NARROW_FLOATS:
                self._shadows[tensor] = tensor.float()


def _collect_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _collect_tensors(item)]
    return []


def _names_narrow_dtype(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(_names_narrow_dtype(item) for item in value)
    return isinstance(value, torch.dtype) and value in NARROW_FLOATS

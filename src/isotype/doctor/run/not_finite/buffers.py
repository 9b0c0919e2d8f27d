"""Notes which buffers the program writes, such as the running statistics of a BatchNorm.

A batch with NaN, or a variance that fp16 cannot hold, makes such a statistic NaN or inf for good,
also if the program leaves the step out. In training mode the layer does not read its statistics, so
the loss stays finite, and only the evaluation is wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .step import all_finite


@dataclass(slots=True, eq=False)
class Buffer:
    """A buffer of a model.

    module   the module that has the buffer under the name `key`
    name     its path in the model
    version  the buffers of the module and their numbers of writes when they were last checked
    """

    module: weakref.ref[nn.Module]
    key: str
    name: str
    version: tuple[int, ...]

    @property
    def tensor(self) -> Tensor | None:
        module = self.module()
        return None if module is None else module._buffers.get(self.key)

    @property
    def is_bad(self) -> bool:
        """True if the buffer contains NaN or inf. `-inf` is usual in masks."""
        tensor = self.tensor
        return tensor is not None and bool((tensor.isnan() | (tensor == float("inf"))).any())


class BufferRecord:
    """Stores when the buffers of models were last written."""

    def __init__(self) -> None:
        self._buffers: weakref.WeakKeyDictionary[nn.Module, list[Buffer]]
        self._buffers = weakref.WeakKeyDictionary()

    def add(self, model: nn.Module) -> None:
        """Must be called before the first call of the model, which may write its buffers."""
        if model not in self._buffers:
            self._buffers[model] = list(_iterate_buffers(model))

    def list_written(self) -> list[Buffer]:
        """Lists the buffers that were written since the last call of `check`."""
        written: list[Buffer] = []
        previous: nn.Module | None = None
        version: tuple[int, ...] = ()
        for buffer in (buffer for buffers in self._buffers.values() for buffer in buffers):
            module = buffer.module()
            if module is None:
                continue
            if module is not previous:
                previous, version = module, _read_version(module)
            if version != buffer.version:
                written.append(buffer)
        return written

    def check(self, written: list[Buffer]) -> Buffer | None:
        """Returns the first buffer with NaN or inf among those that were written."""
        if not written:
            return None
        tensors = [buffer.tensor for buffer in written]
        if not all_finite(tensor for tensor in tensors if tensor is not None):
            bad = next((buffer for buffer in written if buffer.is_bad), None)
            if bad is not None:
                return bad
        for buffer in written:
            module = buffer.module()
            if module is not None:
                buffer.version = _read_version(module)
        return None


def _iterate_buffers(model: nn.Module) -> Iterator[Buffer]:
    for path, module in model.named_modules():
        version = _read_version(module)
        for key, tensor in module._buffers.items():
            if tensor is not None and tensor.is_floating_point():
                name = f"{path}.{key}" if path else key
                yield Buffer(weakref.ref(module), key, name, version)


def _read_version(module: nn.Module) -> tuple[int, ...]:
    """Returns the buffers of a module, and how often they were written. A BatchNorm writes its
    statistics without a change of their version, and counts the batches in another buffer.
    """
    numbers: list[int] = []
    for tensor in module._buffers.values():
        if tensor is not None:
            # a tensor that was made in inference mode has no version
            numbers += (id(tensor), 0 if torch.is_inference(tensor) else tensor._version)
    return tuple(numbers)

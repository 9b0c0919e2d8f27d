"""Accumulates gradients in buffers that are wider than the weights.

DDP, FSDP2, deepcopy and torch's own AdamW lose `param.grad_dtype`, so the sum is stored outside `.grad`: a hook adds each gradient to
its buffer and then frees it. Processes that train together sum theirs once per step, between `begin_sums` and `finish_sums`, without a
wrapper around the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ..dtypes import to_torch
from .bucket_sums import BucketSums, Processes
from .parts import local_part


class Summed(Protocol):
    """Where gradients come from that are summed over the processes in every backward: each process holds its rows of a weight."""

    def take(self, parameter: nn.Parameter) -> Tensor:
        """The gradient that has just arrived, in the dtype of the sum: the own rows."""

    def sent(self) -> list[torch.dtype]:
        """The dtypes of what was summed since the last call."""


def _dense(gradient: Tensor) -> Tensor:
    """Of an embedding with `sparse=True`, whose gradient has the rows that were looked up: neither clipping nor AdamW takes it."""
    return gradient.to_dense() if gradient.is_sparse else gradient


class GradientAccumulator:
    """Holds the gradient of every trainable parameter in `dtype`; of a sharded one, this process's rows.

    Parameters that already have `dtype` keep their gradient in `.grad`; the others get a buffer, allocated with their first gradient.

    dtype      the dtype of the sum over micro-batches, `precision.grads`
    reduce     the dtype of the sum across ranks, `precision.reduce`
    summed     of a sharded model, where its gradients arrive
    processes  of a replicated model, those that sum their gradients
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, dtype: str = "fp32", reduce: str = "fp32", summed: Summed | None = None,
                 processes: Processes | None = None) -> None:  # fmt: skip
        self.summed = summed
        self.parameters = [p for p in parameters if p.requires_grad]
        self.dtype, self.reduce_dtype = to_torch(dtype), to_torch(reduce)
        self.sent: list[torch.dtype] = []  # of each bucket that the last step summed across processes, for whoever observes
        self._buffers: dict[int, Tensor] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for p in self.parameters if p.dtype != self.dtype]
        self._sums: BucketSums | None = None
        if processes is not None and processes.size > 1:
            self._sums = BucketSums(self.parameters, self, processes, self.reduce_dtype)
            # after `_take`: hooks run in the order in which they were registered
            self._hooks += [p.register_post_accumulate_grad_hook(self._sums.arrived) for p in self.parameters]

    def _take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "the hook runs after the gradient was accumulated"
        gradient = _dense(parameter.grad) if self.summed is None else self.summed.take(parameter)
        buffer = self._buffers.get(id(parameter))
        if buffer is None:
            self._buffers[id(parameter)] = gradient.to(self.dtype)
        else:
            buffer += gradient  # mixed-dtype add: computed in the buffer's dtype
        parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The accumulated gradient in `dtype`, of a sharded parameter its own rows, or None where backward did not reach."""
        if parameter.dtype != self.dtype:
            return self._buffers.get(id(parameter))
        if parameter.grad is None:
            return None
        parameter.grad = _dense(parameter.grad)
        return local_part(parameter.grad)

    def gradients(self) -> list[Tensor]:
        return [g for p in self.parameters if (g := self.gradient(p)) is not None]

    def reached(self) -> list[bool]:
        """Whether each parameter has a gradient."""
        return [self.gradient(p) is not None for p in self.parameters]

    def begin_sums(self) -> None:
        """Before the last backward of a step: its gradients are sent to the other processes while it computes."""
        if self._sums is not None:
            self._sums.begin()

    def finish_sums(self) -> None:
        """Waits until every gradient is the sum over all processes, in the declared reduce dtype. One that is in no process is zero."""
        self.sent = [] if self._sums is None else self._sums.finish()

    def drop_unreached(self, reached: Sequence[bool]) -> None:
        """Frees the gradient of each parameter that is not reached, so that the optimizer does not touch it."""
        for parameter, is_reached in zip(self.parameters, reached):
            if not is_reached:
                self._buffers.pop(id(parameter), None)
                parameter.grad = None

    def gradient_or_zeros(self, parameter: nn.Parameter) -> Tensor:
        """The accumulated gradient, which is made where backward did not reach."""
        gradient = self.gradient(parameter)
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=self.dtype)
            self._store(parameter, gradient)
        return gradient

    def _store(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter.dtype == self.dtype:
            parameter.grad = gradient
        else:
            self._buffers[id(parameter)] = gradient

    def zero(self) -> None:
        """Frees every gradient until the next backward."""
        if self._sums is not None:
            self._sums.forget()
        self._buffers.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """Removes the hooks. Later gradients stay in `.grad`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._buffers.clear()

"""Accumulates gradients in buffers that are wider than the weights.

DDP, FSDP2, deepcopy and torch's own AdamW lose `param.grad_dtype`, so the sum is stored outside `.grad`: a hook adds each gradient to
its buffer and then frees it. Processes that train together sum theirs with `reduce()`,
once per step, without a wrapper around the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ..dtypes import to_torch
from .own_part import own_part

BUCKET = 25 << 20  # bytes of gradients that are sent at a time; torch's DDP has the same


class Processes(Protocol):
    """What `reduce` needs of the processes that train together."""

    size: int

    def add_up(self, tensor: Tensor) -> None:
        """Sums a tensor over all of them, in place."""


class Summed(Protocol):
    """Where gradients come from that are summed over the processes in every backward: each process holds its rows of a weight."""

    def take(self, parameter: nn.Parameter) -> Tensor:
        """The gradient that has just arrived, in the dtype of the sum: the own rows."""

    def sent(self) -> list[torch.dtype]:
        """The dtypes of what was summed since the last call."""


class GradientAccumulator:
    """Holds the gradient of every trainable parameter in `dtype`; of a sharded one, this process's rows.

    Parameters that already have `dtype` keep their gradient in `.grad`; the others get a buffer, allocated with their first gradient.

    dtype   the dtype of the sum over micro-batches, `precision.grads`
    reduce  the dtype of the sum across ranks, `precision.reduce`
    summed  of a sharded model, where its gradients arrive
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, dtype: str = "fp32", reduce: str = "fp32", summed: Summed | None = None
    ) -> None:
        self.summed = summed
        self.parameters = [p for p in parameters if p.requires_grad]
        self.dtype, self.reduce_dtype = to_torch(dtype), to_torch(reduce)
        self.sent: list[torch.dtype] = []  # of each bucket that the last `reduce` summed across processes, for whoever observes
        self._buffers: dict[int, Tensor] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for p in self.parameters if p.dtype != self.dtype]

    def _take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "the hook runs after the gradient was accumulated"
        gradient = parameter.grad if self.summed is None else self.summed.take(parameter)
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
        return None if parameter.grad is None else own_part(parameter.grad)

    def gradients(self) -> list[Tensor]:
        return [g for p in self.parameters if (g := self.gradient(p)) is not None]

    def reached(self) -> list[bool]:
        """Whether each parameter has a gradient."""
        return [self.gradient(p) is not None for p in self.parameters]

    def reduce(self, processes: Processes, reached: Sequence[bool]) -> None:
        """Sums the gradients over all processes, in buckets, in the declared reduce dtype.

        reached  of each parameter, whether it has a gradient in any process: one that has none there adds zeros
        """
        self.sent = []
        if processes.size == 1:
            return
        for bucket in self._neighbours([p for p, any_has in zip(self.parameters, reached) if any_has]):
            gradients = [self._gradient_or_zeros(p) for p in bucket]
            flat = torch.cat([g.flatten().to(self.reduce_dtype) for g in gradients])
            processes.add_up(flat)
            self.sent.append(flat.dtype)
            for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients])):
                gradient.copy_(summed.view_as(gradient))

    def _neighbours(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Neighbours of one device, together at most BUCKET bytes, or a single one."""
        bucket: list[nn.Parameter] = []
        size = 0
        for p in parameters:
            bytes_ = p.numel() * self.reduce_dtype.itemsize
            if bucket and (size + bytes_ > BUCKET or p.device != bucket[0].device):
                yield bucket
                bucket, size = [], 0
            bucket.append(p)
            size += bytes_
        if bucket:
            yield bucket

    def _gradient_or_zeros(self, parameter: nn.Parameter) -> Tensor:
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
        self._buffers.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """Removes the hooks. Later gradients stay in `.grad`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._buffers.clear()

"""Accumulates gradients in buffers that are wider than the weights.

DDP, FSDP2, deepcopy and torch's own AdamW lose `param.grad_dtype`, so the sum is stored outside `.grad`: a hook adds each gradient to
its buffer and then frees it. Under DDP run every micro-batch in `no_sync()` and call `reduce()` once per step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..dtypes import to_torch


class GradientAccumulator:
    """Holds the gradient of every trainable parameter in `dtype`.

    Parameters that already have `dtype` keep their gradient in `.grad`; the others get a buffer, allocated with their first gradient.

    dtype   the dtype of the sum over micro-batches, `precision.grads`
    reduce  the dtype of the sum across ranks, `precision.reduce`
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, dtype: str = "fp32", reduce: str = "fp32") -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.dtype, self.reduce_dtype = to_torch(dtype), to_torch(reduce)
        self._buffers: dict[int, Tensor] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for p in self.parameters if p.dtype != self.dtype]

    def _take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "the hook runs after the gradient was accumulated"
        buffer = self._buffers.get(id(parameter))
        if buffer is None:
            self._buffers[id(parameter)] = parameter.grad.to(self.dtype)
        else:
            buffer += parameter.grad  # mixed-dtype add: computed in the buffer's dtype
        parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The accumulated gradient in `dtype`, or None where backward did not reach."""
        return parameter.grad if parameter.dtype == self.dtype else self._buffers.get(id(parameter))

    def gradients(self) -> list[Tensor]:
        return [g for p in self.parameters if (g := self.gradient(p)) is not None]

    def reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Sums every gradient across ranks in the declared reduce dtype; call it once per step. A rank without a gradient adds zeros."""
        if not dist.is_initialized() or dist.get_world_size(group) == 1:
            return
        for parameter in self.parameters:
            gradient = self.gradient(parameter)
            if gradient is None:
                gradient = torch.zeros_like(parameter, dtype=self.dtype)
                self._store(parameter, gradient)
            sent = gradient.to(self.reduce_dtype)
            dist.all_reduce(sent, group=group)
            if sent is not gradient:
                gradient.copy_(sent)

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

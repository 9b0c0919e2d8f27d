"""Accumulates gradients in buffers that are wider than the weights.

DDP, FSDP2, deepcopy and torch's own AdamW do not keep `param.grad_dtype`. So the sum is not stored
in `.grad`. A hook adds each gradient to its buffer and then frees the gradient. Processes that
train together sum their gradients once per step, between `begin_sums` and `finish_sums`. The model
needs no wrapper (such as DDP) for this.

Gradients are summed over processes in buckets. A bucket can be sent while backward still computes
the gradients of other buckets. A bucket is sent as soon as all its gradients are computed and all
previous buckets are sent. So all processes send the same buckets in the same order, whichever
gradient is computed first. The sums are bit-identical, whether or not buckets are sent during
backward. In the first step, the buckets are sent only after the backward, and the step checks that
each gradient is computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ..dtypes import to_torch
from ..errors import RunError
from .parts import local_part

BUCKET_BYTES = 25 << 20  # largest number of bytes of gradients per bucket, as in torch's DDP
# largest number of buckets that are sent and not received yet; the sums need memory for these
# buckets in addition to the gradients
MAX_IN_FLIGHT = 4


class Processes(Protocol):
    """The processes that train together."""

    size: int

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Starts to sum a tensor over all processes in place. Returns a function that waits until
        the sum is complete.
        """


class BucketSums:
    """Sums the gradients of each step over the processes.

    If a parameter has no gradient in this process, the process adds zeros, and gets the sum of the
    other processes.

    dtype  the dtype of the sums
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: GradientAccumulator,
        processes: Processes,
        dtype: torch.dtype,
    ) -> None:
        self._gradients = gradients
        self._processes = processes
        self._dtype = dtype
        # backward computes the gradients of the last parameters first
        self._buckets = list(split_buckets(list(reversed(parameters)), dtype))
        self._bucket_of = {
            id(p): number for number, bucket in enumerate(self._buckets) for p in bucket
        }
        # ids of the parameters whose gradients the last backward of a step has computed; None while
        # that backward does not run
        self._arrived: set[int] | None = None
        self._missing_counts: list[int] = []  # how many gradients of each bucket have not arrived
        # whether buckets are sent during backward; None until the first step has ended. They are
        # not sent then if a layer runs a backward of its own, which may compute a gradient in
        # several parts
        self._sends_early: bool | None = None
        self._arrives_in_parts = False
        self._sent_count = 0
        self._sent_dtypes: list[torch.dtype] = []
        self._in_flight: deque[tuple[list[nn.Parameter], Tensor, Callable[[], None]]] = deque()

    def begin(self) -> None:
        """Call this before the last backward of a step. Each gradient is then complete as soon as
        this backward has computed it.
        """
        self._arrived = set()
        self._missing_counts = [len(bucket) for bucket in self._buckets]

    def mark_arrived(self, parameter: nn.Parameter) -> None:
        """Records that backward has computed this parameter's gradient, and sends each complete
        bucket of gradients to the other processes.

        Raises  RunError if a gradient is computed again after it was sent
        """
        if self._arrived is None:
            return
        number = self._bucket_of[id(parameter)]
        if id(parameter) in self._arrived:
            if number < self._sent_count:
                raise RunError(
                    f"backward made the gradient of a weight with shape {list(parameter.shape)} in"
                    " two parts, unlike in the first step, and the first part was already summed"
                    " over the processes",
                    fix="parallel.kind: shard, or one process",
                )
            self._arrives_in_parts = True
            return
        self._arrived.add(id(parameter))
        self._missing_counts[number] -= 1
        while (
            self._sends_early
            and self._sent_count < len(self._buckets)
            and self._missing_counts[self._sent_count] == 0
        ):
            self._send()

    def finish(self) -> list[torch.dtype]:
        """Sends the remaining buckets to the other processes and waits until all gradients are
        summed. Returns the dtype in which each bucket was sent.
        """
        if self._arrived is not None and self._sends_early is None:
            self._sends_early = not self._arrives_in_parts
        while self._sent_count < len(self._buckets):
            self._send()
        while self._in_flight:
            self._receive()
        sent = self._sent_dtypes
        self.reset()
        return sent

    def reset(self) -> None:
        """Ends a step, whether or not all its sums are complete."""
        self._arrived = None
        self._sent_count = 0
        self._sent_dtypes = []
        self._in_flight.clear()

    def _send(self) -> None:
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._receive()
        bucket = self._buckets[self._sent_count]
        self._sent_count += 1
        flat_gradients = [self._flat_gradient(p) for p in bucket]
        # a gradient that fills a bucket alone is not copied if it already has this dtype
        flat = flat_gradients[0] if len(flat_gradients) == 1 else torch.cat(flat_gradients)
        self._sent_dtypes.append(flat.dtype)
        self._in_flight.append((bucket, flat, self._processes.begin_sum(flat)))

    def _flat_gradient(self, parameter: nn.Parameter) -> Tensor:
        gradient = self._gradients.gradient(parameter)
        if gradient is None:
            return torch.zeros(parameter.numel(), dtype=self._dtype, device=parameter.device)
        return gradient.detach().flatten().to(self._dtype)

    def _receive(self) -> None:
        bucket, flat, wait = self._in_flight.popleft()
        wait()
        for parameter, summed in zip(bucket, flat.split([p.numel() for p in bucket])):
            gradient = self._gradients.gradient_or_zeros(parameter)
            if gradient.data_ptr() != summed.data_ptr():
                gradient.copy_(summed.view_as(gradient))


def split_buckets(
    parameters: Sequence[nn.Parameter], dtype: torch.dtype
) -> Iterator[list[nn.Parameter]]:
    """Splits parameters into buckets. The parameters of a bucket are consecutive and on the same
    device. A bucket has at most `BUCKET_BYTES` in `dtype`, or consists of a single larger
    parameter.
    """
    bucket: list[nn.Parameter] = []
    size = 0
    for p in parameters:
        parameter_bytes = p.numel() * dtype.itemsize
        if bucket and (size + parameter_bytes > BUCKET_BYTES or p.device != bucket[0].device):
            yield bucket
            bucket = []
            size = 0
        bucket.append(p)
        size += parameter_bytes
    if bucket:
        yield bucket


class ShardedGradients(Protocol):
    """Provides the gradients of a sharded model, in which each process holds some rows of each
    weight. These gradients are summed over the processes in every backward.
    """

    def take(self, parameter: nn.Parameter) -> Tensor:
        """Returns the gradient that was just computed, in the dtype of the sum. It has only the
        rows of this process.
        """

    def sent_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes of the gradients that were summed since the last call."""


def _dense(gradient: Tensor) -> Tensor:
    """Converts a sparse gradient to a dense tensor. For example, an embedding with `sparse=True`
    has sparse gradients. Neither gradient clipping nor AdamW accepts sparse gradients.
    """
    return gradient.to_dense() if gradient.is_sparse else gradient


class GradientAccumulator:
    """Holds the gradient of every trainable parameter in `dtype`. For a sharded parameter, it holds
    only the rows of this process.

    A parameter that already has this dtype keeps its gradient in `.grad`. Any other parameter gets
    a buffer, which is allocated when its first gradient is computed.

    dtype      the dtype of the sum over micro-batches, `precision.grads`
    reduce     the dtype of the sum across ranks, `precision.reduce`
    sharded_gradients  the source of the summed gradients of a sharded model
    processes  the processes that sum the gradients of a replicated model
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        dtype: str = "fp32",
        reduce: str = "fp32",
        sharded_gradients: ShardedGradients | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.sharded_gradients = sharded_gradients
        self.parameters = [p for p in parameters if p.requires_grad]
        self.dtype = to_torch(dtype)
        self.reduce_dtype = to_torch(reduce)
        # the dtypes of the buckets of the last step's sum across processes, which the observer
        # reads
        self.sent_dtypes: list[torch.dtype] = []
        self._buffers: dict[int, Tensor] = {}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._accumulate)
            for p in self.parameters
            if p.dtype != self.dtype
        ]
        self._sums: BucketSums | None = None
        if processes is not None and processes.size > 1:
            self._sums = BucketSums(self.parameters, self, processes, self.reduce_dtype)
            # after `_take`: hooks run in the order in which they were registered
            self._hooks += [
                p.register_post_accumulate_grad_hook(self._sums.mark_arrived)
                for p in self.parameters
            ]

    def _accumulate(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "the hook runs after the gradient was accumulated"
        if self.sharded_gradients is None:
            gradient = _dense(parameter.grad)
        else:
            gradient = self.sharded_gradients.take(parameter)
        buffer = self._buffers.get(id(parameter))
        if buffer is None:
            self._buffers[id(parameter)] = gradient.to(self.dtype)
        else:
            buffer += gradient  # mixed-dtype add: computed in the buffer's dtype
        parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the accumulated gradient in `dtype`, or None if backward did not reach the
        parameter. For a sharded parameter, it has only the rows of this process.
        """
        if parameter.dtype != self.dtype:
            return self._buffers.get(id(parameter))
        if parameter.grad is None:
            return None
        parameter.grad = _dense(parameter.grad)
        if self.sharded_gradients is None:
            return parameter.grad
        return local_part(parameter.grad)

    def gradients(self) -> list[Tensor]:
        return [g for p in self.parameters if (g := self.gradient(p)) is not None]

    def reached(self) -> list[bool]:
        """For each parameter, returns whether it has a gradient."""
        return [self.gradient(p) is not None for p in self.parameters]

    def begin_sums(self) -> None:
        """Call this before the last backward of a step. The gradients are then sent to the other
        processes during this backward.
        """
        if self._sums is not None:
            self._sums.begin()

    def finish_sums(self) -> None:
        """Waits until every gradient is the sum over all processes, in the declared dtype for this
        sum. If no process has a gradient for a parameter, its gradient becomes zero.
        """
        self.sent_dtypes = [] if self._sums is None else self._sums.finish()

    def drop_unreached(self, reached: Sequence[bool]) -> None:
        """Frees the gradient of each parameter that is not marked as reached, so that the optimizer
        does not update it.
        """
        for parameter, is_reached in zip(self.parameters, reached):
            if not is_reached:
                self._buffers.pop(id(parameter), None)
                parameter.grad = None

    def gradient_or_zeros(self, parameter: nn.Parameter) -> Tensor:
        """Returns the accumulated gradient. If backward did not reach the parameter, creates a
        gradient of zeros.
        """
        gradient = self.gradient(parameter)
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=self.dtype)
            if parameter.dtype == self.dtype:
                parameter.grad = gradient
            else:
                self._buffers[id(parameter)] = gradient
        return gradient

    def zero(self) -> None:
        """Frees every gradient until the next backward."""
        if self._sums is not None:
            self._sums.reset()
        self._buffers.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """Removes the hooks. Later gradients stay in `.grad`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._buffers.clear()

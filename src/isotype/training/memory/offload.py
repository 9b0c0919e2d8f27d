"""Moves the tensors that recomputed layers save to host memory, and copies them back when they are
needed.

Each call of a layer saves the layer's input. If `train.keep_attention` is set, it also saves the
output of attention. The copies run at the same time as forward and backward.

In forward, a separate CUDA stream copies the tensors into pinned host memory. The tensors of the
last two calls stay on the device until their copies are done. The compute stream waits for these
copies, but the host does not. So the memory of a tensor is not used again before its copy is
complete, even if the host has already started later operators.

In backward, while one call is recomputed, the tensors of the previous call are copied back.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._prims_common
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...ops.library import library_op
from .checkpointed_call import call_and_recompute

CALLS_ON_DEVICE = 2  # layers whose activations stay on the device
MIN_OFFLOADED_BYTES = 1 << 14  # a smaller tensor is not offloaded, since it is not worth a copy


@library_op("host_copy(Tensor x) -> ()", fake=lambda x: None)
def _planned_copy(x: Tensor) -> None:
    """In a memory plan, this operator replaces a copy of `x` between the host and a device. Because
    it is an operator, code that records the operators of a step also records this copy.
    """


class StreamCopier:
    """Copies on a separate CUDA stream per device. Each copy begins after the work that is already
    in the device's compute stream.
    """

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def __call__(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Begins the copy between the host and a device. Returns an event that marks the end of the
        copy. The device's compute stream can wait for this event.
        """
        device = target.device if target.is_cuda else source.device
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source.detach(), non_blocking=True)
            return CopyEvent(stream.record_event(), device)


class CopyEvent:
    """An event that marks the end of a copy. Its method `wait` makes the current stream of the
    tensor's device wait. The `wait` of torch's event uses the stream of the current device, which
    may be another device.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self.device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class SavedCall:
    """The tensors that one call of a layer saved, in order. The tensors are stored as weak
    references, because the autograd graph owns them. `previous` is the call before this one.
    """

    def __init__(self, previous: SavedCall | None) -> None:
        self.tensors: list[weakref.ref[HostTensor]] = []
        self._previous = weakref.ref(previous) if previous is not None else None

    @property
    def previous(self) -> SavedCall | None:
        return self._previous() if self._previous is not None else None

    def alive_tensors(self) -> list[HostTensor]:
        return [tensor for ref in self.tensors if (tensor := ref()) is not None]


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides for a copy of a tensor that has no gaps in memory. If the tensor itself
    has no gaps, the copy has the same strides. Otherwise the copy is contiguous.
    """
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != step:
            return torch._prims_common.make_contiguous_strides_for(tensor.shape)
        step *= size
    return tensor.stride()


class HostTensor:
    """One tensor in host memory. It stores the dtype, the shape and the order in memory that the
    tensor must have when it is copied back.
    """

    def __init__(self, tensor: Tensor, call: SavedCall) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.device = tensor.device
        # a transposed tensor keeps its order, so that the operator that reads it needs no other
        # copy
        self.strides = dense_strides(tensor)
        # a memory plan counts only bytes of the device, so its host tensors are empty
        is_planned = tensor.is_meta or isinstance(tensor, FakeTensor)
        if is_planned:
            self.host_tensor = torch.empty(0, dtype=tensor.dtype)
        else:
            self.host_tensor = torch.empty_strided(
                self.shape, self.strides, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        # detached, because a tensor with an autograd graph would keep more than itself alive
        self.on_device: Tensor | None = tensor.detach()
        self.pending_copy: Any = None
        self.is_consumed = False
        self.call = call
        call.tensors.append(weakref.ref(self))

    def __del__(self) -> None:
        if self.on_device is not None and self.pending_copy is not None:
            # the copy may still be writing to memory that the next tensor would get
            self.pending_copy.wait()


class HostMemory:
    """A function that transformers' layers can use for gradient checkpointing. It moves the tensors
    that the layers save for backward to host memory. Tensors that are not on a CUDA device are
    copied synchronously.

    call        a function that runs a layer with gradient checkpointing
    start_copy  a function that begins a copy. It returns an object whose method `wait()` makes
                later work wait for the copy. By default it is a StreamCopier, which is created for
                the first CUDA tensor
    """

    def __init__(
        self,
        start_copy: Callable[[Tensor, Tensor], Any] | None = None,
        *,
        call: Callable[..., Any] | None = None,
    ) -> None:
        self.pending_calls: deque[list[HostTensor]] = deque()
        self.current_call: SavedCall | None = None
        self.call = call or partial(call_and_recompute, keep_attention=False)
        self.start_copy = start_copy

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.current_call = SavedCall(self.current_call)
        self.pending_calls.append([])
        # checkpointing saves the layer's inputs before it installs its own hooks, so that these
        # hooks receive the inputs and nothing else
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return self.call(function, *args, offload=self.pack, restore=self.unpack, **options)

    def __deepcopy__(self, memo: Any) -> HostMemory:
        return HostMemory(call=self.call)

    def pack(self, tensor: Tensor) -> Tensor | HostTensor:
        if (
            tensor.numel() * tensor.element_size() < MIN_OFFLOADED_BYTES
            or not tensor.is_floating_point()
        ):
            return tensor
        if self.current_call is None:
            self.current_call = SavedCall(None)
            self.pending_calls.append([])
        saved = HostTensor(tensor, self.current_call)
        self._copy(saved, saved.host_tensor, tensor)
        self.pending_calls[-1].append(saved)
        while len(self.pending_calls) > CALLS_ON_DEVICE:
            for oldest in self.pending_calls.popleft():
                if oldest.pending_copy is not None:
                    oldest.pending_copy.wait()
                oldest.on_device = None
        return saved

    def unpack(self, packed: Tensor | HostTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._fetch(packed)
        for saved in packed.call.alive_tensors():
            if not saved.is_consumed:
                self._fetch(saved)
        tensor = packed.on_device
        packed.on_device = None
        packed.is_consumed = True
        assert tensor is not None
        if packed.pending_copy is not None:
            packed.pending_copy.wait()
        previous = packed.call.previous
        for saved in previous.alive_tensors() if previous is not None else ():
            if not saved.is_consumed:
                self._fetch(saved)
        assert (tensor.dtype, tensor.shape) == (
            packed.dtype,
            packed.shape,
        ), f"{packed.dtype} went to host memory, {tensor.dtype} came back"
        return tensor

    def _fetch(self, saved: HostTensor) -> None:
        if saved.on_device is None:
            assert saved.host_tensor.dtype == saved.dtype, (
                f"{saved.dtype} went to host memory, {saved.host_tensor.dtype} lies there"
            )
            # allocated on the compute stream, which frees it too; the copy waits for the memory's
            # last user
            saved.on_device = torch.empty_strided(
                saved.shape, saved.strides, dtype=saved.dtype, device=saved.device
            )
            self._copy(saved, saved.on_device, saved.host_tensor)

    def _copy(self, saved: HostTensor, target: Tensor, source: Tensor) -> None:
        if any(t.is_meta or isinstance(t, FakeTensor) for t in (target, source)):
            if saved.on_device is not None and saved.on_device.is_meta:
                _planned_copy(saved.on_device)
            return
        if self.start_copy is None and saved.device.type == "cuda":
            self.start_copy = StreamCopier()
        if self.start_copy is None:
            target.copy_(source)
        else:
            saved.pending_copy = self.start_copy(target, source)

"""Moves the inputs of recomputed layers to host memory, copying them while forward runs, and back while backward runs, two at a time.

To the host: a separate CUDA stream copies into pinned memory. The last two inputs stay on the device until their copies are done. The
compute stream, not the host, waits for the second last copy, so that memory is freed in stream order even if the host runs ahead.
To the device: while one layer is recomputed, the input of the layer before it is copied.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .layer_call import call_and_recompute

BUFFERS = 2
SMALLEST = 1 << 14  # bytes: below, a copy's own cost is more than what it frees


class Streamed:
    """Copies on a separate CUDA stream per device. Each copy begins after the work that the device's compute stream has at that time."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def __call__(self, to: Tensor, source: Tensor) -> Copied:
        """Begins the copy between the host and a device, and returns its end, for which the device's compute stream can wait."""
        device = to.device if to.is_cuda else source.device
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            to.copy_(source.detach(), non_blocking=True)
            return Copied(stream.record_event(), device)


class Copied:
    """The end of a copy. An event's own `wait` acts on the stream of the current device, which may not be the tensor's device."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self.device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class Away:
    """One input in host memory, with the dtype and shape that it must have when it is copied back."""

    def __init__(self, tensor: Tensor, before: Away | None) -> None:
        self.dtype, self.shape, self.device = tensor.dtype, tensor.shape, tensor.device
        # a memory plan counts the device's bytes: its host tensors take none, despite their shape
        planned = tensor.is_meta or isinstance(tensor, FakeTensor)
        self.host = torch.empty(0 if planned else tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda and not planned)
        self.here: Tensor | None = tensor.detach()  # the graph would hold what it needs anyway, and more
        self.copied: Any = None
        self.spent = False
        # the input that backward will need after this one; a weak reference, since the graph of a step owns it
        self.before = weakref.ref(before) if before is not None else None

    def __del__(self) -> None:
        if self.here is not None and self.copied is not None:
            # a copy may still be writing what the next tensor would get
            self.copied.wait()


class HostMemory:
    """A gradient checkpointing function for transformers' layers. Without a CUDA device it copies synchronously.

    call    runs a layer under checkpointing
    copies  begins a copy and returns an object whose `wait()` makes later work wait for it; created for the first CUDA tensor
    """

    def __init__(self, copies: Callable[[Tensor, Tensor], Any] | None = None, *, call: Callable[..., Any] | None = None) -> None:
        self.leaving: deque[Away] = deque()
        self.call = call or partial(call_and_recompute, keep_attention=False)
        self.copies = copies

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        # torch's checkpoint saves the layer's inputs outside its own hooks, so that these hooks get the inputs only
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return self.call(function, *args, put=self.pack, get=self.unpack)

    def __deepcopy__(self, memo: Any) -> HostMemory:
        return HostMemory(call=self.call)

    def pack(self, tensor: Tensor) -> Tensor | Away:
        if tensor.numel() * tensor.element_size() < SMALLEST or not tensor.is_floating_point():
            return tensor
        away = Away(tensor, self.leaving[-1] if self.leaving else None)
        self._copy(away, away.host, tensor)
        self.leaving.append(away)
        while len(self.leaving) > BUFFERS:
            oldest = self.leaving.popleft()
            if oldest.copied is not None:
                oldest.copied.wait()
            oldest.here = None
        return away

    def unpack(self, packed: Tensor | Away) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._fetch(packed)
        tensor, packed.here, packed.spent = packed.here, None, True
        assert tensor is not None
        if packed.copied is not None:
            packed.copied.wait()
        before = packed.before() if packed.before is not None else None
        if before is not None and not before.spent:
            self._fetch(before)
        assert (tensor.dtype, tensor.shape) == (packed.dtype, packed.shape), f"{packed.dtype} went to host memory, {tensor.dtype} came back"
        return tensor

    def _fetch(self, away: Away) -> None:
        if away.here is None:
            assert away.host.dtype == away.dtype, f"{away.dtype} went to host memory, {away.host.dtype} lies there"
            # allocated on the compute stream, which frees it too; the copy waits for whoever had the memory before
            away.here = torch.empty(away.shape, dtype=away.dtype, device=away.device)
            self._copy(away, away.here, away.host)

    def _copy(self, away: Away, to: Tensor, source: Tensor) -> None:
        if any(t.is_meta or isinstance(t, FakeTensor) for t in (to, source)):
            return
        if self.copies is None and away.device.type == "cuda":
            self.copies = Streamed()
        if self.copies is None:
            to.copy_(source)
        else:
            away.copied = self.copies(to, source)

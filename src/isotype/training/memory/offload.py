"""Moves what recomputed layers keep to host memory and back, two calls at a time.

A call keeps its input, and attention's output where that is kept. Copies run while forward and
backward run. To the host: a separate CUDA stream copies into pinned memory. What the last two calls
keep stays on the device until their copies are done. The compute stream, not the host, waits for
those copies, so that memory is freed in stream order even if the host runs ahead. To the device:
while one call is recomputed, what the call before it has kept is copied.
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
from .run_again import call_and_recompute

BUFFERS = 2
SMALLEST = 1 << 14  # bytes: below, a copy's own cost is more than what it frees


@library_op("host_copy(Tensor x) -> ()", fake=lambda x: None)
def _planned_copy(x: Tensor) -> None:
    """Stands in a plan for a copy of `x` between the host and a device, so that who records the
    step sees it.
    """


class Streamed:
    """Copies on a separate CUDA stream per device. Each copy begins after the work that the
    device's compute stream has at that time.
    """

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def __call__(self, to: Tensor, source: Tensor) -> Copied:
        """Begins the copy between the host and a device, and returns its end, for which the
        device's compute stream can wait.
        """
        device = to.device if to.is_cuda else source.device
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            to.copy_(source.detach(), non_blocking=True)
            return Copied(stream.record_event(), device)


class Copied:
    """The end of a copy. An event's own `wait` acts on the stream of the current device, which may
    not be the tensor's device.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self.device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class Kept:
    """What one call keeps, in the order in which it was put away; weak, since a step's graph owns
    its own. `before`: the call before it.
    """

    def __init__(self, before: Kept | None) -> None:
        self.tensors: list[weakref.ref[Away]] = []
        self._before = weakref.ref(before) if before is not None else None

    @property
    def before(self) -> Kept | None:
        return self._before() if self._before is not None else None

    def alive(self) -> list[Away]:
        return [away for ref in self.tensors if (away := ref()) is not None]


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Of a copy that takes no more memory than its elements: the tensor's own, where it takes no
    more, else contiguous.
    """
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != step:
            return torch._prims_common.make_contiguous_strides_for(tensor.shape)
        step *= size
    return tensor.stride()


class Away:
    """One tensor in host memory, with the dtype, shape and order in memory that it must have when
    it is copied back.
    """

    def __init__(self, tensor: Tensor, call: Kept) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.device = tensor.device
        # a transposed tensor's order is kept: a reader needs no copy either
        self.strides = strides_of(tensor)
        # a memory plan counts the device's bytes: its host tensors have none, whatever their shape
        # says
        planned = tensor.is_meta or isinstance(tensor, FakeTensor)
        if planned:
            self.host = torch.empty(0, dtype=tensor.dtype)
        else:
            self.host = torch.empty_strided(
                self.shape, self.strides, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        # the graph would hold what it needs anyway, and more
        self.here: Tensor | None = tensor.detach()
        self.copied: Any = None
        self.spent = False
        self.call = call
        call.tensors.append(weakref.ref(self))

    def __del__(self) -> None:
        if self.here is not None and self.copied is not None:
            # a copy may still be writing what the next tensor would get
            self.copied.wait()


class HostMemory:
    """A gradient checkpointing function for transformers' layers. Without a CUDA device it copies
    synchronously.

    call    runs a layer under checkpointing
    copies  begins a copy and returns an object whose `wait()` makes later work wait for it; created
            for the first CUDA tensor
    """

    def __init__(
        self,
        copies: Callable[[Tensor, Tensor], Any] | None = None,
        *,
        call: Callable[..., Any] | None = None,
    ) -> None:
        self.leaving: deque[list[Away]] = deque()
        self.kept: Kept | None = None
        self.call = call or partial(call_and_recompute, keep_attention=False)
        self.copies = copies

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.kept = Kept(self.kept)
        self.leaving.append([])
        # the layer's inputs are saved outside its own hooks: these see them and nothing else
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return self.call(function, *args, put=self.pack, get=self.unpack, **options)

    def __deepcopy__(self, memo: Any) -> HostMemory:
        return HostMemory(call=self.call)

    def pack(self, tensor: Tensor) -> Tensor | Away:
        if tensor.numel() * tensor.element_size() < SMALLEST or not tensor.is_floating_point():
            return tensor
        if self.kept is None:
            self.kept = Kept(None)
            self.leaving.append([])
        away = Away(tensor, self.kept)
        self._copy(away, away.host, tensor)
        self.leaving[-1].append(away)
        while len(self.leaving) > BUFFERS:
            for oldest in self.leaving.popleft():
                if oldest.copied is not None:
                    oldest.copied.wait()
                oldest.here = None
        return away

    def unpack(self, packed: Tensor | Away) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._fetch(packed)
        for other in packed.call.alive():
            if not other.spent:
                self._fetch(other)
        tensor = packed.here
        packed.here = None
        packed.spent = True
        assert tensor is not None
        if packed.copied is not None:
            packed.copied.wait()
        before = packed.call.before
        for other in before.alive() if before is not None else ():
            if not other.spent:
                self._fetch(other)
        assert (tensor.dtype, tensor.shape) == (
            packed.dtype,
            packed.shape,
        ), f"{packed.dtype} went to host memory, {tensor.dtype} came back"
        return tensor

    def _fetch(self, away: Away) -> None:
        if away.here is None:
            assert away.host.dtype == away.dtype, (
                f"{away.dtype} went to host memory, {away.host.dtype} lies there"
            )
            # allocated on the compute stream, which frees it too; the copy waits for the memory's
            # last user
            away.here = torch.empty_strided(
                away.shape, away.strides, dtype=away.dtype, device=away.device
            )
            self._copy(away, away.here, away.host)

    def _copy(self, away: Away, to: Tensor, source: Tensor) -> None:
        if any(t.is_meta or isinstance(t, FakeTensor) for t in (to, source)):
            if away.here is not None and away.here.is_meta:
                _planned_copy(away.here)
            return
        if self.copies is None and away.device.type == "cuda":
            self.copies = Streamed()
        if self.copies is None:
            to.copy_(source)
        else:
            away.copied = self.copies(to, source)

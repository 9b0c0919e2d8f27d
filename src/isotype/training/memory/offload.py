"""Checkpointed layers whose inputs wait in host memory: copied out beside forward, and back beside backward, two at a time.

Out: a copy stream of its own writes into pinned memory. The last two inputs stay on the device until their copies are done, and the
compute stream, not the host, waits for the second last one: memory is freed in stream order, however far the host runs ahead.
Back: while one layer recomputes, the input of the layer before it is on its way.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

BUFFERS = 2
SMALLEST = 1 << 14  # bytes: below, a copy's own cost is more than what it frees


class Streamed:
    """Copies on a CUDA stream of their own, each begun after what the compute stream has been given so far."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def __call__(self, to: Tensor, source: Tensor) -> Any:
        """Begins the copy and gives its event, for which the compute stream can be made to wait."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source.detach(), non_blocking=True)
            return self.stream.record_event()


class Away:
    """One input in host memory; dtype and shape are what it had and must have again."""

    def __init__(self, tensor: Tensor, before: Away | None) -> None:
        self.dtype, self.shape, self.device = tensor.dtype, tensor.shape, tensor.device
        # a memory plan counts the device's bytes: its host tensors have none
        host = "meta" if isinstance(tensor, FakeTensor) else "cpu"
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, device=host, pin_memory=tensor.is_cuda and host == "cpu")
        self.here: Tensor | None = tensor.detach()  # the graph would hold what it needs anyway, and more
        self.copied: Any = None
        self.spent = False
        # the input that backward will want after this one; weak, since a step's graph owns its own
        self.before = weakref.ref(before) if before is not None else None

    def __del__(self) -> None:
        if self.here is not None and self.copied is not None:
            # a copy may still be writing what the next tensor would get
            self.copied.wait()


class HostMemory:
    """A checkpoint function for transformers' layers. Without a CUDA device the copies are plain ones, on the spot.

    copies  begins a copy and gives something whose `wait()` makes later work wait for it; made for the first CUDA tensor
    """

    def __init__(self, copies: Callable[[Tensor, Tensor], Any] | None = None) -> None:
        self.leaving: deque[Away] = deque()
        self.copies = copies

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        # checkpoint saves the layer's inputs outside its own hooks: these see them and nothing else
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return checkpoint(function, *args, use_reentrant=False)

    def __deepcopy__(self, memo: Any) -> HostMemory:
        return HostMemory()

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
        if isinstance(source, FakeTensor):
            return
        if self.copies is None and away.device.type == "cuda":
            self.copies = Streamed(away.device)
        if self.copies is None:
            to.copy_(source)
        else:
            away.copied = self.copies(to, source)

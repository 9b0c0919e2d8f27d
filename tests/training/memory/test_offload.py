"""Inputs in host memory: what leaves, what stays, and that what comes back is what left.

On a CPU the copies are made on the spot. What a GPU's stream may do to them, `Late` does: a copy is
made when somebody waits for it and not before, what it writes is not a number until then, and
memory it reads may not have been given back.
"""

from __future__ import annotations

import gc
import weakref

import torch
from tests.api import CALLS_ON_DEVICE, HostMemory
from torch import Tensor, nn


def chain(memory, x, layers):
    for layer in layers:
        x = memory(layer, x)
    return x


def made(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(count)]


class Copy:
    """One copy on its way; its `wait` is an event's."""

    def __init__(self, stream: Late, to: Tensor, source: Tensor) -> None:
        self.stream, self.to, self.done = stream, to, False
        # what it holds now; the tensor's own storage says when its memory is given back
        self.source = source.detach().clone()
        weakref.finalize(source.untyped_storage(), self.source_freed)

    def source_freed(self) -> None:
        if not self.done:
            self.stream.too_early += 1

    def wait(self) -> None:
        # a stream keeps its order
        while not self.done:
            first = self.stream.queue.pop(0)
            first.done = True
            first.to.data.copy_(first.source)
            first.to = first.source = None


class Late:
    """A copy stream that begins nothing until it has to. `moved`: bytes; `here`, `most`: bytes of
    targets now, and at most.
    """

    def __init__(self) -> None:
        self.queue: list[Copy] = []
        self.too_early = self.begun = self.moved = self.here = self.most = 0

    def __call__(self, to: Tensor, source: Tensor) -> Copy:
        to.view(torch.uint8).fill_(255)  # in bf16 and fp32 not a number
        self.moved += to.nbytes
        self.here += to.nbytes
        self.most = max(self.most, self.here)
        weakref.finalize(to.untyped_storage(), self.target_freed, to.nbytes)
        self.queue.append(Copy(self, to, source))
        self.begun += 1
        return self.queue[-1]

    def target_freed(self, size: int) -> None:
        self.here -= size


def gradients_with(memory):
    layers, leaf = made(6), torch.linspace(-1, 1, 64 * 128).view(64, 128).requires_grad_()
    y = chain(memory, leaf, layers)
    y.square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for layer in layers for p in layer.parameters())]


def test_copies_that_are_made_as_late_as_a_stream_may():
    late = Late()
    found = gradients_with(HostMemory(late))
    assert all(
        torch.equal(a, b)
        for a, b in zip(found, gradients_with(lambda layer, x: layer(x)), strict=True)
    )
    gc.collect()
    assert late.too_early == 0
    # six inputs go out; the last two are still here in backward, the other four come back
    assert late.begun == 6 + (6 - CALLS_ON_DEVICE)

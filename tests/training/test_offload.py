"""Inputs in host memory: what leaves, what stays, and that what comes back is what left. On a CPU the copies are made on the spot."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from isotype.training.offload import BUFFERS, Away, HostMemory


def chain(memory, x, layers):
    for layer in layers:
        x = memory(layer, x)
    return x


def made(count=5, *, dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(128, 128), nn.Tanh()).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_without_it(dtype):
    layers, x = made(dtype=dtype), torch.randn(64, 128, dtype=dtype)
    results = []
    for way in (HostMemory(), lambda layer, value: layer(value)):
        leaf = x.clone().requires_grad_()
        y = chain(way, leaf, layers)
        y.float().square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for layer in layers for p in layer.parameters())])
        for layer in layers:
            layer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_two_inputs_stay_and_the_others_leave():
    memory, kept = HostMemory(), []
    original = HostMemory.pack

    def watched(tensor):
        packed = original(memory, tensor)
        if isinstance(packed, Away):
            kept.append(packed)
        return packed

    memory.pack = watched
    y = chain(memory, torch.randn(64, 128, requires_grad=True), made())
    assert [away.here is not None for away in kept] == [False] * (5 - BUFFERS) + [True] * BUFFERS
    y.sum().backward()
    assert all(away.spent and away.here is None for away in kept)


def test_nothing_is_held_after_the_step():
    memory = HostMemory()
    y = chain(memory, torch.randn(64, 128, requires_grad=True), made())
    first = weakref.ref(next(iter(memory.leaving)).before())
    y.sum().backward()
    del y
    gc.collect()
    assert first() is None
    assert len(memory.leaving) <= BUFFERS


def test_small_and_integer_tensors_stay():
    memory = HostMemory()
    small, ids = torch.randn(4), torch.zeros(1 << 16, dtype=torch.long)
    assert memory.pack(small) is small
    assert memory.pack(ids) is ids


def test_another_dtype_on_the_way_back_is_an_error():
    memory = HostMemory()
    away = memory.pack(torch.randn(1 << 14, dtype=torch.bfloat16))
    away.here, away.host = None, away.host.float()
    with pytest.raises(AssertionError, match=r"bfloat16 went to host memory, torch\.float32 lies there"):
        memory.unpack(away)


def test_a_second_backward_reads_host_memory_again():
    memory = HostMemory()
    x = torch.randn(64, 128, requires_grad=True)
    y = chain(memory, x, made()).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * once)

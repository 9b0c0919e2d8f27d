"""A layer that runs again in backward: as torch.utils.checkpoint, bit for bit, with the same
tensors kept.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.api import run_again_in_backward
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint

WAYS = {
    "here": run_again_in_backward,
    "torch": partial(checkpoint, use_reentrant=False),
    "not recomputed": lambda layer, *args: layer(*args),
}


class Layer(nn.Module):
    """Random, with tensors by position and by name, and a tuple for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, scale, *, mask=None):
        y = self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.3) * scale)
        return x + (y if mask is None else y * mask), y.mean()


def trained(way, *, autocast=None, twice=False):
    """Results, gradients, what hooks around the layers see saved, and the next random number."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(3))
    x, scale, mask = torch.randn(8, 32), torch.randn(8, 64, requires_grad=True), torch.randn(8, 32)
    seen = []
    with (
        saved_tensors_hooks(lambda t: seen.append(t.nbytes) or t, lambda t: t),
        torch.autocast("cpu", autocast, enabled=autocast is not None),
    ):
        means = []
        for layer in layers:
            x, mean = WAYS[way](partial(layer, mask=mask), x, scale)
            means.append(mean)
    loss = x.float().square().sum() + sum(means)
    if twice:
        loss.backward(retain_graph=True)
    loss.backward()
    return [x.detach(), scale.grad, *(p.grad for p in layers.parameters()), torch.rand(1)], seen


def test_bits_are_those_of_torch_and_of_no_recomputation(subtests):
    for options in ({}, {"autocast": torch.bfloat16}, {"twice": True}):
        with subtests.test(**options):
            (here, kept), (there, kept_there), (plain, kept_plain) = (
                trained(way, **options) for way in WAYS
            )
            assert all(torch.equal(a, b) for a, b in zip(here, plain, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
            assert sum(kept) == sum(kept_there) < sum(kept_plain) / 2


def test_calls_inside_each_other():
    layer, x = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
        torch.randn(4, 8),
    )
    gradients = []
    for way in WAYS:
        inner = partial(WAYS[way], layer)
        WAYS[way](lambda value: inner(inner(value)) * 2, x).sum().backward()  # noqa: B023  # called in this round
        gradients.append([p.grad for p in layer.parameters()])
        layer.zero_grad()
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


def test_what_nobody_reads_is_not_computed_again():
    ends = []

    def layer(x):
        y = x.tanh()
        ends.append("the end")
        return y + 1

    x = torch.randn(4, requires_grad=True)
    run_again_in_backward(layer, x).sum().backward()
    assert ends == ["the end"]
    assert x.grad is not None


def test_an_input_that_was_overwritten_is_an_error():
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    y = run_again_in_backward(layer, x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_second_run_that_does_something_else_is_an_error():
    for second, message in (
        (torch.float64, "float64 on cpu where it saved"),
        (None, "0 tensors where it saved 1"),
    ):
        dtypes = [torch.float32, second]

        def layer(x, dtypes=dtypes):
            dtype = dtypes.pop(0)
            return x.to(dtype).tanh() if dtype is not None else x

        y = run_again_in_backward(layer, torch.randn(4, requires_grad=True))
        with pytest.raises(CheckpointError, match=message):
            y.sum().backward()

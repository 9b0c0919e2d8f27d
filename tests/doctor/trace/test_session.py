"""`with trace(model)`: the exception survives, nothing is left behind, memory does not grow, numbers do not change."""

from __future__ import annotations

import gc
import resource

import pytest
import torch
import torch.nn as nn

from isotype.doctor.trace import trace
from isotype.doctor.trace.origin import Origin

bf16 = torch.bfloat16


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(dtype)


def train(model, steps):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", bf16):
            loss = model(torch.randn(8, 16)).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_exception_keeps_type_and_message_and_gains_the_explanation():
    model = net()
    model[3].to(bf16)
    with pytest.raises(RuntimeError, match="dtype") as caught, trace(model) as seen:
        model(torch.randn(2, 16))
    assert type(caught.value) is RuntimeError
    assert torch._C._len_torch_dispatch_stack() == 0
    note = "\n".join(caught.value.__notes__)
    assert "TR001" in note
    assert "parameter 3.weight" in note
    assert seen.failure is seen.findings[0]


def test_same_numbers_with_and_without():
    plain, traced = net(), net()
    expected = train(plain, 6)
    with trace(traced):
        got = train(traced, 6)
    assert got == expected
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), traced.parameters()))


def test_memory_does_not_grow_with_steps():
    model = net()
    average = [p.detach().clone().to(bf16) for p in model.parameters()]

    def some(steps):
        train(model, steps)
        for mean, p in zip(average, model.parameters()):
            for _ in range(steps):
                mean.data = (mean.float() * 0.9 + p.detach() * 0.1).to(bf16)  # a chain of casts that never ends
        gc.collect()
        return sum(isinstance(thing, (torch.Tensor, Origin)) for thing in gc.get_objects())

    with trace(model):
        some(20)
        first = some(60)
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        later = [some(60) for _ in range(3)]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
    assert max(later) - first <= 16
    assert grown < 8192  # KiB


def test_shape_errors_are_not_called_dtype_errors():
    model = net()
    with pytest.raises(RuntimeError) as caught, trace(model) as seen:
        model(torch.randn(2, 5))
    assert not getattr(caught.value, "__notes__", [])
    assert seen.failure is None


def test_an_error_in_backward_names_the_forward_place():
    class Mixing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w.to(bf16).T, x.T @ g

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return Mixing.apply(x, self.w)

    model = nn.Sequential(nn.Linear(4, 4), Layer())
    with pytest.raises(RuntimeError), trace(model) as seen:
        model(torch.randn(2, 4)).sum().backward()
    text = seen.failure.render()
    assert "backward of MixingBackward" in text
    assert seen.failure.place.symbol == "1"


def test_compiled_regions_run_eagerly_with_a_note():
    model = net()
    model[3].to(bf16)
    with pytest.raises(RuntimeError), trace() as seen:
        torch.compile(model)(torch.randn(2, 16))
    assert seen.failure.code == "TR001"
    assert "TR020" in [f.code for f in seen.findings]


def test_checkpointing_under_autocast_is_quiet():
    from torch.utils.checkpoint import checkpoint

    for reentrant in (True, False):
        model = net()
        x = torch.randn(4, 16, requires_grad=True)
        with trace(model) as seen:
            with torch.autocast("cpu", bf16):
                loss = checkpoint(model, x, use_reentrant=reentrant).float().sum()
            loss.backward()
        assert seen.findings == []

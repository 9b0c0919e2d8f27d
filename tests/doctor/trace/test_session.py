"""`with trace(model)`: the exception survives, nothing is left behind, memory does not grow,
numbers do not change; a run that repeats itself is watched now and then, and what changes, fails or
goes on outside its forwards is found all the same.
"""

from __future__ import annotations

import gc
import itertools
import resource

import pytest
import torch
import torch.nn as nn

from tests.api import Origin, trace

bf16 = torch.bfloat16


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


class Breaking(nn.Module):
    """At `breaks`, counted in forwards, something fp32 promotes what a bf16 layer gets."""

    def __init__(self, breaks):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.drop, self.head = nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 4)
        self.to(bf16)
        self.table, self.breaks, self.forwards = torch.ones(16), breaks, 0

    def forward(self, x):
        self.forwards += 1
        x = torch.relu(self.inner(x))
        return self.head(self.drop(x * self.table if self.forwards >= self.breaks > 0 else x))


def train(model, steps, *, each=lambda step: None):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(steps):
        with torch.autocast("cpu", bf16, enabled=dtype != bf16):
            loss = model(torch.randn(8, 16, dtype=dtype)).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        each(step)
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
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), traced.parameters(), strict=True)
    )


def test_memory_does_not_grow_with_steps():
    model = net()
    average = [p.detach().clone().to(bf16) for p in model.parameters()]

    def some(steps):
        train(model, steps)
        for mean, p in zip(average, model.parameters(), strict=True):
            for _ in range(steps):
                # a chain of casts that never ends
                mean.data = (mean.float() * 0.9 + p.detach() * 0.1).to(bf16)
        gc.collect()
        return sum(isinstance(thing, (torch.Tensor, Origin)) for thing in gc.get_objects())

    with trace(model):
        some(10)
        first = some(12)
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        later = [some(12) for _ in range(3)]
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


def test_repeated_forwards_are_not_watched():
    counts = []
    with trace() as seen:
        train(net(), 65, each=lambda step: counts.append(seen._tracer.op_count))
    ops = [later - earlier for earlier, later in itertools.pairwise(counts)]  # of steps 2 to 65
    assert ops[20] < ops[3] / 3  # step 22
    assert ops[30] > 0.9 * ops[3]  # step 32, a power of two


def test_an_error_in_an_unwatched_forward_is_explained():
    model = Breaking(30)
    with pytest.raises(RuntimeError) as caught, trace(model) as seen:
        train(model, 40)
    assert model.forwards == 31  # and once more, to see why
    assert seen.failure.code == "TR001"
    text = seen.failure.render()
    assert "x * self.table" in text
    assert seen.failure.place.symbol == "head"
    assert len(caught.value.__notes__) == 1
    assert not any((*m._forward_hooks, *m._forward_pre_hooks) for m in model.modules())


def test_a_late_cast_between_forwards_is_found():
    def validates(step):
        if step == 25:
            model.to(bf16)(torch.zeros(1, 16, dtype=bf16))
            model.float()

    model = net()
    with trace(model) as seen:
        train(model, 30, each=validates)
    assert [f.code for f in seen.findings] == ["TR011"]

"""A run that repeats itself is watched now and then; what changes, fails or goes on outside its forwards is found all the same."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn as nn

from isotype.doctor.trace import trace

bf16 = torch.bfloat16


class Net(nn.Module):
    """At `breaks`, counted in forwards, something fp32 promotes what a bf16 layer gets; at `unrelated` it fails for another reason."""

    def __init__(self, breaks: int = 0, unrelated: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4)
        self.to(bf16)
        self.table = torch.ones(8)
        self.breaks, self.unrelated, self.forwards = breaks, unrelated, 0

    def forward(self, x):
        self.forwards += 1
        x = torch.relu(self.inner(x))
        if self.forwards == self.unrelated:
            raise KeyError("a missing key of some dtype")
        if self.forwards >= self.breaks > 0:
            x = x * self.table
        return self.head(self.drop(x))


def train(model: nn.Module, steps: int, *, each=lambda step: None) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 8).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        each(step)
    return losses


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_repeated_forwards_are_not_watched():
    counts = []
    with trace() as seen:
        train(Net(), 65, each=lambda step: counts.append(seen._tracer.ops))
    ops = [later - earlier for earlier, later in itertools.pairwise(counts)]  # of steps 2 to 65
    assert ops[20] < ops[3] / 3  # step 22
    assert ops[30] > 0.9 * ops[3]  # step 32, a power of two


def test_an_error_in_an_unwatched_forward_is_explained():
    model = Net(breaks=30)
    with pytest.raises(RuntimeError) as caught, trace(model) as seen:
        train(model, 40)
    assert model.forwards == 31  # and once more, to see why
    assert seen.failure.code == "TR001"
    text = seen.failure.render()
    assert "x = x * self.table" in text
    assert seen.failure.place.symbol == "head"
    assert len(caught.value.__notes__) == 1
    assert hooks_of(model) == 0


def test_a_late_cast_between_forwards_is_found():
    def validates(step):
        if step == 25:
            model.to(bf16)(torch.zeros(1, 8, dtype=bf16))
            model.float()

    model = Net().float()
    with trace(model) as seen:
        train(model, 30, each=validates)
    assert [f.code for f in seen.findings] == ["TR011"]

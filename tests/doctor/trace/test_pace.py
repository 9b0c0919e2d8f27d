"""A run that repeats itself is watched now and then; what changes, fails or goes on outside its forwards is found all the same."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn as nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_same_numbers():
    expected = train(Net(), 40)
    with trace():
        assert train(Net(), 40) == expected


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


def test_a_caught_error_leaves_the_tracer_unchanged():
    model = Net(unrelated=30)
    before = len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)

    def goes_on(step):
        if step == 28:
            with pytest.raises(KeyError):
                model(torch.randn(4, 8, dtype=bf16))
            assert torch._C._len_torch_dispatch_stack() == 1

    with trace(model) as seen:
        train(model, 50, each=goes_on)
    assert seen.findings[1:] == []
    assert hooks_of(model) == 0
    assert (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)) == before


def test_a_step_that_fails_does_not_end_the_watch():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trace(model) as seen:
        for step in range(20):
            model(torch.randn(2, 4)).sum().backward()
            if step == 12:
                optimizer.param_groups[0]["lr"] = "0.1"
            if step < 13:
                try:
                    optimizer.step()
                except TypeError:
                    continue
        ops = seen._tracer.ops
        torch.ones(2) + 1
        assert seen._tracer.ops > ops


def test_a_late_cast_between_forwards_is_found():
    def validates(step):
        if step == 25:
            model.to(bf16)(torch.zeros(1, 8, dtype=bf16))
            model.float()

    model = Net().float()
    with trace(model) as seen:
        train(model, 30, each=validates)
    assert [f.code for f in seen.findings] == ["TR011"]


def test_a_late_average_is_found():
    model = Net().float()
    average = [p.detach().to(bf16) for p in model.parameters()]

    def averaged(step):
        if step >= 20:
            with torch.no_grad():
                for mean, p in zip(average, model.parameters()):
                    mean.lerp_(p.to(bf16), 0.001)

    with trace(model) as seen:
        train(model, 32, each=averaged)
    assert [f.code for f in seen.findings] == ["TR018"]


def test_a_gradient_that_grows_over_many_forwards_is_followed_to_its_step():
    model = nn.Linear(64, 8).to(bf16)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    torch.manual_seed(0)
    with trace(model) as seen:
        for _ in range(128):
            (model(torch.randn(4, 64, dtype=bf16) + 0.5).float().pow(2).mean() / 128).backward()
        optimizer.step()
    (finding,) = seen.findings
    assert finding.code == "TR024"
    assert "after 127 additions" in finding.message


def test_other_sizes_and_states_are_watched_again():
    model = Net().eval()
    with trace(model) as seen:

        def ops(rows: int, *, grad: bool = False) -> int:
            before = seen._tracer.ops
            with torch.set_grad_enabled(grad):
                model(torch.zeros(rows, 8, dtype=bf16))
            return seen._tracer.ops - before

        many = ops(4)
        for _ in range(8):
            few = ops(4)
        assert few < many / 2
        assert ops(3) == few  # of the same power of two
        assert ops(9) >= many - 1
        assert ops(4, grad=True) >= many - 1


def test_a_dispatch_mode_of_the_program_keeps_its_position():
    class Counting(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops += 1
            return func(*args, **(kwargs or {}))

    model, counting = Net(), Counting()
    with trace(model):
        with counting:
            train(model, 20)
        assert torch._C._len_torch_dispatch_stack() == 1
    plain = Counting()
    with plain:
        train(Net(), 20)
    assert counting.ops >= plain.ops

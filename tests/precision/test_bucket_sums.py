"""Sums over processes that are sent while backward runs: the same buckets in the same order, and the same bits."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from isotype.errors import RunError
from isotype.precision import accumulate
from isotype.precision.accumulate import GradientAccumulator
from tests.distributed.processes import ended, start


class Doubled:
    """Two processes with the same gradients; each sum is made when it is waited for."""

    size = 2

    def __init__(self):
        self.events = []

    def begin_add_up(self, tensor):
        self.events.append(("sent", tensor.numel()))

        def wait():
            self.events.append(("received", tensor.numel()))
            tensor.mul_(2)

        return wait


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(accumulate, "BUCKET", 40)


def chain(processes, *, sizes=(3, 5, 7, 9)):
    """Weights whose gradients backward makes from the last to the first, and what it computes with them."""
    weights = [nn.Parameter(torch.ones(n)) for n in sizes]
    accumulator = GradientAccumulator(weights, processes=processes)

    def loss():
        x = torch.ones(())
        for w in weights:
            x = x * (w * 1.0).mean()
        return x

    return weights, accumulator, loss


def step(accumulator, loss):
    accumulator.begin_sums()
    loss().backward()
    accumulator.finish_sums()
    found = [gradient.clone() for gradient in accumulator.gradients()]
    accumulator.zero()
    return found


@pytest.mark.usefixtures("small_buckets")
def test_buckets_are_sent_while_backward_runs_from_the_second_step_on():
    both = Doubled()
    weights, accumulator, loss = chain(both)
    weights[0].register_hook(lambda g: both.events.append(("first weight's gradient", g.numel())))
    step(accumulator, loss)
    assert [what for what, _ in both.events].index("first weight's gradient") == 0
    assert [n for what, n in both.events if what == "sent"] == [9, 7, 8]
    late = list(both.events)
    both.events.clear()
    step(accumulator, loss)
    assert both.events[:3] == [("sent", 9), ("sent", 7), ("first weight's gradient", 3)]
    assert sorted(both.events) == sorted(late)


@pytest.mark.usefixtures("small_buckets")
def test_early_sums_are_those_after_the_backward():
    _, accumulator, loss = chain(Doubled())
    late, early = step(accumulator, loss), step(accumulator, loss)
    assert all(torch.equal(a, b) for a, b in zip(late, early))
    assert late[3].tolist() == pytest.approx([2 / 9] * 9)


@pytest.mark.usefixtures("small_buckets")
def test_only_the_last_backward_of_a_step_sends():
    both = Doubled()
    _, accumulator, loss = chain(both)
    step(accumulator, loss)
    both.events.clear()
    loss().backward()
    assert both.events == []
    assert step(accumulator, loss)[0].tolist() == pytest.approx([4 / 3] * 3)


@pytest.mark.usefixtures("small_buckets")
def test_few_buckets_are_in_flight(monkeypatch):
    monkeypatch.setattr(accumulate, "IN_FLIGHT", 2)
    both = Doubled()
    _, accumulator, loss = chain(both, sizes=(11, 12, 13, 14, 15))
    step(accumulator, loss)
    flying = most = 0
    for what, _ in both.events:
        flying += 1 if what == "sent" else -1
        most = max(most, flying)
    assert (flying, most) == (0, 2)


class InParts(torch.autograd.Function):
    """Runs a backward of its own inside backward, as reentrant checkpointing does."""

    @staticmethod
    def forward(ctx, x, weights):
        ctx.save_for_backward(x.detach())
        (ctx.weight,) = weights  # in a list: autograd does not see it
        return x * ctx.weight.detach().mean()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.requires_grad_()
            y = x * (ctx.weight * 1.0).mean()
        y.backward(dy)
        return x.grad, None


@pytest.mark.usefixtures("small_buckets")
def test_a_gradient_that_comes_in_parts_is_sent_when_it_is_whole():
    both = Doubled()
    weight = nn.Parameter(torch.ones(4))
    accumulator = GradientAccumulator([weight], processes=both)

    def twice():
        return InParts.apply(InParts.apply(torch.ones((), requires_grad=True), [weight]), [weight])

    for _ in range(2):  # d(mean(w)^2)/dw, of two processes
        assert step(accumulator, twice)[0].tolist() == pytest.approx([1.0] * 4)
    assert both.events == [("sent", 4), ("received", 4)] * 2


@pytest.mark.usefixtures("small_buckets")
def test_a_gradient_that_comes_again_after_it_was_sent_is_an_error():
    weight = nn.Parameter(torch.ones(4))
    accumulator = GradientAccumulator([weight], processes=Doubled())
    step(accumulator, lambda: InParts.apply(torch.ones((), requires_grad=True), [weight]))
    with pytest.raises(RunError, match=r"weight with shape \[4\] in two parts"):
        step(accumulator, lambda: InParts.apply(InParts.apply(torch.ones((), requires_grad=True), [weight]), [weight]))


OVERLAPPED = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from isotype.distributed.world import join
from isotype.precision import accumulate
from isotype.precision.accumulate import GradientAccumulator

accumulate.BUCKET = 4096
world = join("cpu", timeout=600)
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())])
accumulator = GradientAccumulator(model.parameters(), processes=world)
torch.manual_seed(1 + world.rank)
x = torch.randn(8, 32)
sent_in_backward = []

def step():
    accumulator.begin_sums()
    model(x).square().sum().backward()
    sent_in_backward.append(accumulator._sums._sent)
    accumulator.finish_sums()
    found = [g.clone() for g in accumulator.gradients()]
    accumulator.zero()
    return found

late, early = step(), step()
equal = all(torch.equal(a, b) for a, b in zip(late, early))
digest = float(sum(g.double().sum() for g in early))
found = world.gather([equal, digest, sent_in_backward, len(accumulator.sent)])
if world.first:
    Path(sys.argv[1]).write_text(json.dumps(found))
world.close()
"""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_three_processes_have_the_same_bits_early_and_late(tmp_path):
    """With three processes the order of addition depends on an element's position in its bucket."""
    script, result = tmp_path / "script.py", tmp_path / "result.json"
    script.write_text(OVERLAPPED)
    status, said = ended(start(3, str(script), str(result)))
    assert status == 0, said
    for equal, digest, (in_first, in_second), buckets in (found := json.loads(result.read_text())):
        assert equal
        assert digest == found[0][1]
        assert in_first == 0
        assert in_second == buckets >= 5

"""Sums over processes that are sent while backward runs: the same buckets in the same order, and
the same bits.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isotype.precision import accumulate
from isotype.precision.accumulate import GradientAccumulator


class Doubled:
    """Two processes with the same gradients; each sum is made when it is waited for."""

    size = 2

    def __init__(self):
        self.events, self.dtypes = [], set()

    def begin_sum(self, tensor):
        self.events.append(("sent", tensor.numel()))
        self.dtypes.add(tensor.dtype)

        def wait():
            self.events.append(("received", tensor.numel()))
            tensor.mul_(2)

        return wait


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(accumulate, "BUCKET_BYTES", 40)


def chain(processes, *, sizes=(3, 5, 7, 9)):
    """Weights whose gradients backward makes from the last to the first, and what it computes with
    them.
    """
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
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))
    assert late[3].tolist() == pytest.approx([2 / 9] * 9)

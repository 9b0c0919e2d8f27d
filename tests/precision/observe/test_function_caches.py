"""Tables that a method keeps in functools.lru_cache are the module's own, whenever they were made."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from isotype.precision import PRESETS
from isotype.precision.observe.function_caches import cached_tables
from tests.models import tiny
from tests.precision.adversarial.run import BATCH, set_up, watched_step


def unless_told(function):
    """As diffusers wraps it."""
    cached = functools.lru_cache(maxsize=None)(function)

    @functools.wraps(function)
    def call(*args):
        return cached(*args)

    return call


class Positions(nn.Module):
    """A table in a cache, made of a tensor in an attribute."""

    dtype = torch.float32

    def __init__(self):
        super().__init__()
        self.angles = torch.linspace(0.0, 1.0, 64)

    def forward(self, x_NTD):
        return x_NTD + self.table(x_NTD.shape[1])[:, None].to(x_NTD.dtype)


class Bounded(Positions):
    @functools.lru_cache  # noqa: B019
    def table(self, length):
        return torch.sin(self.angles[:length] * 3).to(self.dtype)


class Unbounded(Positions):
    @unless_told
    def table(self, length):
        return torch.sin(self.angles[:length] * 3).to(self.dtype)


class Narrow(Bounded):
    dtype = torch.float16


def seen_after_an_unobserved_forward(kind):
    model = tiny()
    model.model.layers[0].mlp = nn.Sequential(kind(), model.model.layers[0].mlp)
    run = set_up(model, PRESETS["bf16-mixed"])
    with torch.no_grad():
        run.model(input_ids=BATCH.input_ids)
    return watched_step(run, 1)


@pytest.mark.parametrize("kind", [Bounded, Unbounded])
def test_a_table_in_a_cache_is_no_value_from_outside(kind):
    seen = seen_after_an_unobserved_forward(kind)
    assert not [place for place in seen.unobserved if "values from outside" in place]
    assert seen.violations == []


def test_a_narrow_table_in_a_cache_is_reported():
    seen = seen_after_an_unobserved_forward(Narrow)
    assert [place for place in seen.unobserved if "values from outside" in place]


def test_caches_of_both_kinds_are_found():
    for kind in (Bounded, Unbounded):
        module = kind()
        module(torch.zeros(1, 5, 2))
        assert any(t is module.table(5) for t in cached_tables(module))

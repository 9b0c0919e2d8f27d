"""The rows that a process keeps are read and cast, and no others."""

from __future__ import annotations

import itertools

import torch

from isotype.precision import PRESETS
from isotype.precision.apply import cast_parameters
from tests.api import parts_Part as Part
from tests.models import tiny


def test_the_own_rows_have_the_values_of_the_whole_weight():
    for rows, parts in itertools.product((1, 3, 4, 10), (1, 2, 4)):
        weight = torch.randn(rows, 5)
        for rank, expected in enumerate(weight.bfloat16().chunk(parts)):
            narrowed = Part(rank, parts).cast_rows(weight, torch.bfloat16)
            assert narrowed.shape == weight.shape
            assert torch.equal(narrowed.chunk(parts)[rank], expected)
        vector = torch.randn(rows)
        assert torch.equal(
            Part(parts - 1, parts).cast_rows(vector, torch.bfloat16), vector.bfloat16()
        )


def test_the_model_is_looked_at_while_it_has_every_row():
    model = tiny()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = {}
    part = Part(
        1,
        2,
        on_loaded=lambda loaded: seen.update(
            {name: p.detach().clone() for name, p in loaded.named_parameters()}
        ),
    )
    cast_parameters(model, PRESETS["bf16-pure"], part)
    assert all(torch.equal(seen[name], p) for name, p in whole.items())
    for name, p in model.named_parameters():
        assert p.dtype == torch.bfloat16
        assert torch.equal(p.chunk(2)[1], whole[name].bfloat16().chunk(2)[1])

"""The moving average of trained weights."""

from __future__ import annotations

import torch
from torch import nn

from isotype.training.ema import Ema


def small(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=dtype)


def test_an_average_follows_its_weights_in_fp32():
    model = small(torch.bfloat16)
    ema = Ema(model, 0.9, "fp32")
    expected = model.weight.detach().double()
    for step in range(1, 40):
        with torch.no_grad():
            model.weight.add_(0.01)
        ema.update(step)
        kept = min(0.9, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * model.weight.detach().double()
    assert {average.dtype for average in ema.averages.values()} == {torch.float32}
    torch.testing.assert_close(ema.averages["weight"].double(), expected, rtol=1e-5, atol=1e-6)

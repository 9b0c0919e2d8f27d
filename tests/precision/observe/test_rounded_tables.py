"""A table that was rounded before it was looked at is named, however it was widened since; exact tables are not."""

import functools

import pytest
import torch
from torch import nn

from isotype.precision import PRESETS
from isotype.precision.observe.rounded_tables import rounded_to
from tests.models import tiny
from tests.precision.adversarial.run import BATCH, set_up, watched_step

DISTANCES = torch.arange(40)
ANGLES = torch.outer(torch.arange(64.0), 100.0 ** -(torch.arange(16) / 16))
SLOPES = 2.0 ** -torch.arange(1.0, 9.0)
NOISE = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("table", "of_fp32", "of_bf16"),
    [
        (torch.log1p(DISTANCES.bfloat16()).float(), "bf16", None),
        (torch.log1p((DISTANCES[:, None] - DISTANCES).clamp(min=0).bfloat16()).float(), "bf16", None),
        (ANGLES.cos().bfloat16().float(), "bf16", None),
        (NOISE.bfloat16().float(), "bf16", None),
        (ANGLES.cos().half().float(), "fp16", "fp16"),
    ],
)
def test_rounded_values_are_recognised(table, of_fp32, of_bf16):
    assert (rounded_to(table, "fp32"), rounded_to(table, "bf16")) == (of_fp32, of_bf16)


@pytest.mark.parametrize(
    "table",
    [
        torch.log1p(DISTANCES.float()),
        ANGLES.cos(),
        NOISE,
        torch.arange(200.0),
        -(DISTANCES[:, None] - DISTANCES).abs() * SLOPES[:, None, None],  # ALiBi
        -torch.arange(256.0) * SLOPES[:, None],
        torch.linspace(0, 1, 257),
        torch.linspace(0.5, 1, 129),
        2.0 ** -torch.arange(30.0),
        torch.hann_window(400),
        torch.ones(64, 64).tril() / torch.arange(1, 65)[:, None],
        torch.full((64, 64), -1e9).triu(1),
        ANGLES.cos().bfloat16(),  # its dtype says so
    ],
)
def test_exact_values_are_not(table):
    assert rounded_to(table, "fp32") is None


class Positions(nn.Module):
    """Adds to its input what it makes in its first forward and keeps in an attribute."""

    dtype = torch.bfloat16
    made = None

    def table(self, length):
        if self.made is None:
            self.made = torch.log1p(torch.arange(300, dtype=self.dtype)).float()
        return self.made[:length]

    def forward(self, x_NTD):
        return x_NTD + self.table(x_NTD.shape[1])[:, None]


class InADict(Positions):
    def __init__(self):
        super().__init__()
        self.tables = {}

    def table(self, length):
        if "log" not in self.tables:
            self.tables["log"] = torch.log1p(torch.arange(300, dtype=self.dtype)).float()
        return self.tables["log"][:length]


class InABuffer(Positions):
    def __init__(self):
        super().__init__()
        self.register_buffer("log", torch.log1p(torch.arange(300, dtype=self.dtype)).float(), persistent=False)

    def table(self, length):
        return self.log[:length]


class InACache(Positions):
    @functools.lru_cache  # noqa: B019
    def whole(self, length):
        return torch.log1p(torch.arange(length, dtype=self.dtype)).float()

    def table(self, length):
        return self.whole(300)[:length]


@pytest.mark.parametrize("kind", [Positions, InADict, InABuffer, InACache])
def test_a_table_of_a_forward_that_was_not_observed_is_named(kind):
    for dtype in (torch.bfloat16, torch.float32):
        InACache.whole.cache_clear()  # one for all of its class
        model = tiny()
        model.model.layers[1].mlp = nn.Sequential(type(kind.__name__, (kind,), {"dtype": dtype})(), model.model.layers[1].mlp)
        run = set_up(model, PRESETS["fp32"])
        with torch.no_grad():
            run.model(input_ids=BATCH.input_ids)
        seen = watched_step(run, 1)
        assert seen.violations == []
        assert [place for place in seen.unobserved if "layers.1.mlp.0" in place and "table" in place] == list(seen.unobserved)
        assert bool(seen.unobserved) == (dtype == torch.bfloat16)

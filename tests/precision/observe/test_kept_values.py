"""A buffer in `compute` that the forward fills with activations is no table; a table and a running mean beside it still are."""

import pytest
import torch
from torch import nn

from isotype.precision import PRESETS
from tests.models import tiny
from tests.precision.adversarial.run import set_up, watched_step


def table():
    return torch.linspace(0, 1, 64 * 32).sin().view(64, 32)


class Cache(nn.Module):
    """Keeps what it is given in a buffer of bf16, and goes on with what the buffer holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, 64, 32, dtype=torch.bfloat16), persistent=False)

    def forward(self, x_NTD):
        n, length, _ = x_NTD.shape
        with torch.no_grad():
            self.write(x_NTD.to(torch.bfloat16), n, length)
        return x_NTD + (self.kept[:n, :length].to(x_NTD.dtype) - x_NTD).detach()

    def write(self, x_NTD, n, length):
        self.kept[:n, :length] = x_NTD


class ByPositions(Cache):
    def write(self, x_NTD, n, length):
        self.kept[:n].index_copy_(1, torch.arange(length), x_NTD)


class ByIndices(Cache):
    def write(self, x_NTD, n, length):
        self.kept[torch.arange(n)[:, None], torch.arange(length)] = x_NTD


class Masked(Cache):
    """Attends to all of the buffer, whose end is empty."""

    def forward(self, x_NTD):
        super().forward(x_NTD)
        n, length, _ = x_NTD.shape
        seen = torch.arange(64) <= torch.arange(length)[:, None]
        x_NHTD, kept_NHTD = (t.view(n, -1, 4, 8).transpose(1, 2) for t in (x_NTD, self.kept[:n]))
        y_NHTD = nn.functional.scaled_dot_product_attention(x_NHTD, kept_NHTD, kept_NHTD, attn_mask=seen)
        return y_NHTD.transpose(1, 2).reshape(x_NTD.shape)


class FirstWordWritten(Cache):
    """A table in which one activation is written."""

    def __init__(self):
        super().__init__()
        self.kept.copy_(table())

    def write(self, x_NTD, n, length):
        self.kept[:n, :1] = x_NTD[:, :1]


class Added(FirstWordWritten):
    """Activations are added to a table."""

    def write(self, x_NTD, n, length):
        self.kept[:n, :length] += x_NTD


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(32, dtype=torch.bfloat16))

    def forward(self, x_NTD):
        with torch.no_grad():
            self.kept.copy_(0.9 * self.kept.float() + 0.1 * x_NTD.float().mean((0, 1)))
        return x_NTD - self.kept.to(x_NTD.dtype)


class Computed(Cache):
    """A table that is made anew in each forward."""

    def write(self, x_NTD, n, length):
        self.kept.copy_(table())


@pytest.mark.parametrize(
    ("kind", "honest"),
    [
        (Cache, True), (ByPositions, True), (ByIndices, True), (Masked, True),
        (FirstWordWritten, False), (Added, False), (RunningMean, False), (Computed, False),
    ],
)  # fmt: skip
def test_a_cache_of_activations_is_told_from_a_table(kind, honest):
    model = tiny()
    model.model.layers[1].mlp = nn.Sequential(kind(), model.model.layers[1].mlp)
    run = set_up(model, PRESETS["bf16-mixed"])
    for step in (1, 2):
        seen = watched_step(run, step)
        assert not [place for place in seen.unobserved if "mlp.0" in place]
        told = [found for found in seen.violations if "layers.1.mlp.0.kept is stored in bf16" in found.message]
        assert seen.violations == [] if honest else told


class RepeatedMask(nn.Module):
    """Copies one fp32 mask into a bf16 one for each row: exact, and of another shape."""

    def forward(self, x_NTD):
        length = x_NTD.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)
        mask_NTT = torch.empty(len(x_NTD), length, length, dtype=torch.bfloat16).copy_(mask)
        return x_NTD + 0 * mask_NTT.exp()[..., :1].to(x_NTD.dtype)


def test_a_copy_that_repeats_its_source_is_looked_at():
    model = tiny()
    model.model.layers[1].mlp = nn.Sequential(RepeatedMask(), model.model.layers[1].mlp)
    seen = watched_step(set_up(model, PRESETS["bf16-mixed"]), 1)
    assert seen.violations == []
    assert not [place for place in seen.unobserved if "mlp.0" in place]

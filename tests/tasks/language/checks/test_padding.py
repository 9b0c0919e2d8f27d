"""PF022: a model in which padding behind a row changes the row is told."""

from __future__ import annotations

import torch

from isotype.data.rows import Row
from isotype.precision.apply import inner_model
from isotype.tasks.language.checks import moved_by_padding, padding_changes_nothing
from tests.models import tiny


class FromTheEnd(torch.nn.Module):
    """Takes every token's position from the end of the row, as a model that counts on padding on the left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.shape[1], 0, -1, device=x.device)[:, None]


def test_a_model_that_reads_its_rows_from_the_end_is_found(subject):
    one = subject("plain")
    assert list(padding_changes_nothing(one)) == []
    model = inner_model(one.prepared.model).model
    model.norm = torch.nn.Sequential(model.norm, FromTheEnd())
    (found,) = padding_changes_nothing(one)
    assert found.code == "PF022"


def test_a_model_that_draws_numbers_in_evaluation_is_not_accused(subject):
    class Drawing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1 + 0.1 * torch.randn_like(x))

    one = subject("plain")
    model = inner_model(one.prepared.model).model
    model.norm = torch.nn.Sequential(model.norm, Drawing())
    assert list(padding_changes_nothing(one)) == []


def test_a_family_that_counts_on_padding_on_the_left():
    sizes = {"hidden_size": 32, "dim_ff": 48, "dim_head": 8, "prompt_types": 4, "prompt_length": 8, "segment_types": 4, "vocab_size": 128}
    row = Row(tuple(range(3, 22)), tuple(range(3, 22)), 0)
    moved = [moved_by_padding(model.eval(), row, pad_id=0, device=torch.device("cpu")) for model in (tiny("cpmant", **sizes), tiny())]
    assert moved[0] > 0.05
    assert moved[1] < 1e-5

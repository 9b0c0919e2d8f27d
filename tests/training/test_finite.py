"""Advice for numbers that are not finite: nothing that is set already."""

from __future__ import annotations

import pytest
import torch
from tests.models import rows, tiny

from isotype.tasks.language.batches import collate
from isotype.training.finite import non_finite_error


@pytest.mark.parametrize(("clip", "compute"), [(1.0, "bf16"), (1.0, "fp16"), (0.0, "bf16")])
@pytest.mark.parametrize("where", ["activation", "gradient", "weight"])
def test_advice_does_not_repeat_current_settings(clip, compute, where):
    model = tiny()
    if where == "weight":
        model.model.norm.weight.data[0] = float("inf")
    if where == "activation":
        model.model.layers[0].register_forward_hook(lambda module, given, output: output * float("inf"))
    gradient = (lambda p: torch.full_like(p, float("nan"))) if where == "gradient" else (lambda p: None)
    batch = collate(rows(2), pad_id=0)
    error = non_finite_error(
        model, [lambda: model(**batch.inputs)], step=1, what="the loss", gradient=gradient, learning_rate=1e-4, clip=clip, compute=compute
    )
    assert "train.learning_rate" in error.fix
    assert ("train.clip" in error.fix) == (clip == 0)
    assert ("precision.compute: bf16" in error.fix) == (compute == "fp16" and where == "activation")

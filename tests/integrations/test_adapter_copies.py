"""In an attached trainer A and B are cast down once for all micro-batches of a step, with the curve that it has without copies."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from isotype.integrations import adapter_copies, attach, detach
from isotype.lora import narrow
from tests.integrations.trainers import STEPS, curve, plain
from tests.integrations.trainers import Setting as Trainers
from tests.lora.test_narrow import Casts


def trained(models, accumulate):
    """(the casts of each matrix, the curve)."""
    trainer = plain(Trainers(models, bf16=True, more={"gradient_accumulation_steps": accumulate}))
    attach(trainer, "bf16-lora", quiet=True, preflight=False, record=False)
    with Casts() as casts:
        losses = curve(trainer)
    assert narrow._kept is None
    matrices = [p for p in trainer.model.parameters() if p.requires_grad]
    assert matrices
    return len(casts.of(trainer.model)) / len(matrices), losses


@pytest.mark.parametrize(("accumulate", "without"), [(1, 1), (2, 2)])
def test_each_matrix_is_cast_once_a_step(models, monkeypatch, accumulate, without):
    casts, losses = trained(models, accumulate)
    assert casts == STEPS
    monkeypatch.setattr(adapter_copies, "copies_kept", nullcontext)
    casts, same = trained(models, accumulate)
    assert casts == STEPS * without
    assert same == losses


def test_no_copies_outlive_a_step_that_fails(models, monkeypatch):
    trainer = plain(Trainers(models, bf16=True, more={"gradient_accumulation_steps": 2}))
    attach(trainer, "bf16-lora", quiet=True, preflight=False, record=False)
    original, calls = trainer.compute_loss, []

    def fails(*args, **kwargs):
        calls.append(narrow._kept is not None)
        if len(calls) == 2:
            raise RuntimeError("the second micro-batch")
        return original(*args, **kwargs)

    monkeypatch.setattr(trainer, "compute_loss", fails)
    with pytest.raises(RuntimeError, match="the second micro-batch"):
        trainer.train()
    assert calls == [True, True]
    trainer.is_in_train = False
    monkeypatch.setattr(trainer, "compute_loss", original)
    detach(trainer)
    assert narrow._kept is None

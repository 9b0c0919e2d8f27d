"""The verdict on top of a report: base against tuned loss, and whether the declared precision was kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotype.report.record import read_run
from isotype.report.verdicts import verdict
from tests.report.runs import DECLARED, run_folder, step

KEPT = {"declared": DECLARED, "observed": {"base": {"bf16": 12}, "grads": {"fp32": 4}}, "violations": []}


def evaluations(*losses: float) -> list[dict]:
    return [{"step": 10 * i, "event": "evaluation", "eval_loss": loss} for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "said", "mood"),
    [
        ((4.0, 3.0), "Evaluation loss 4 before training, 3 at step 10: 25% lower.", "good"),
        ((4.0, 5.0), "Evaluation loss 4 before training, 5 at step 10: 25% higher.", "warn"),
        ((4.0, 2.0, 3.0), "25% lower. It was lower at step 10, 2: it learns its training rows by heart.", "warn"),
        ((4.0,), "no second evaluation", "warn"),
        ((), "No evaluation", "warn"),
    ],
)
def test_base_against_tuned_loss(tmp_path: Path, losses: tuple, said: str, mood: str) -> None:
    found = verdict(read_run(run_folder(tmp_path / "run", metrics=[step(1), *evaluations(*losses)], precision=KEPT)))
    assert said in found.learnt
    assert found.mood == mood
    assert found.precision == "The declared precision was kept in 2 of 2 roles."

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


def test_the_step_that_early_stopping_took_is_the_one_compared(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", metrics=evaluations(4.0, 2.0, 3.0), precision=KEPT, result={"status": "done", "of_step": 10})
    assert verdict(read_run(folder)).learnt == "Evaluation loss 4 before training, 2 at step 10: 50% lower."


def test_a_broken_contract_is_bad_whatever_was_learnt(tmp_path: Path) -> None:
    broken = KEPT | {"violations": [{"code": "DT003", "message": "m", "declared": "precision.grads: fp32"}]}
    found = verdict(read_run(run_folder(tmp_path / "run", metrics=evaluations(4.0, 3.0), precision=broken)))
    assert found.precision == "The declared precision was broken: 1 violation."
    assert found.mood == "bad"


def test_roles_that_were_not_observed_are_named(tmp_path: Path) -> None:
    found = verdict(
        read_run(run_folder(tmp_path / "run", metrics=evaluations(4.0, 3.0), precision=KEPT | {"observed": {"base": {"bf16": 1}}}))
    )
    assert found.precision == "The declared precision was kept in 1 of 2 roles; not observed: grads."

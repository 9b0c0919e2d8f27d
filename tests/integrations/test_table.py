"""The table of docs/trainers.md is the one that benchmarks/dropin.py makes of its results, and its cells hold what the page promises."""

from __future__ import annotations

import json

import pytest
from benchmarks import dropin

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def cells():
    return json.loads(dropin.RESULTS.read_text())["curves"]


def test_the_page_has_the_table_of_the_results(cells):
    written = dropin.PAGE.read_text(encoding="utf-8").split(dropin.BEGIN)[1].split(dropin.END)[0].strip()
    assert written == dropin.table(cells)


def test_every_trainer_was_tried_in_every_form_and_none_failed(cells):
    from tests.integrations.trainers import TRAINERS

    assert {(c["trainer"], c["form"], c["checkpointing"]) for c in cells} == {
        (name, form, checkpointing) for name in TRAINERS for form in dropin.FORMS for checkpointing in (False, True)
    }
    assert [c for c in cells if "failed" in c] == []
    assert all(c["loss"] <= 1e-5 for c in cells if c.get("precision") == "fp32")
    assert all(c["loss"] <= 2e-3 for c in cells if c.get("precision") == "nf4-lora")


# one cell a trainer; those in test_attach.py are not repeated
@pytest.mark.parametrize(
    ("name", "form"),
    [("Seq2SeqTrainer", "lora"), ("KTO", "lora"), ("RLOO", "full"), ("Reward", "lora"), ("Distillation", "lora"), ("OnlineDPO", "lora"),
     ("GKD", "full"), ("ORPO", "lora"), ("CPO", "qlora")],
)  # fmt: skip
def test_a_slice_of_the_table_is_as_its_results_say(name, form, tmp_path):
    cell = dropin.one_cell(name, form, False, tmp_path)
    assert cell["steps"] == 3
    assert cell["loss"] <= (2e-3 if form == "qlora" else 1e-5)
    assert cell["places"] >= 13


@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_bf16_gradients_are_no_farther_from_fp64_than_the_unmodified_trainers(name, tmp_path):
    """Of a checkpoint in bf16: of one in fp32 the unmodified trainer keeps an fp32 residual stream, and Isotype's is in compute."""
    found = dropin.bf16_errors(name, tmp_path)
    assert found["gradient"]["attached"] <= 1.1 * found["gradient"]["unmodified"]

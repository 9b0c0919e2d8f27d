"""The lines of metrics.jsonl that a resumed run should find, and what precision.json declares."""

from __future__ import annotations

import pytest

from isotype.environment.hardware import by_name
from isotype.observe import Observation
from isotype.observe.record import ROUNDED_TO_ZERO
from isotype.precision import resolve
from isotype.runs.folder import RunFolder
from isotype.runs.record import Metrics, PrecisionRecord


@pytest.mark.parametrize(
    ("steps", "saved", "every", "missing"),
    [
        ([1, 2, 3], 3, 1, None),
        ([1, 2], 3, 1, 2),
        ([], 3, 10, 0),
        ([1, 10, 20], 25, 10, None),
        ([1, 10, 20], 25, 1, None),  # the part before wrote a line every ten steps
        ([1, 10], 25, 10, 10),
        ([1, 10, 20, 30], 25, 10, None),  # the checkpoint of step 30 was damaged
    ],
)
def test_missing_lines_are_found(tmp_path, steps, saved, every, missing):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(step=0, event="evaluation", eval_loss=1.0)
    for step in steps:
        metrics.write(step=step, loss=1.0)
    assert metrics.missing_before(saved, every=every) == missing
    assert not metrics.removed
    metrics.file.unlink()
    assert metrics.removed


@pytest.mark.parametrize(("branch", "declared"), [("fp32", {"value": "fp32", "reason": "model.lora_branch"}), ("compute", None)])
def test_the_dtype_of_an_adapters_own_products_is_declared(branch, declared, tmp_path):
    folder = RunFolder(tmp_path)
    PrecisionRecord(folder, resolve({"preset": "bf16-lora"}, device=by_name("H100")), lora_branch=branch).add(Observation(1))
    assert folder.read_json("precision.json")["declared"].get("lora_branch") == declared


@pytest.mark.parametrize("preset", ["fp16-mixed", "bf16-mixed"])
def test_a_record_of_fp16_says_that_values_rounded_to_zero_are_not_counted(preset, tmp_path):
    folder = RunFolder(tmp_path)
    record = PrecisionRecord(folder, resolve({"preset": preset}, device=by_name("T4" if preset == "fp16-mixed" else "H100")))
    record.add(Observation(1))
    said = folder.read_json("precision.json")["unobserved"].get("values that fp16 rounds to zero")
    assert said == (ROUNDED_TO_ZERO if preset == "fp16-mixed" else None)
    record.restore(1)
    record.add(Observation(2))
    assert folder.read_json("precision.json")["unobserved"].get("values that fp16 rounds to zero") == said

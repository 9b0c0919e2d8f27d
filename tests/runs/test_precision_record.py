"""`precision.json`: what a run declares."""

from __future__ import annotations

import pytest

from isotype.environment.hardware import by_name
from isotype.precision import resolve
from isotype.precision.observe import Observation
from isotype.runs.folder import RunFolder
from isotype.runs.precision_record import PrecisionRecord


@pytest.mark.parametrize(("branch", "declared"), [("fp32", {"value": "fp32", "reason": "model.lora_branch"}), ("compute", None)])
def test_the_dtype_of_an_adapters_own_products_is_declared(branch, declared, tmp_path):
    folder = RunFolder(tmp_path)
    PrecisionRecord(folder, resolve({"preset": "bf16-lora"}, device=by_name("H100")), lora_branch=branch).add(Observation(1))
    assert folder.read_json("precision.json")["declared"].get("lora_branch") == declared

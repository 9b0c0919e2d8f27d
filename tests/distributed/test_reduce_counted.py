"""Role `reduce`: what was observed is what two real processes summed, counted at torch.distributed without the observer."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.distributed.processes import run

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]
FULL = {"adapter": {"kind": "none"}}
STEPS = {"steps": 3, "batch_size": 2, "accumulate": 4, "learning_rate": 1e-3, "eval_every": None}
QUIET = {"sample_every": 0, "samples": [], "observe_every": 3}
WORDS = {"float32": "fp32", "bfloat16": "bf16"}
CASES = {
    "replicate, lora": ("replicate", "bf16-lora", "fp32", {}),
    "replicate, full, summed in bf16": ("replicate", "bf16-pure", "bf16", {**FULL, "precision": {"reduce": "bf16"}}),
    "shard, full": ("shard", "bf16-mixed", "fp32", FULL),
}


def read(tmp_path):
    record = json.loads((tmp_path / "run/precision.json").read_text())
    listed = [json.loads((tmp_path / f"sums.{rank}").read_text()) for rank in (0, 1)]
    return record, listed


@pytest.mark.parametrize("case", CASES)
def test_every_sum_of_gradients_over_two_processes_is_counted_once(case, configured, tmp_path):
    kind, preset, word, sections = CASES[case]
    precision = {"preset": preset} | sections.get("precision", {})
    configured("run", **(sections | {"precision": precision, "parallel": {"kind": kind}, "train": STEPS, "run": QUIET}))
    status, said = run(2, tmp_path / "run.yaml", sums=tmp_path / "sums")
    assert status == 0, said
    record, (first, second) = read(tmp_path)
    assert first == second  # both processes take part in every sum
    last = first[str(record["observed_at"][-1])]  # the record has the counts of the last step that was observed
    assert record["observed"]["reduce"] == Counter(WORDS[dtype] for dtype, _ in last)
    assert sum(record["observed"]["reduce"].values()) + sum(record["unseen"].get("reduce", {}).values()) == len(last) > 0
    assert set(record["observed"]["reduce"]) == {word}
    # and what was summed is every trained element: once a step, or, sharded, once a pass with the padding to equal parts
    trained = json.loads((tmp_path / "run/plan.json").read_text())["trained"]
    passes = 1 if kind == "replicate" else STEPS["accumulate"] // 2
    summed = sum(elements for _, elements in last)
    assert passes * trained <= summed <= passes * trained * (1.0 if kind == "replicate" else 1.02)


def test_sums_in_another_dtype_than_declared_stop_the_run(configured, tmp_path):
    configured("run", precision={"preset": "bf16-lora"}, parallel={"kind": "replicate"}, train=STEPS, run=QUIET)
    status, said = run(2, tmp_path / "run.yaml", sums=tmp_path / "sums", narrow=True)
    record, (first, _) = read(tmp_path)
    assert {dtype for dtype, _ in first["1"]} == {"bfloat16"}
    assert status == 1, said
    assert "of the gradients summed across processes is bf16, declared fp32" in said
    assert record["observed"]["reduce"] == {"bf16": 1}

"""Every kind of run on two processes against one: presets, all weights trained, packing, streams, early stopping.

The losses of the first step are equal to rounding; later ones are compared where the tolerances of the issue hold them.
"""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from isotype.tasks.choose import train
from tests.distributed.processes import run
from tests.distributed.test_replicate import rows_of

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]
FULL = {"adapter": {"kind": "none"}}
STEPS = {"steps": 4, "batch_size": 2, "accumulate": 4, "learning_rate": 1e-3, "eval_every": 2}
CASES = {
    "fp32 full": ({"precision": {"preset": "fp32"}, **FULL}, 2e-6, 2e-5),
    "bf16-lora": ({"precision": {"preset": "bf16-lora"}}, 2e-5, 2e-3),
    "bf16-lora recomputed": ({"precision": {"preset": "bf16-lora"}, "train": {"gradient_checkpointing": "layers"}}, 2e-5, 2e-3),
    "nf4-lora": ({"precision": {"preset": "nf4-lora"}}, 2e-5, 2e-3),
    "bf16-mixed full": ({"precision": {"preset": "bf16-mixed"}, **FULL}, 2e-5, 2e-3),
    "bf16-pure full": ({"precision": {"preset": "bf16-pure"}, **FULL}, 2e-5, 2e-3),
    "fp16-mixed full": ({"precision": {"preset": "fp16-mixed"}, **FULL}, 2e-5, 2e-3),
    "packed": ({"data": {"packing": True}}, 2e-6, 2e-5),
    "stream": ({"data": {"stream": True, "shuffle_buffer": 16}}, 2e-6, 2e-5),
    "early stopping": ({"train": {"patience": 1, "learning_rate": 1e-9}}, 2e-6, 2e-5),
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_the_run_of_one(case, configured, tmp_path):
    sections, loss, weight = CASES[case]
    sections = {**sections, "train": STEPS | sections.get("train", {})}
    assert train(configured("one", **sections)) == 0
    configured("two", **sections)
    status, said = run(2, tmp_path / "two.yaml")
    assert status == 0, said
    one, two = tmp_path / "one", tmp_path / "two"
    drift = {}
    for key in ("loss", "eval_loss"):
        mine, its = rows_of(one, key), rows_of(two, key)
        assert len(mine) == len(its)
        drift[key] = max(abs(a - b) for a, b in zip(mine, its))
    assert rows_of(one, "tokens") == rows_of(two, "tokens")
    name = "model/model.safetensors" if (one / "model").is_dir() else "adapter/adapter_model.safetensors"
    mine, its = load_file(one / name), load_file(two / name)
    drift["weight"] = max(float((mine[key].float() - its[key].float()).abs().max()) for key in mine)
    print(case, drift)
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (one, two)]
    assert manifests[0] == manifests[1]
    precision = json.loads((two / "precision.json").read_text())
    assert precision["violations"] == []
    assert set(precision["observed"]["reduce"]) == {"fp32"}
    assert drift["loss"] <= loss
    assert drift["eval_loss"] <= loss
    assert drift["weight"] <= weight

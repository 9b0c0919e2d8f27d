"""One diffusion run on two processes (gloo): the losses and weights of one process."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from isotype.tasks.choose import train
from tests.distributed.processes import run

pytestmark = pytest.mark.timeout(900)


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in ("loss", "eval_loss", "eval_loss_t0_500") if key in row]


def test_bf16_weights_with_fp32_gradients_on_two_processes(drawn, tmp_path):
    """SimpleTuner's mixed_precision=bf16 with gradient_precision=fp32: under DDP it crashed at the first accumulated backward."""
    sections = {
        "adapter": {"kind": "none"}, "precision": {"preset": "bf16-pure"},
        "train": {"steps": 3, "batch_size": 1, "accumulate": 4, "learning_rate": 1e-3, "eval_every": 3},
    }  # fmt: skip
    assert train(drawn("one", **sections)) == 0
    drawn("two", **sections)
    status, said = run(2, command=["train", str(tmp_path / "two.yaml")])
    assert status == 0, said
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-2)
    observed = json.loads((tmp_path / "two/precision.json").read_text())
    assert observed["violations"] == []
    assert set(observed["observed"]["grads"]) == {"fp32"}
    one, two = (load_file(tmp_path / name / "model/diffusion_pytorch_model.safetensors") for name in ("one", "two"))
    close = [bool((one[name].float() - two[name].float()).abs().max() <= 2e-2) for name in one]
    assert all(close)

"""Diffusion runs on two processes (gloo), which replicate or share the denoiser: the losses and
weights of one process.
"""

import pytest
from PIL import Image, ImageChops, ImageStat

from isotype.tasks.choose import train
from tests.distributed.processes import run
from tests.results import metrics, read, same_records, trained_tensors

pytestmark = pytest.mark.timeout(900)
# losses and weights of two shards may differ from those of one process by 2e-5 and 2e-3
STEPS = {
    "steps": 3,
    "batch_size": 1,
    "accumulate": 4,
    "learning_rate": 1e-3,
    "eval_every": 3,
    "eval_batch_size": 4,
}
SAMPLED = {"samples": ["a red circle on white"], "sample_every": 3}


def drift(folder):
    """The most by which losses and weights of the runs `one` and `two` differ."""
    one, two = (
        metrics(folder / name, "loss", "eval_loss", "eval_loss_t0_500") for name in ("one", "two")
    )
    first, second = (trained_tensors(folder / name) for name in ("one", "two"))
    assert set(first) == set(second)
    return {
        "loss": max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(one, two, strict=True)),
        "weight": max(
            float((first[name].float() - second[name].float()).abs().max()) for name in first
        ),
    }


@pytest.mark.slow
@pytest.mark.full
def test_two_processes_that_share_a_denoiser_make_the_run_of_one(drawn, studio, tmp_path):
    """Evaluation has one pass for two processes, and the first process alone encodes."""
    sections = {
        "model": studio.flux,
        "precision": {"preset": "bf16-mixed"},
        "adapter": {"kind": "none"},
        "train": STEPS,
        "run": SAMPLED,
    }
    sections["images"] = {"cache": str(tmp_path / "cache")}
    assert train(drawn("one", **sections)) == 0
    for entry in (tmp_path / "cache").iterdir():
        entry.unlink()
    drawn("two", **sections, parallel={"kind": "shard"})
    status, said = run(2, tmp_path / "two.yaml")
    assert status == 0, said
    assert "gloo: shard (parallel.kind), each computes 2 x 1 rows of each step" in said
    found = drift(tmp_path)
    assert found["loss"] <= 2e-5
    assert found["weight"] <= 2e-3
    same_records(tmp_path / "one", tmp_path / "two", sums="fp32")
    assert read(tmp_path / "one", "data") == read(tmp_path / "two", "data")
    results = [read(tmp_path / name, "result") for name in ("one", "two")]
    assert results[1]["status"] == "done"
    # trained_loss and reloaded_loss: a file in bf16 has another
    for name, value in results[0]["check"].items():
        assert results[1]["check"][name] == pytest.approx(value, rel=2e-5), name
    drawn_at_first = [
        Image.open(tmp_path / name / "samples/step_0_0.png") for name in ("one", "two")
    ]
    assert max(ImageStat.Stat(ImageChops.difference(*drawn_at_first)).mean) <= 1.0  # of 255

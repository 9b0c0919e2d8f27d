"""The same rows in a step give the same curve: one batch, accumulated ones, two processes. And what is refused of several processes."""

from __future__ import annotations

import json
import subprocess

import pytest
from torch import nn

from isotype.errors import UsageError
from isotype.integrations import attach
from tests.distributed.processes import GUARD, environment
from tests.integrations.trainers import TRAINERS, Setting, curve, plain
from tests.warm import ROOT, interpreter

pytest.importorskip("trl")


def of_batch(name, models, batch, accumulate, *, attached=True):
    trainer = TRAINERS[name](Setting(models, more={"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}))
    if attached:
        attach(trainer, "fp32", quiet=True, preflight=False)
    return curve(trainer)


@pytest.mark.parametrize("name", ["SFT", pytest.param("Trainer", marks=pytest.mark.full)])
def test_accumulation_gives_the_curve_of_one_batch(name, models):
    want = of_batch(name, models, 4, 1, attached=False)
    for batch, accumulate in ((4, 1), (2, 2), (1, 4)):
        assert of_batch(name, models, batch, accumulate) == pytest.approx(want, rel=1e-5)


def two_processes(written, *arguments):
    """The curve that `worker` writes on two processes under torchrun."""
    command = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "--max-restarts", "2", "-m", "tests.integrations.worker"]  # fmt: skip
    ended = subprocess.run(
        [*command, *arguments, str(written)],
        env=environment() | {"PYTHON_EXEC": interpreter()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=GUARD,
        check=False,
    )
    assert written.exists(), f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return json.loads(written.read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["SFT", pytest.param("Trainer", marks=pytest.mark.full)])
def test_two_processes_give_the_curve_of_one(name, models, tmp_path):
    Setting(models).path()  # both processes load it
    found = two_processes(tmp_path / "curve.json", str(models), name, "lora", "fp32", "2", "1")
    assert found["processes"] == 2
    assert any("ddp_find_unused_parameters=False" in note for note in found["notes"])
    assert found["numbers"] == pytest.approx(of_batch(name, models, 4, 1, attached=False), rel=1e-5)
    precision = json.loads((models / "out-fp32" / "isotype" / "precision.json").read_text())
    assert precision["observed"]["reduce"] == {"fp32": 1}


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("is_fsdp_enabled", "does not support accelerate's FSDP: its mixed-precision policy"),
        ("is_deepspeed_enabled", "does not support DeepSpeed"),
    ],
)
def test_sharding_engines_are_refused_in_a_sentence_that_says_what_works(flag, words, models):
    trainer = plain(Setting(models))
    setattr(trainer, flag, True)
    with pytest.raises(UsageError, match=words) as refused:
        attach(trainer, "fp32")
    assert "DDP or a single process" in (refused.value.fix or "")


def test_sharding_that_accelerate_leaves_out_on_a_cpu_is_told(models):
    trainer = plain(Setting(models))
    trainer.args.fsdp = True  # transformers takes it on several processes only; accelerate then makes no plugin on a CPU
    assert any("fsdp has no effect on a CPU" in note for note in attach(trainer, "fp32", quiet=True).notes)


def test_a_model_wrapped_by_ddp_is_refused(models):
    trainer = plain(Setting(models))
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    trainer.model = wrapped
    with pytest.raises(UsageError, match="wrapped in DistributedDataParallel already"):
        attach(trainer, "fp32")

"""The same rows in a step give the same curve: one batch, accumulated ones, two processes. And what is refused of several processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from torch import nn

from isotype.errors import UsageError
from isotype.integrations import attach
from tests.distributed.processes import GUARD, ROOT, environment
from tests.integrations.trainers import TRAINERS, Setting, curve, plain

pytest.importorskip("trl")


def of_batch(name, models, batch, accumulate, *, attached=True):
    trainer = TRAINERS[name](Setting(models, more={"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}))
    if attached:
        attach(trainer, "fp32", quiet=True, preflight=False)
    return curve(trainer)


@pytest.mark.parametrize("name", ["Trainer", "SFT"])
def test_accumulation_gives_the_curve_of_one_batch(name, models):
    want = of_batch(name, models, 4, 1, attached=False)
    for batch, accumulate in ((4, 1), (2, 2), (1, 4)):
        assert of_batch(name, models, batch, accumulate) == pytest.approx(want, rel=1e-5)


def two_processes(*arguments):
    """What `worker` prints on two processes under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.integrations.worker"]
    ended = subprocess.run([*command, *arguments], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=GUARD, check=False)
    return ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["Trainer", "SFT"])
def test_two_processes_give_the_curve_of_one(name, models):
    Setting(models).path()  # both processes load it
    said = two_processes(str(models), name, "lora", "fp32", "2", "1")
    found = json.loads(next(line for line in said.splitlines() if line.startswith("CURVE"))[len("CURVE") :])
    assert found["processes"] == 2
    assert any("ddp_find_unused_parameters=False" in note for note in found["notes"])
    assert found["numbers"] == pytest.approx(of_batch(name, models, 4, 1, attached=False), rel=1e-5)


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


def test_a_model_wrapped_by_ddp_is_refused(models):
    trainer = plain(Setting(models))
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    trainer.model = wrapped
    with pytest.raises(UsageError, match="wrapped in DistributedDataParallel already"):
        attach(trainer, "fp32")

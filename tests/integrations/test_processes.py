"""The same rows in a step give the same curve: one batch, accumulated ones, two processes. And what
is refused of several processes.
"""

import json
import subprocess
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from isotype.integrations import attach
from tests.api import StepRecorder, read_reduce_dtypes
from tests.distributed.processes import GUARD, environment
from tests.integrations.trainers import TRAINERS, Setting, curve, plain
from tests.warm import ROOT, interpreter

pytest.importorskip("trl")


def of_batch(name, models, batch, accumulate, *, attached=True):
    trainer = TRAINERS[name](
        Setting(
            models,
            more={"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate},
        )
    )
    if attached:
        attach(trainer, "fp32", quiet=True, preflight=False)
    return curve(trainer)


@pytest.mark.parametrize("name", ["SFT", pytest.param("Trainer", marks=pytest.mark.full)])
def test_accumulation_gives_the_curve_of_one_batch(name, models):
    want = of_batch(name, models, 4, 1, attached=False)
    assert of_batch(name, models, 1, 4) == pytest.approx(want, rel=1e-5)


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


def test_sharding_that_accelerate_leaves_out_on_a_cpu_is_told(models):
    trainer = plain(Setting(models))
    # transformers takes it on several processes only; accelerate then makes no plugin on a CPU
    trainer.args.fsdp = True
    assert any(
        "fsdp has no effect on a CPU" in note for note in attach(trainer, "fp32", quiet=True).notes
    )


# --- The dtype in which a trainer's wrapper sums gradients across processes; of a hook that is not
# PyTorch's, that it is not known.


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path_factory.mktemp('group') / 'store'}",
        rank=0,
        world_size=1,
    )
    yield
    dist.destroy_process_group()


def ddp(hook=None, **options):
    model = DistributedDataParallel(nn.Linear(4, 4), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def test_a_recorder_replays_without_the_other_processes(models):
    trainer = plain(Setting(models, "full"))
    attach(trainer, "fp32", recorder=True, preflight=False, quiet=True)
    (recorder,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, StepRecorder)]
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1  # as `train` sets it
    trainer.training_step(DistributedDataParallel(trainer.model), batch)
    (step,) = recorder.batches
    assert step.args[0] is trainer.model


def own_hook(state, bucket):
    return default_hooks.fp16_compress_hook(None, bucket)


WRAPPED = {
    "DDP": (ddp, torch.float32),
    "DDP of bf16 weights": (
        lambda: DistributedDataParallel(nn.Linear(4, 4).bfloat16()),
        torch.bfloat16,
    ),
    "fp16 hook": (partial(ddp, default_hooks.fp16_compress_hook), torch.float16),
    "FSDP in bf16": (
        lambda: FullyShardedDataParallel(
            nn.Linear(4, 4),
            device_id=torch.device("cpu"),
            mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16),
        ),
        torch.bfloat16,
    ),
    "fully_shard, wide sums": (
        lambda: fully_shard(
            nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        ),
        torch.float32,
    ),
}


def test_the_dtype_of_the_sums_is_read_and_what_is_not_known_is_told(subtests):
    for how, (made, dtype) in WRAPPED.items():
        with subtests.test(how):
            assert read_reduce_dtypes(made()) == ([dtype], "")
    for model, words in (
        (ddp(own_hook), "communication hook own_hook"),
        (nn.Linear(4, 4), "neither DDP nor FSDP wraps the model"),
    ):
        sent, why = read_reduce_dtypes(model)
        assert sent == []
        assert words in why

"""A step waits for its device at one place: where it reads the loss and the norm. Everything else runs on tensors without values."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.host_reads import NoHostReads
from tests.models import lora, rows, tiny
from tests.worlds import Two

from isotype.config.schema import TrainSection
from isotype.distributed.world import ALONE
from isotype.environment.planned import planned_for
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.accumulate import GradientAccumulator
from isotype.precision.apply import apply_precision
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import batch_loss_sum
from isotype.training import step
from isotype.training.optimizer import build_optimizer

META = torch.device("meta")


def stepper_of(preset, world, sharding, loss_sum=batch_loss_sum):
    precision, train = PRESETS[preset], TrainSection(accumulate=2)
    model = lora(tiny("llama", dtype=torch.bfloat16)).train()
    optimize(model, precision, device_type="cuda")
    apply_precision(model, precision, device_type="cuda")
    model.to(META)
    processes = world if sharding is None else None
    accumulator = GradientAccumulator(model.parameters(), dtype=precision.grads, processes=processes)
    optimizer = build_optimizer(model, train, precision, accumulator.gradient)
    return step.Stepper(model, optimizer, accumulator, precision, train, partial(loss_sum, dtype=precision.loss), world, sharding)


@pytest.mark.parametrize(("processes", "preset"), [("one", "bf16-lora"), ("replicate", "bf16-lora"), ("shard", "fp16-mixed")])
def test_a_step_reads_its_device_once(processes, preset, monkeypatch):
    world = ALONE if processes == "one" else Two()
    stepper = stepper_of(preset, world, SimpleNamespace(replicas=1, sent=list) if processes == "shard" else None)
    batches = [collate(rows(4)[at : at + 2], pad_id=0, device_type="cuda").to(META) for at in (0, 2)]
    reads = []

    def read(*scalars):
        reads.append([(scalar.device, scalar.shape) for scalar in scalars])
        return [3.0, 4.0]

    monkeypatch.setattr(step, "read_on_host", read)
    for number in (1, 2):
        with planned_for("cuda"), NoHostReads() as mode:
            result = stepper(batches, step=number, learning_rate=1e-3, watch_changes=False)
        assert mode.seen
    assert reads == [[(META, ())] * 2] * 2
    scale = stepper.loss_scale.scale if stepper.loss_scale else 1.0
    shares = {"one": (3.0, 4.0), "replicate": (6.0, 4.0), "shard": (6.0, 4.0 * 2**0.5)}
    assert (result.loss, result.gradient_norm * scale) == pytest.approx(shares[processes])
    # weights before the forward, and everything that is known after the backward together
    assert world is ALONE or len(world.sums) == 2 * 2

"""A and B are cast down once for all micro-batches of a step, and the copies follow every write and end with the step."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from isotype.config.schema import TrainSection
from isotype.lora import products as module
from isotype.lora.products import copies_kept, narrow, stacked
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.accumulate import GradientAccumulator
from isotype.precision.apply import apply_precision
from isotype.tasks.language.batches import collate
from isotype.tasks.language.loss import batch_loss_sum
from isotype.training import step
from isotype.training.memory.recomputation import Checkpointing, apply_checkpointing
from isotype.training.optimizer import build_optimizer
from tests.models import lora, rows, tiny
from tests.worlds import Two

BF16 = torch.bfloat16


class Casts(TorchDispatchMode):
    """While active, `seen` gets the storage of each fp32 matrix that PyTorch casts to bf16."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") == BF16 and args[0].dtype == torch.float32:
            self.seen.append(storage(args[0]))
        return function(*args, **(kwargs or {}))

    def of(self, model):
        """Those of the model's adapters, in order."""
        adapters = {storage(p) for p in model.parameters() if p.requires_grad}
        return [s for s in self.seen if s in adapters]


def storage(tensor):
    return tensor.untyped_storage()._cdata


def stepper_of(checkpointing="none"):
    model = lora(tiny("llama")).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
    precision = PRESETS["bf16-lora"]
    apply_precision(model, precision, device_type="cpu")
    optimize(model, precision)
    apply_checkpointing(model, Checkpointing(checkpointing, (0, 1) if checkpointing != "none" else (), 2))
    train = TrainSection(accumulate=3)
    accumulator = GradientAccumulator(model.parameters(), dtype=precision.grads)
    optimizer = build_optimizer(model, train, precision, accumulator.gradient)
    return step.Stepper(model, optimizer, accumulator, precision, train, partial(batch_loss_sum, dtype=precision.loss))


BATCHES = [collate(rows(6)[at : at + 2], pad_id=0) for at in (0, 2, 4)]


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_a_step_casts_each_matrix_once(checkpointing, monkeypatch):
    s = stepper_of(checkpointing)
    with Casts() as casts:
        loss = s.accumulate(BATCHES)
    adapters = {storage(p) for p in s.model.parameters() if p.requires_grad}
    assert len(adapters) == 28
    assert sorted(casts.of(s.model)) == sorted(adapters)
    assert module._kept is None
    got = [g.clone() for g in s.accumulator.gradients()]
    assert all(g.dtype == torch.float32 for g in got)

    monkeypatch.setattr(step, "copies_kept", nullcontext)
    s.accumulator.zero()
    with Casts() as casts:
        assert torch.equal(s.accumulate(BATCHES), loss)
    assert all(torch.equal(a, b) for a, b in zip(got, s.accumulator.gradients()))
    # without the copies every call casts, and every recompute again
    assert len(casts.of(s.model)) == 28 * 3 * (1 if checkpointing == "none" else 2)


def test_the_next_step_casts_the_updated_matrices():
    s = stepper_of()
    with Casts() as casts:
        for number in (1, 2):
            s(BATCHES, step=number, learning_rate=1e-2, watch_changes=False)
    assert len(casts.of(s.model)) == 2 * 28
    fresh = stepper_of()
    fresh.model.load_state_dict(s.model.state_dict())
    assert torch.equal(fresh.accumulate(BATCHES), s.accumulate(BATCHES))


@pytest.mark.parametrize(("processes", "each"), [("replicate", 1), ("shard", 3)])
def test_each_process_of_replicated_ones_casts_once_a_step_and_one_that_shares_the_model_once_a_pass(processes, each):
    s = stepper_of()
    s.world = Two()
    if processes == "shard":
        s.sharding = SimpleNamespace(replicas=1, sent=list)
    else:
        s.accumulator.close()
        s.accumulator = GradientAccumulator(s.model.parameters(), processes=s.world)
    for number in (1, 2):
        with Casts() as casts:
            # at a rate of 0 the weights stay, so that only the end of the step ends the copies
            result = s(BATCHES, step=number, learning_rate=0.0, watch_changes=False)
        assert len(casts.of(s.model)) == 28 * each
        assert module._kept is None
    # the sum over both, of which each divides by the weight of both
    assert result.loss == pytest.approx(float(stepper_of().accumulate(BATCHES)), rel=1e-6)


def test_one_micro_batch_holds_no_copies():
    s = stepper_of("layers")
    with Casts() as casts:
        s.accumulate(BATCHES[:1])
    assert len(casts.of(s.model)) == 2 * 28


def test_a_matrix_that_was_written_is_cast_again():
    a, b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 4))
    with copies_kept():
        first, both = narrow(a, BF16), stacked([a, b], BF16)
        assert narrow(a, BF16) is first
        assert stacked([a, b], BF16) is both
        with torch.no_grad():
            a.add_(1)
        assert torch.equal(narrow(a, BF16), a.to(BF16))
        assert torch.equal(stacked([a, b], BF16), torch.cat((a, b)).to(BF16))
        # past the version counter: another storage
        a.data = torch.full((2, 4), 7.0)
        assert torch.equal(narrow(a, BF16), a.to(BF16))
        assert narrow(a, torch.float32) is a
        assert torch.equal(narrow(a, torch.float16), a.to(torch.float16))
    assert narrow(b, BF16) is not narrow(b, BF16)


def test_tensors_of_inference_mode_are_cast_each_time():
    with torch.inference_mode(), copies_kept():
        a = torch.randn(2, 4)
        assert narrow(a, BF16) is not narrow(a, BF16)

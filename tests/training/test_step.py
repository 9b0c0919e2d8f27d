"""One optimizer step: accumulation, clipping, numbers that are not finite, and where it waits for
its device.
"""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.api import assemble_stepper, evaluate, gradient_norm, plan_device
from tests.host_reads import NoHostReads
from tests.models import lora, rows, stepper, tiny
from tests.worlds import Two

from isotype.config.schema import TrainSection
from isotype.distributed.world import ALONE
from isotype.errors import RunError
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import batch_loss_sum

CPU = torch.device("cpu")


def batches(*sizes, count=8):
    every = rows(count)
    made, at = [], 0
    for size in sizes:
        made.append(collate(every[at : at + size], pad_id=0))
        at += size
    return made


def test_accumulation_is_normalised_by_tokens():
    """1 x 8 equals 8 x 1 and 3 + 5, though the rows have different numbers of tokens."""
    gradients = []
    for split in ((8,), (1,) * 8, (3, 5)):
        s = stepper(tiny())
        loss = s.accumulate(batches(*split))
        gradients.append((float(loss), [g.clone() for g in s.accumulator.gradients()]))
    loss, reference = gradients[0]
    for other_loss, others in gradients[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for a, b in zip(reference, others, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)


def test_loss_is_transformers_own():
    s = stepper(tiny())
    batch = batches(8)[0]
    theirs = s.model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
    ).loss
    assert float(s.accumulate([batch])) == pytest.approx(float(theirs.detach()), rel=1e-6)


def test_clipping_bounds_what_the_optimizer_sees():
    s = stepper(tiny(), clip=1e-3)
    seen = []
    s.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(gradient_norm(s.accumulator.gradients())))
    )
    result = s(batches(4), step=1, learning_rate=0.0, watch_changes=False)
    assert result.gradient_norm > 1e-2
    assert seen[0] == pytest.approx(1e-3, rel=1e-2)


def test_the_share_that_an_update_changed_comes_with_the_next_steps_result():
    s = stepper(tiny())
    shares = [
        s(batches(2), step=step, learning_rate=rate, watch_changes=step < 3).share_changed
        for step, rate in enumerate((0.0, 1e-3, 1e-3, 1e-3), 1)
    ]
    assert shares[:2] == [None, 0.0]
    assert shares[2] > 0.9
    assert shares[3] is None


def poisoned_weight(s):
    s.model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")


def poisoned_activation(s):
    s.model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda m, a, out: out * float("inf")
    )


@pytest.mark.parametrize(
    ("poison", "named"),
    [
        (poisoned_weight, r"parameter model\.layers\.1\.mlp\.down_proj"),
        (poisoned_activation, r"model\.layers\.0"),
    ],
)
def test_a_non_finite_loss_stops_before_any_weight_changes(poison, named):
    s = stepper(tiny())
    poison(s)
    before = copy.deepcopy(s.model.state_dict())
    with pytest.raises(RunError, match=rf"NF001 step 7: the loss is not finite.*{named}"):
        s(batches(2, 2), step=7, learning_rate=1e-3, watch_changes=False)
    assert all(
        torch.equal(a, b) or a.isnan().any()
        for a, b in zip(before.values(), s.model.state_dict().values(), strict=True)
    )


def test_a_non_finite_gradient_names_the_parameter():
    s = stepper(tiny())
    s.model.model.norm.weight.register_hook(lambda g: g * float("nan"))
    with pytest.raises(RunError, match=r"the gradient is not finite.*model\.norm\.weight"):
        s(batches(2), step=3, learning_rate=1e-3, watch_changes=False)


def test_fp16_overflow_halves_the_scale_and_a_collapse_is_reported():
    s = stepper(tiny(), "fp16-mixed")
    s.model.model.norm.weight.register_hook(lambda g: g * float("inf"))
    before = s.model.model.norm.weight.detach().clone()
    result = s(batches(2), step=1, learning_rate=1e-3, watch_changes=False)
    assert result.has_overflow
    assert (result.loss_scale, s.loss_scale.scale) == (2.0**16, 2.0**15)
    assert torch.equal(before, s.model.model.norm.weight)
    for step in range(2, 17):
        s(batches(2), step=step, learning_rate=1e-3, watch_changes=False)
    with pytest.raises(RunError, match=r"FP001.*collapsed"):
        s(batches(2), step=17, learning_rate=1e-3, watch_changes=False)


def test_evaluation_does_not_depend_on_the_batch_size():
    model = stepper(tiny()).model
    losses = {
        size: evaluate(model, rows(13), batch_size=size, pad_id=0, device=CPU)
        for size in (1, 3, 13)
    }
    assert len({e.weight for e in losses.values()}) == 1
    reference = losses[1].loss
    assert all(e.loss == pytest.approx(reference, rel=1e-6) for e in losses.values())


# --- A step waits for its device at one place: where it reads the loss and the norm. Everything
# else runs on tensors without values.


META = torch.device("meta")


def stepper_of(preset, world, sharding, loss_sum=batch_loss_sum):
    precision, train = PRESETS[preset], TrainSection(accumulate=2)
    model = lora(tiny("llama", dtype=torch.bfloat16)).train()
    optimize(model, precision, device_type="cuda")
    apply_precision(model, precision, device_type="cuda")
    model.to(META)
    return assemble_stepper(
        model,
        train,
        precision,
        partial(loss_sum, dtype=precision.loss),
        world=world,
        sharding=sharding,
    )


@pytest.mark.parametrize(
    ("processes", "preset"),
    [("one", "bf16-lora"), ("replicate", "bf16-lora"), ("shard", "fp16-mixed")],
)
def test_a_step_reads_its_device_once(processes, preset, monkeypatch):
    world = ALONE if processes == "one" else Two()
    stepper = stepper_of(
        preset,
        world,
        SimpleNamespace(replica_count=1, sent_dtypes=list) if processes == "shard" else None,
    )
    batches = [
        collate(rows(4)[at : at + 2], pad_id=0, device_type="cuda").to(META) for at in (0, 2)
    ]
    reads = []

    def read(*scalars):
        reads.append([(scalar.device, scalar.shape) for scalar in scalars])
        return [3.0, 4.0, 0.25][: len(scalars)]

    monkeypatch.setattr("isotype.training.step.read_on_host", read)
    for number in (1, 2):
        with plan_device("cuda"), NoHostReads() as mode:
            result = stepper(batches, step=number, learning_rate=1e-3, watch_changes=True)
        assert mode.seen
        assert result.share_changed == (0.25 if number == 2 else None), (
            "of the update of the step before"
        )
    assert reads == [[(META, ())] * 2, [(META, ())] * 3]
    scale = stepper.loss_scale.scale if stepper.loss_scale else 1.0
    shares = {"one": (3.0, 4.0), "replicate": (6.0, 4.0), "shard": (6.0, 4.0 * 2**0.5)}
    assert (result.loss, result.gradient_norm * scale) == pytest.approx(shares[processes])
    # weights before the forward, and everything that is known after the backward together
    assert world is ALONE or len(world.sums) == 2 * 2

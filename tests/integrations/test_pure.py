"""bf16-pure in trainers: fp32 sums of gradients, updates that arrive, a checkpoint that goes on, an exact way back."""

import pytest
import torch
from transformers import Trainer, TrainerCallback

from isotype.errors import UsageError
from isotype.integrations import attach
from tests.integrations.trainers import TRAINERS, Setting, curve, plain

pytest.importorskip("trl")


def setting(models, **more):
    return Setting(models, "full", bf16=True, stored=torch.bfloat16, rate=more.pop("rate", 2e-3), more=more)


def weights(trainer):
    return torch.cat([p.detach().float().flatten() for _, p in sorted(trainer.model.named_parameters())])


class Watching(TrainerCallback):
    """What the trainer holds before each update."""

    def __init__(self, attached):
        self.attached, self.seen = attached, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            self.seen.append((p.dtype, None if p.grad is None else p.grad.dtype, self.attached.gradient(p).dtype))


@pytest.mark.parametrize("name", ["SFT", pytest.param("Trainer", marks=pytest.mark.full), pytest.param("DPO", marks=pytest.mark.full)])
def test_gradients_are_summed_in_fp32_and_the_curve_is_the_unmodified_trainers(name, models):
    want = curve(TRAINERS[name](setting(models, gradient_accumulation_steps=2, max_grad_norm=0.1)))
    trainer = TRAINERS[name](setting(models, gradient_accumulation_steps=2, max_grad_norm=0.1))
    attached = attach(trainer, "bf16-pure", quiet=True)
    watching = Watching(attached)
    trainer.add_callback(watching)
    got = curve(trainer)
    assert set(watching.seen) == {(torch.bfloat16, None, torch.float32)}
    assert got == pytest.approx(want, rel=0.03)


def moved(models, rate, precision):
    trainer = plain(setting(models, rate=rate, max_steps=6, lr_scheduler_type="constant"))
    before = weights(trainer)
    if precision:
        attach(trainer, precision, quiet=True, preflight=False, record=False)
    curve(trainer)
    return (weights(trainer) - before).double()


def test_small_updates_arrive_where_rounding_to_nearest_loses_them(models):
    """Along the movement that fp32 weights make."""
    want = moved(models, 1e-5, "bf16-mixed")
    shares = {way: float(moved(models, 1e-5, way) @ want / (want @ want)) for way in (None, "bf16-pure")}
    assert shares[None] < 0.3
    assert 0.6 < shares["bf16-pure"] < 1.4


def test_a_resumed_run_is_bit_for_bit_the_whole_one(models, tmp_path):
    more = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    runs = []
    for resumed in (False, True):
        trainer = plain(setting(models, **more))
        attach(trainer, "bf16-pure", quiet=True, preflight=False)
        torch.manual_seed(0)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumed else None)
        moments = [s["exp_avg"] for s in trainer.optimizer.optimizer.state.values()]
        assert {m.dtype for m in moments} == {torch.float32}
        runs.append(weights(trainer))
    assert torch.equal(*runs)


def test_a_trainer_that_makes_another_optimizer_is_refused_before_the_first_step(models):
    class Own(Trainer):
        def create_optimizer(self, *args):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
            return self.optimizer

    trainer = plain(setting(models), Own)
    attach(trainer, "bf16-pure", quiet=True)
    with pytest.raises(UsageError, match=r"Own\.create_optimizer at test_pure\.py:\d+ makes SGD: it would find no gradient"):
        trainer.train()

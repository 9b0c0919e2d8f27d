"""Guards of an attached trainer: NF001 with the module, logs that say whether updates took, evaluation over tokens."""

import pytest
import torch

from isotype.errors import RunError, UsageError
from isotype.integrations import attach
from tests.integrations.trainers import TRAINERS, Setting, plain

pytest.importorskip("trl")


def test_a_non_finite_loss_stops_with_the_module_before_any_weight_moves(models):
    trainer = plain(Setting(models, "full"))
    attach(trainer, "fp32", quiet=True, preflight=False)
    assert trainer.args.logging_nan_inf_filter is False
    layer = trainer.model.model.layers[1].mlp
    hook = layer.down_proj.register_forward_hook(lambda m, args, out: out * float("inf") if m.training else out)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with pytest.raises(RunError, match=r"NF001 step 1: the loss is not finite, first in the output of model.layers.1.mlp"):
        trainer.train()
    hook.remove()
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())


def test_a_non_finite_gradient_stops_with_its_parameter(models):
    trainer = plain(Setting(models, "full"))
    attach(trainer, "fp32", quiet=True, preflight=False)
    weight = trainer.model.model.layers[0].self_attn.q_proj.weight
    weight.register_hook(lambda g: g * float("nan"))
    with pytest.raises(RunError, match=r"the gradient is not finite, first in the gradient of model.layers.0.self_attn.q_proj.weight"):
        trainer.train()


def test_logs_say_which_share_of_the_weights_changed(models):
    trainer = plain(Setting(models, "full"))
    attach(trainer, "fp32", quiet=True, preflight=False)
    trainer.train()
    shares = [row["share_changed"] for row in trainer.state.log_history if "loss" in row]
    assert len(shares) == 3
    assert min(shares) > 0.9
    frozen = plain(Setting(models, "full", rate=0.0))
    attach(frozen, "fp32", quiet=True, preflight=False)
    frozen.train()
    assert {row["share_changed"] for row in frozen.state.log_history if "loss" in row} == {0.0}


@pytest.mark.parametrize("name", ["Trainer", "DPO"])
def test_an_evaluation_is_the_trainers_own(name, models):
    losses = []
    for on in (False, True):
        trainer = TRAINERS[name](Setting(models))
        if on:
            attach(trainer, "fp32", quiet=True, preflight=False)
        losses.append(trainer.evaluate(eval_dataset=trainer.train_dataset)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_full_evaluation_in_bf16_leaves_the_model_as_it_was(models):
    unmodified = plain(Setting(models, bf16=True, more={"bf16_full_eval": True}))
    unmodified.evaluate()
    assert {p.dtype for p in unmodified.model.parameters()} == {torch.bfloat16}
    trainer = plain(Setting(models, bf16=True, more={"bf16_full_eval": True}))
    attach(trainer, "bf16-lora", quiet=True)
    before = {n: p.dtype for n, p in trainer.model.named_parameters()}
    trainer.evaluate()
    assert {n: p.dtype for n, p in trainer.model.named_parameters()} == before
    assert torch.float32 in set(before.values())
    assert trainer.args.bf16_full_eval


@pytest.mark.skipif(torch.cuda.is_available(), reason="Liger's kernels run there")
@pytest.mark.parametrize("name", ["Trainer", "SFT"])
def test_ligers_kernels_without_a_gpu_are_refused_by_their_option(name, models):
    trainer = TRAINERS[name](Setting(models, bf16=True, more={"use_liger_kernel": True}))
    with pytest.raises(UsageError, match="use_liger_kernel=True in the trainer's arguments") as caught:
        attach(trainer, "bf16-lora")
    assert "use_liger_kernel=False" in caught.value.fix
    trainer.args.use_liger_kernel = False
    attach(trainer, "bf16-lora", quiet=True)
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps

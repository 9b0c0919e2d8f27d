"""Guards of an attached trainer: NF001 with the module, logs that say whether updates took,
evaluation over tokens; and bf16-pure.
"""

import pytest
import torch
from transformers import Trainer, TrainerCallback

from isotype.errors import RunError, UsageError
from isotype.integrations import attach
from tests.integrations.trainers import TRAINERS, Setting, attached, curve, plain

pytest.importorskip("trl")


def test_a_non_finite_loss_stops_with_the_module_before_any_weight_moves(models):
    trainer = attached(plain(Setting(models, "full")), "fp32", preflight=False)
    assert trainer.args.logging_nan_inf_filter is False
    layer = trainer.model.model.layers[1].mlp
    hook = layer.down_proj.register_forward_hook(
        lambda m, args, out: out * float("inf") if m.training else out
    )
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with pytest.raises(
        RunError,
        match=r"NF001 step 1: the loss is not finite, first in the output of model.layers.1.mlp",
    ):
        trainer.train()
    hook.remove()
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())


def test_a_non_finite_gradient_stops_with_its_parameter(models):
    trainer = attached(plain(Setting(models, "full")), "fp32", preflight=False)
    weight = trainer.model.model.layers[0].self_attn.q_proj.weight
    weight.register_hook(lambda g: g * float("nan"))
    with pytest.raises(
        RunError,
        match=r"the gradient is not finite, first in the gradient of model.layers.0.self_attn.q_proj.weight",
    ):
        trainer.train()


def test_an_evaluation_is_the_trainers_own(models):
    losses = []
    for on in (False, True):
        trainer = TRAINERS["DPO"](Setting(models))
        if on:
            attach(trainer, "fp32", quiet=True, preflight=False)
        losses.append(trainer.evaluate(eval_dataset=trainer.train_dataset)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_full_evaluation_in_bf16_leaves_the_model_as_it_was(models):
    unmodified = plain(Setting(models, bf16=True, more={"bf16_full_eval": True}))
    unmodified.evaluate()
    assert {p.dtype for p in unmodified.model.parameters()} == {torch.bfloat16}
    trainer = attached(
        plain(Setting(models, bf16=True, more={"bf16_full_eval": True})), "bf16-lora"
    )
    before = {n: p.dtype for n, p in trainer.model.named_parameters()}
    trainer.evaluate()
    assert {n: p.dtype for n, p in trainer.model.named_parameters()} == before
    assert torch.float32 in set(before.values())
    assert trainer.args.bf16_full_eval


@pytest.mark.skipif(torch.cuda.is_available(), reason="Liger's kernels run there")
def test_ligers_kernels_without_a_gpu_are_refused_by_their_option(models):
    trainer = TRAINERS["SFT"](Setting(models, bf16=True, more={"use_liger_kernel": True}))
    with pytest.raises(
        UsageError, match="use_liger_kernel=True in the trainer's arguments"
    ) as caught:
        attach(trainer, "bf16-lora")
    assert "use_liger_kernel=False" in caught.value.fix
    trainer.args.use_liger_kernel = False
    attach(trainer, "bf16-lora", quiet=True)


# --- bf16-pure in trainers: gradients in the declared dtype, updates that arrive, a checkpoint that
# goes on, an exact way back.


def setting(models, **more):
    return Setting(
        models, "full", bf16=True, stored=torch.bfloat16, rate=more.pop("rate", 2e-3), more=more
    )


def weights(trainer):
    return torch.cat(
        [p.detach().float().flatten() for _, p in sorted(trainer.model.named_parameters())]
    )


class Watching(TrainerCallback):
    """What the trainer holds before each update."""

    def __init__(self, attached):
        self.attached, self.seen = attached, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            self.seen.append(
                (p.dtype, None if p.grad is None else p.grad.dtype, self.attached.gradient(p).dtype)
            )


@pytest.mark.parametrize(
    "name",
    [
        "SFT",
        pytest.param("Trainer", marks=pytest.mark.full),
        pytest.param("DPO", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("grads", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_gradients_are_summed_as_declared_and_the_curve_is_the_unmodified_trainers(
    name, grads, models
):
    want = curve(TRAINERS[name](setting(models, gradient_accumulation_steps=2, max_grad_norm=0.1)))
    trainer = TRAINERS[name](setting(models, gradient_accumulation_steps=2, max_grad_norm=0.1))
    attached = attach(trainer, f"bf16-pure grads={grads}", quiet=True)
    watching = Watching(attached)
    trainer.add_callback(watching)
    got = curve(trainer)
    if grads == "fp32":
        assert set(watching.seen) == {(torch.bfloat16, None, torch.float32)}
    else:
        assert set(watching.seen) == {(torch.bfloat16, torch.bfloat16, torch.bfloat16)}
    assert got == pytest.approx(want, rel=0.03)


def test_a_resumed_run_is_bit_for_bit_the_whole_one(models, tmp_path):
    more = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    runs = []
    for resumed in (False, True):
        trainer = attached(plain(setting(models, **more)), "bf16-pure", preflight=False)
        torch.manual_seed(0)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumed else None)
        moments = [s["exp_avg"] for s in trainer.optimizer.optimizer.state.values()]
        assert {m.dtype for m in moments} == {torch.bfloat16}
        runs.append(weights(trainer))
    assert torch.equal(*runs)


def test_a_trainer_that_makes_another_optimizer_is_refused_before_the_first_step(models):
    class Own(Trainer):
        def create_optimizer(self, *args):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
            return self.optimizer

    trainer = attached(plain(setting(models), Own), "bf16-pure")
    with pytest.raises(
        UsageError,
        match=r"Own\.create_optimizer at test_guards\.py:\d+ makes SGD: it would round most updates away",
    ):
        trainer.train()

"""Generation of attached trainers in the middle of training, and their reference models."""

import math

import pytest
import torch
from transformers import TrainerCallback

from isotype.integrations import attach, detach
from tests.integrations.trainers import TRAINERS, WORDS, Setting, attached, curve, tokenizer, words
from tests.models import tiny

pytest.importorskip("trl")


class Generates(TrainerCallback):
    """What users write: tokens for a prompt after every step, through the trainer's model as
    callbacks are given it.
    """

    def __init__(self, **options):
        self.options, self.made = options, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        ids = tokenizer()(words(1, 4), return_tensors="pt")
        self.made.append(model.generate(**ids, max_new_tokens=6, **self.options)[0].tolist())


@pytest.mark.parametrize(
    ("name", "form", "precision", "sampled"),
    [
        ("SFT", "lora", "bf16-lora", True),
        pytest.param("DPO", "qlora", "nf4-lora", False, marks=pytest.mark.full),
        pytest.param("GRPO", "lora", "bf16-lora", True, marks=pytest.mark.full),
    ],
)
def test_a_callbacks_generation_leaves_no_trace_on_training(name, form, precision, sampled, models):
    curves = []
    for generating in (False, True):
        trainer = attached(
            TRAINERS[name](Setting(models, form, bf16=True, checkpointing=True)),
            precision,
            preflight=False,
        )
        if generating:
            callback = Generates(do_sample=sampled)
            trainer.add_callback(callback)
        curves.append(curve(trainer))
    assert curves[0] == curves[1]
    if sampled:
        assert len({tuple(ids) for ids in callback.made}) == 3


def test_rollouts_draw_other_completions_at_every_step(models):
    trainer = attached(
        TRAINERS["GRPO"](Setting(models, more={"max_completion_length": 12})), "fp32"
    )
    seen = []
    trainer.reward_funcs[0] = lambda completions, **_: [
        seen.append(c) or len(set(c.split())) for c in completions
    ]
    trainer.train()
    assert len(set(seen)) > len(seen) * 0.7


# --- A trainer's reference model: the policy's own numbers before step 1, claimed by its dtypes,
# and afterwards what it was.


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A folder whose model has weights, those of norms too, that bf16 rounds and that make unlike
    log-probabilities.
    """
    folder = tmp_path_factory.mktemp("uneven")
    model = tiny("qwen2", vocab_size=WORDS + 3)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.rand_like(parameter) * 3
            ) if parameter.dim() == 1 else parameter.mul_(8)
    model.save_pretrained(folder / "qwen2-model")
    tokenizer().save_pretrained(folder / "qwen2-model")
    return folder


def trainer_of(name, folder, tmp_path, stored=torch.float32):
    return TRAINERS[name](
        Setting(
            folder,
            "full",
            bf16=True,
            stored=stored,
            more={"max_steps": 1, "output_dir": str(tmp_path)},
        )
    )


@pytest.mark.parametrize(
    ("name", "precision", "stored"),
    [("DPO", "bf16-mixed", torch.float32), ("GRPO", "bf16-mixed", torch.bfloat16),
     pytest.param("DPO", "bf16-pure", torch.float32, marks=pytest.mark.full)],
)  # fmt: skip
def test_policy_and_reference_are_equal_before_step_1(name, precision, stored, uneven, tmp_path):
    trainer = attached(trainer_of(name, uneven, tmp_path, stored), precision)
    trainer.train()
    first = next(row for row in trainer.state.log_history if "loss" in row)
    if name == "GRPO":
        assert first["kl"] == 0.0
    else:
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-7)


@pytest.mark.parametrize(
    "precision", ["bf16-mixed", pytest.param("bf16-pure", marks=pytest.mark.full)]
)
def test_a_reference_used_during_training_is_afterwards_what_it_was(precision, uneven, tmp_path):
    trainer = trainer_of("DPO", uneven, tmp_path)
    reference = trainer.ref_model

    @torch.no_grad()
    def answer():
        return reference(input_ids=torch.arange(3, 11)[None]).logits

    class Asking(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            assert answer().isfinite().all()

    trainer.add_callback(Asking())
    before, logits = (
        {name: p.detach().clone() for name, p in reference.named_parameters()},
        answer(),
    )
    attributes = {name: set(module.__dict__) for name, module in reference.named_modules()}
    claims = {claim.owner: claim.outcome for claim in attach(trainer, precision, quiet=True).claims}
    assert claims["checkpoint, ref_model"] == (
        "base bf16" if precision == "bf16-pure" else "fp32 as trained, bf16 where that is exact"
    )
    trainer.train()
    assert detach(trainer) == []
    assert {name: set(module.__dict__) for name, module in reference.named_modules()} == attributes
    assert {name: p.dtype for name, p in reference.named_parameters()} == {
        name: p.dtype for name, p in before.items()
    }
    assert all(torch.equal(p, before[name]) for name, p in reference.named_parameters())
    assert torch.equal(answer(), logits)

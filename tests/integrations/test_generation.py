"""Generation by callbacks, rollouts and predict_with_generate of attached trainers, in the middle of training."""

import pytest
from transformers import TrainerCallback

from isotype.integrations import attach
from tests.integrations.trainers import TRAINERS, Setting, curve, tokenizer, words

pytest.importorskip("trl")


class Generates(TrainerCallback):
    """What users write: tokens for a prompt after every step, through the trainer's model as callbacks are given it."""

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
        trainer = TRAINERS[name](Setting(models, form, bf16=True, checkpointing=True))
        attach(trainer, precision, quiet=True, preflight=False)
        if generating:
            callback = Generates(do_sample=sampled)
            trainer.add_callback(callback)
        curves.append(curve(trainer))
    assert curves[0] == curves[1]
    if sampled:
        assert len({tuple(ids) for ids in callback.made}) == 3


def test_rollouts_draw_other_completions_at_every_step(models):
    trainer = TRAINERS["GRPO"](Setting(models, more={"max_completion_length": 12}))
    attach(trainer, "fp32", quiet=True)
    seen = []
    trainer.reward_funcs[0] = lambda completions, **_: [seen.append(c) or len(set(c.split())) for c in completions]
    trainer.train()
    assert len(set(seen)) > len(seen) * 0.7

"""`model.generate` in a callback of an unmodified Hugging Face Trainer: right tokens, and the run that there would be without it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from isotype import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.training.memory.recomputation import Checkpointing, apply_checkpointing
from tests.models import lora, quantised, tiny
from tests.optimize.models import batch

PROMPT = torch.arange(3, 9)[None]
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 1.5}


class Rows(torch.utils.data.Dataset):
    def __init__(self, count=12):
        self.rows = batch(count, length=16)

    def __len__(self):
        return len(self.rows["input_ids"])

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.rows.items()}


class Generates(TrainerCallback):
    """After every step, and where the next epoch's order is about to be drawn; in training mode after odd steps."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **_):
        training = model.training
        model.train(state.global_step % 2 == 1)
        for settings in (GREEDY, SAMPLED, SAMPLED):
            self.seen.append(model.generate(input_ids=PROMPT, max_new_tokens=4, use_cache=True, pad_token_id=0, **settings))
        model.train(training)

    def on_epoch_begin(self, args, state, control, model=None, **_):
        self.seen.append(model.generate(input_ids=PROMPT, max_new_tokens=3, pad_token_id=0, **SAMPLED))


def trained(model, tmp_path, *, generates, **arguments):
    settings = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=4, per_device_train_batch_size=4, report_to=[], learning_rate=1e-2,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=5, **arguments,
    )  # fmt: skip
    callback = Generates()
    Trainer(model, settings, train_dataset=Rows(), callbacks=[callback] if generates else []).train()
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}, callback.seen


def made(preset, adapter):
    model = tiny("qwen2")
    if preset == "nf4-lora":
        model = quantised(model)
    if adapter is not None:
        model = lora(model, lora_dropout=0.2, **adapter)
    precision = PRESETS[preset]
    optimize(model, precision)
    if preset != "fp32":
        apply_precision(model, precision, device_type="cpu")
    return model


LORA, RSLORA, DORA = {}, {"use_rslora": True}, {"use_dora": True}
WHOLE = {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "v_proj", "down_proj"]}
MORE = [
    ("fp32", LORA), ("fp16-mixed", LORA), ("bf16-pure", None), ("nf4-lora", RSLORA), ("nf4-lora", DORA), ("bf16-lora", DORA),
    ("bf16-lora", WHOLE),
]  # fmt: skip
CASES = [
    *[("bf16-lora", LORA), ("nf4-lora", LORA), ("bf16-mixed", None), ("nf4-lora", WHOLE)],
    *(pytest.param(*case, marks=pytest.mark.full) for case in MORE),
]


@pytest.mark.parametrize(("preset", "adapter"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v) if v else str(v))
def test_training_continues_bit_for_bit_after_generation(preset, adapter, tmp_path):
    model = made(preset, adapter)
    twin = copy.deepcopy(model)
    expected, _ = trained(twin, tmp_path, generates=False)
    got, seen = trained(model, tmp_path, generates=True)
    assert len(seen) == 4 * 3 + 2
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    start = dict(made(preset, adapter).named_parameters())
    assert any(not torch.equal(got[name], start[name]) for name in got), "something was trained"
    sampled = list(zip(seen[2::3], seen[3::3]))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in sampled), "two samples in a row are two samples"


@pytest.mark.parametrize("checkpointed", ["trainer", "isotype"])
def test_tokens_in_training_mode_are_right_under_checkpointing(tmp_path, checkpointed):
    # without dropout both modes give the same tokens: a lost cache shows
    model = lora(tiny())
    optimize(model)
    seen = []

    class Compares(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            seen.append([model.train(mode).generate(input_ids=PROMPT, max_new_tokens=8, **GREEDY) for mode in (True, False)])
            model.train()

    if checkpointed == "isotype":
        apply_checkpointing(model, Checkpointing("layers", (0, 1), 2))
    settings = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=checkpointed == "trainer", gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    Trainer(model, settings, train_dataset=Rows(), callbacks=[Compares()]).train()
    assert len(seen) == 2
    assert all(torch.equal(*pair) for pair in seen)


@pytest.mark.parametrize("how", ["optimize", "apply_precision"])
def test_norms_in_fp32_and_head_in_bf16(tmp_path, how):
    """huggingface/peft issue 1515: generate() in a callback runs outside autocast, fp32 norms widen the stream, a bf16 layer refuses."""
    from peft import prepare_model_for_kbit_training

    def setup():
        prepared = prepare_model_for_kbit_training(quantised(tiny()), use_gradient_checkpointing=False)
        prepared.lm_head.to(torch.bfloat16)
        return lora(prepared)

    with pytest.raises(RuntimeError, match="dtype"):
        trained(setup(), tmp_path, generates=True, bf16=True)
    model = setup()
    if how == "apply_precision":
        apply_precision(model, PRESETS["nf4-lora"], device_type="cpu")
    else:
        optimize(model, PRESETS["nf4-lora"])
    _, seen = trained(model, tmp_path, generates=True, bf16=True)
    assert len(seen) == 14

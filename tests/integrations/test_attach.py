"""attach and detach: the same curves, an exact way back, one owner of precision, and what is
refused.
"""

import re

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from isotype.errors import PreflightError, UsageError
from isotype.integrations import attach, detach
from tests.api import TESTED_VERSIONS, find_fused_head
from tests.integrations.trainers import TRAINERS, Encoded, Setting, attached, curve, plain

pytest.importorskip("trl")


def trainer_of(name, models, form="lora", **more):
    return TRAINERS[name](Setting(models, form, **more))


# --- the same training


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param("Trainer", "full", marks=pytest.mark.full),
        ("SFT", "lora"),
        pytest.param("DPO", "lora", marks=pytest.mark.full),
        pytest.param("GRPO", "lora", marks=pytest.mark.full),
    ],
)
def test_curves_in_fp32_are_the_unmodified_trainers(name, form, models):
    want = curve(trainer_of(name, models, form))
    trainer = trainer_of(name, models, form)
    attached = attach(trainer, "fp32", quiet=True)
    assert {"head", "norm"} <= {e.part for e in attached.manifest.replaced}
    assert curve(trainer) == pytest.approx(want, rel=1e-5, abs=1e-5)
    answered = [head.calls for m in trainer.model.modules() if (head := find_fused_head(m))]
    if name != "Trainer":
        assert [set(calls) for calls in answered] == [{"linear_log_probs"}]


# --- the way back


def untouched_state(trainer):
    return {
        "parameters": {n: p.detach().clone() for n, p in trainer.model.named_parameters()},
        "instances": {n: set(m.__dict__) for n, m in trainer.model.named_modules()},
        "hooks": {
            n: (len(m._forward_hooks), len(m._forward_pre_hooks))
            for n, m in trainer.model.named_modules()
        },
        "trainer": set(trainer.__dict__),
        "callbacks": [type(c).__name__ for c in trainer.callback_handler.callbacks],
        "arguments": {
            k: v
            for k, v in vars(trainer.args).items()
            if isinstance(v, bool | int | float | str | None)
        },
        "amp": trainer.accelerator.native_amp,
    }


def same_state(before, after):
    for name, value in before["parameters"].items():
        assert after["parameters"][name].dtype == value.dtype
        assert torch.equal(after["parameters"][name], value), name
    assert {k: v for k, v in after.items() if k != "parameters"} == {
        k: v for k, v in before.items() if k != "parameters"
    }


@pytest.mark.parametrize(
    ("name", "form", "precision"),
    [
        pytest.param("SFT", "qlora", "nf4-lora", marks=pytest.mark.full),
        ("DPO", "full", "bf16-mixed"),
        pytest.param("SFT", "lora", "bf16-lora", marks=pytest.mark.full),
    ],
)
def test_detach_leaves_the_next_step_bit_equal_to_an_untouched_trainers(
    name, form, precision, models
):
    want = curve(trainer_of(name, models, form, bf16=True))
    trainer = trainer_of(name, models, form, bf16=True)
    before = untouched_state(trainer)
    attach(trainer, precision, quiet=True)
    assert untouched_state(trainer)["trainer"] != before["trainer"]
    assert detach(trainer) == []
    same_state(before, untouched_state(trainer))
    assert curve(trainer) == want


def test_an_irreversible_attachment_stores_no_copies_and_refuses_detach(models):
    trainer = trainer_of("SFT", models, bf16=True)
    attached = attach(trainer, "bf16-lora", quiet=True, reversible=False)
    assert not any("kept" in note for note in attached.notes)
    assert "keep the rounding" in detach(trainer)[0]


# --- one owner


def test_every_owner_is_listed_with_its_value(models, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = trainer_of("SFT", models, bf16=True)
    trainer.model.base_model.model.model.layers[0].self_attn.q_proj.lora_A[
        "default"
    ].weight.data = (
        trainer.model.base_model.model.model.layers[0]
        .self_attn.q_proj.lora_A["default"]
        .weight.data.bfloat16()
    )
    trainer.args.learning_rate = 1e-5
    attach(trainer)
    said = capsys.readouterr().out
    for words in (
        "bf16=True",
        "ACCELERATE_MIXED_PRECISION=bf16",
        "mixed_precision bf16",
        "base bf16",
        "fp32 masters",
        "A and B are cast down",
    ):
        assert words in said
    share = re.search(r"(\d+)% of bf16 updates at 1e-05 would vanish", said)
    assert share
    assert int(share.group(1)) > 50
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters() if p.requires_grad)


def test_auto_obeys_a_typed_false_and_gives_its_reason(models, subtests):
    for name, form, bf16, words in (
        ("SFT", "lora", False, r"precision fp32 .*\(auto: bf16=False in the trainer's arguments: "),
        (
            "SFT",
            "lora",
            True,
            r"precision bf16-lora .*\(auto: bf16=True in the trainer's arguments: ",
        ),
        (
            "SFT",
            "qlora",
            False,
            r"precision nf4-lora compute=fp32.*\(auto: the model's base is quantised, and bf16=False in the trainer's",
        ),
        # transformers' own default is False: not known to be typed
        ("Trainer", "lora", False, r"\(auto: .* has (native|no|only emulated) bf16"),
    ):
        with subtests.test(words):
            said = str(attach(trainer_of(name, models, form, bf16=bf16), quiet=True))
            assert re.search(words, said), said


# --- what is refused


NOTHING = "lora", True, lambda trainer: None
SGD = torch.optim.SGD


def wrap(trainer):
    trainer.model = nn.DataParallel(trainer.model)


def with_its_optimizer(trainer):
    trainer.optimizer = SGD(trainer.model.parameters(), lr=0.1)


CONTRADICTIONS = (
    (*NOTHING, "fp32", "bf16=True in the trainer's arguments .* computes in fp32"),
    ("lora", False, NOTHING[2], "fp16-mixed", "scales the loss"),
    (*NOTHING, "nf4-lora", "base nf4, but the trainer's model is not quantised"),
    ("qlora", True, NOTHING[2], "bf16-lora", "weights are nf4 already"),
    ("full", True, NOTHING[2], "bf16-lora", "adapter"),
    (
        "full",
        True,
        NOTHING[2],
        "bf16-pure rounding=nearest",
        "trained with stochastic rounding",
    ),
    (*NOTHING, "bf16-lorra", "unknown preset"),
    (*NOTHING, 16, "expected a preset's name"),
    (
        "lora",
        False,
        lambda t: setattr(t, "is_fsdp_enabled", True),
        "fp32",
        "not support accelerate's FSDP(.|\n)*DDP or a single process",
    ),
    (
        "lora",
        False,
        lambda t: setattr(t, "is_deepspeed_enabled", True),
        "fp32",
        "does not support DeepSpeed(.|\n)*DDP or a single process",
    ),
    ("lora", False, wrap, "fp32", "wrapped in DataParallel"),
    (
        "lora",
        False,
        lambda t: t.model.requires_grad_(False),
        "fp32",
        "no parameter of this model is trained",
    ),
    (
        "full",
        True,
        lambda t: setattr(t.args, "optim", "sgd"),
        "bf16-pure",
        "trains with AdamW, and the arguments ask for optim=sgd",
    ),
    ("full", True, with_its_optimizer, "bf16-pure", "brings an optimizer of its own"),
)


def test_a_contradiction_is_refused_with_both_values_and_a_fix(models, subtests):
    for form, bf16, change, precision, words in CONTRADICTIONS:
        with subtests.test(words):
            trainer = trainer_of("SFT" if form != "full" else "Trainer", models, form, bf16=bf16)
            change(trainer)
            before = untouched_state(trainer)
            with pytest.raises(UsageError) as refused:
                attach(trainer, precision)
            assert re.search(words, str(refused.value)), refused.value
            same_state(before, untouched_state(trainer))


def test_what_is_no_trainer_is_refused():
    for given, words in (
        (nn.Linear(2, 2), "Linear is no transformers.Trainer"),
        (Trainer, "is a class"),
        (None, "NoneType is no"),
    ):
        with pytest.raises(UsageError, match=words):
            attach(given)


def test_twice_in_training_and_after_it_are_refused(models):
    trainer = attached(trainer_of("Trainer", models), "fp32")
    with pytest.raises(UsageError, match="attached already"):
        attach(trainer, "fp32")
    detach(trainer)
    with pytest.raises(UsageError, match="not attached"):
        detach(trainer)
    found = []

    class Attaching(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with pytest.raises(UsageError, match="is training"):
                attach(trainer, "fp32")
            found.append(state.global_step)

    trainer.add_callback(Attaching())
    trainer.train()
    assert found == [1, 2, 3]
    with pytest.raises(UsageError, match="has trained already"):
        attach(trainer, "fp32")


def test_after_a_training_that_raised_detach_and_attach_work(models):
    """The refusal of a preflight names a fix."""
    precision, trainer = (
        "bf16-pure",
        attached(plain(Setting(models, "full", bf16=True, rate=0.0)), "bf16-pure"),
    )
    with pytest.raises(PreflightError, match="PF003"):
        trainer.train()
    detach(trainer)
    trainer.args.learning_rate = 2e-3
    attach(trainer, precision, quiet=True)
    fresh = attached(plain(Setting(models, "full", bf16=True)), precision)
    assert curve(trainer) == curve(fresh)


def test_a_trainer_that_is_not_attached_does_not_train_the_model_of_one_that_is(models, tmp_path):
    first = attached(
        plain(Setting(models, form="full", more={"output_dir": str(tmp_path), "max_steps": 1})),
        "fp32",
        preflight=False,
    )
    first.train()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "second"),
        use_cpu=True,
        max_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    second = Trainer(first.model, arguments, train_dataset=Encoded())
    with pytest.raises(UsageError, match="attached to Trainer, and Trainer trains it") as caught:
        second.train()
    assert caught.value.fix.startswith("detach(the Trainer)")
    detach(first)
    Trainer(first.model, arguments, train_dataset=Encoded()).train()


def test_versions_outside_the_tested_range_are_refused(models, monkeypatch):
    trainer = trainer_of("SFT", models)
    monkeypatch.setitem(TESTED_VERSIONS, "trl", ("0.0.1", "0.0.2"))
    with pytest.raises(UsageError, match=r"trl .*tested with 0.0.1 to below 0.0.2"):
        attach(trainer, "fp32")


# --- after it


def test_the_checkpoint_is_an_ordinary_one_and_resumes_both_ways(models, tmp_path):
    whole = curve(trainer_of("Trainer", models, more={"max_steps": 4}))
    for first, second in ((True, False), (False, True)):
        more = {
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
            "output_dir": str(tmp_path / f"{first}"),
        }
        begun = trainer_of("Trainer", models, more=more)
        if first:
            attach(begun, "fp32", quiet=True)
        torch.manual_seed(0)
        begun.train()
        resumed = trainer_of("Trainer", models, more=more)
        if second:
            attach(resumed, "fp32", quiet=True)
        torch.manual_seed(0)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"{first}" / "checkpoint-2"))
        got = [
            row[key]
            for row in resumed.state.log_history
            if "loss" in row
            for key in ("loss", "grad_norm")
        ]
        assert got == pytest.approx(whole, rel=1e-5)


def test_custom_logits_are_fp32_as_under_accelerates_wrapper(models):
    seen = []

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            seen.append(logits.dtype)
            return nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )

    trainer = plain(Setting(models, bf16=True), Own)
    attached = attach(trainer, "bf16-lora", quiet=True)
    assert any(
        re.search(r"Own.compute_loss at test_attach.py:\d+ runs as it is", note)
        for note in attached.notes
    )
    trainer.train()
    assert set(seen) == {torch.float32}

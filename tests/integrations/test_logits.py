"""Logits of a trainer's own loss: what it makes of them without all logits is computed so, and the
rest is counted with its line.
"""

import json
import re

import pytest
import torch
import torch.nn.functional as F

from isotype.integrations import detach
from tests.integrations.trainers import TRAINERS, Setting, attached, curve, plain

pytest.importorskip("trl")


def heads(folder):
    manifest = json.loads((folder / "out" / "isotype" / "manifest.json").read_text())
    return {row["op"]: row["calls"] for row in manifest["first_step"] if row["part"] == "head"}


@pytest.mark.parametrize("name", ["ORPO", pytest.param("CPO", marks=pytest.mark.full)])
def test_preference_losses_need_no_logits(name, models, tmp_path):
    trainer = attached(
        TRAINERS[name](Setting(models, more={"output_dir": str(tmp_path / "out")})), "fp32"
    )
    trainer.train()
    assert set(heads(tmp_path)) == {"linear_cross_entropy", "selected_logits", "linear_log_probs"}


def own(loss):
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")[:, 1:]
            return loss(model(**inputs).logits[:, :-1], labels, labels != -100)

    return Own


def selected(logits, labels, kept):
    return -F.log_softmax(logits[kept], -1).gather(-1, labels[kept].unsqueeze(-1)).mean()


def whole(logits, labels, kept):
    return (
        selected(logits, labels, kept)
        + 1e-3 * torch.softmax(logits, -1).square().sum(-1)[kept].mean()
    )


@pytest.mark.parametrize(
    ("loss", "read"), [pytest.param(selected, False, marks=pytest.mark.full), (whole, True)]
)
def test_a_users_own_loss_is_the_same_and_what_it_reads_is_counted(loss, read, models, tmp_path):
    want = curve(plain(Setting(models), own(loss)))
    trainer = attached(
        plain(Setting(models, more={"output_dir": str(tmp_path / "out")}), own(loss)), "fp32"
    )
    assert curve(trainer) == pytest.approx(want, rel=1e-5)
    assert (
        any(
            re.match(r"logits computed: softmax at test_logits.py:\d+", op)
            for op in heads(tmp_path)
        )
        == read
    )
    assert heads(tmp_path)["linear_log_probs"] == 1


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_head_that_peft_trains_in_full_is_fused_and_its_gradient_is_fp32(tied, models, tmp_path):
    """TRL's own fused head reads its weight too, and rounds the weight's gradient to bf16."""
    setting = Setting(models, bf16=True, more={"output_dir": str(tmp_path / "out")})
    config = setting.peft()
    config.modules_to_save, config.target_modules, config.ensure_weight_tying = (
        ["embed_tokens", "lm_head"],
        ["q_proj"],
        tied,
    )
    object.__setattr__(setting, "peft", lambda *_: config)
    trainer = attached(TRAINERS["SFT"](setting), "bf16-lora")
    curve(trainer)
    assert heads(tmp_path) == {"linear_log_probs": 1}
    record = json.loads((tmp_path / "out" / "isotype" / "precision.json").read_text())
    assert [finding["message"] for finding in record["violations"]] == []
    detach(trainer)
    assert not any(
        "isotype" in getattr(type(module.__dict__.get("forward")), "__module__", "")
        for module in trainer.model.modules()
    )

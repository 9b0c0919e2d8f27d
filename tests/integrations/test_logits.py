"""Logits of a trainer's own loss: what it makes of them without all logits is computed so, and the rest is counted with its line."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from isotype.integrations import attach, detach
from tests.integrations.trainers import TRAINERS, Setting, curve, plain
from tests.vlms import saved_with_processor

pytest.importorskip("trl")


def heads(folder):
    manifest = json.loads((folder / "out" / "isotype" / "manifest.json").read_text())
    return {row["op"]: row["calls"] for row in manifest["first_step"] if row["part"] == "head"}


@pytest.mark.parametrize("name", ["ORPO", pytest.param("CPO", marks=pytest.mark.full)])
def test_preference_losses_need_no_logits(name, models, tmp_path):
    trainer = TRAINERS[name](Setting(models, more={"output_dir": str(tmp_path / "out")}))
    attach(trainer, "fp32", quiet=True)
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
    return selected(logits, labels, kept) + 1e-3 * torch.softmax(logits, -1).square().sum(-1)[kept].mean()


@pytest.mark.parametrize(("loss", "read"), [(selected, False), (whole, True)])
def test_a_users_own_loss_is_the_same_and_what_it_reads_is_counted(loss, read, models, tmp_path):
    want = curve(plain(Setting(models), own(loss)))
    trainer = plain(Setting(models, more={"output_dir": str(tmp_path / "out")}), own(loss))
    attach(trainer, "fp32", quiet=True)
    assert curve(trainer) == pytest.approx(want, rel=1e-5)
    assert any(re.match(r"logits computed: softmax at test_logits.py:\d+", op) for op in heads(tmp_path)) == read
    assert heads(tmp_path)["linear_log_probs"] == 1


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_head_that_peft_trains_in_full_is_fused_and_its_gradient_is_fp32(tied, models, tmp_path):
    """TRL's own fused head reads its weight too, and rounds the weight's gradient to bf16."""
    setting = Setting(models, bf16=True, more={"output_dir": str(tmp_path / "out")})
    config = setting.peft()
    config.modules_to_save, config.target_modules, config.ensure_weight_tying = ["embed_tokens", "lm_head"], ["q_proj"], tied
    object.__setattr__(setting, "peft", lambda *_: config)
    trainer = TRAINERS["SFT"](setting)
    attach(trainer, "bf16-lora", quiet=True)
    curve(trainer)
    assert heads(tmp_path) == {"linear_log_probs": 1}
    record = json.loads((tmp_path / "out" / "isotype" / "precision.json").read_text())
    assert [finding["message"] for finding in record["violations"]] == []
    detach(trainer)
    assert not any("isotype" in getattr(type(module.__dict__.get("forward")), "__module__", "") for module in trainer.model.modules())


# --- TRL's SFT of a tiny Gemma 3 with pictures, attached: the same losses, the tower in the manifest, and what the preflight says.


LANGUAGE = r".*language_model.*\.(q_proj|v_proj|down_proj)"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_with_processor("gemma3", tmp_path_factory.mktemp("gemma3"))


def trainer_of(base, folder, *, targets=LANGUAGE, model=None, pictures=True, steps=2):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    colours = {"red": (220, 20, 20), "green": (20, 200, 20)}
    rows = [
        {"images": [Image.new("RGB", (64, 48), colour)],
         "messages": [{"role": "user", "content": "what colour?"}, {"role": "assistant", "content": f"it is {name}."}]}
        for name, colour in colours.items()
    ] * 4  # fmt: skip
    if not pictures:
        rows = [{"messages": row["messages"]} for row in rows]
    args = SFTConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=2e-3, logging_steps=1, report_to=[],
        bf16=True, use_cpu=True, max_length=None, save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    processor = AutoProcessor.from_pretrained(base) if pictures else AutoTokenizer.from_pretrained(base)
    model = model or AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16)
    peft = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    return SFTTrainer(
        model, args, train_dataset=Dataset.from_list(rows), processing_class=processor, peft_config=peft
    )  # fmt: skip


def losses(trainer):
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_sft_with_pictures_has_the_same_losses_and_says_what_it_learns(base, tmp_path):
    plain = losses(trainer_of(base, tmp_path / "plain"))
    attached = trainer_of(base, tmp_path / "attached")
    manifest = attach(attached, precision="bf16-lora").manifest
    assert losses(attached) == pytest.approx(plain, abs=1e-3)
    tower = [line for line in str(manifest).splitlines() if "vision_tower" in line]
    assert any("left alone" in line and "it has 0 norms" in line for line in tower)
    assert any("attention" in line for line in tower)
    said = (tmp_path / "attached" / "isotype" / "preflight.json").read_text()
    assert "PF023" in said
    assert "are places of pictures" in said


def test_an_adapter_on_the_class_for_text_is_told_that_it_will_not_load(tmp_path):
    base = saved_with_processor("qwen3_5", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    trainer = trainer_of(base, tmp_path / "out", targets=["q_proj"], model=model, pictures=False, steps=1)
    attach(trainer, precision="bf16-lora")
    losses(trainer)
    said = (tmp_path / "out" / "isotype" / "preflight.json").read_text()
    assert "will not load onto the released model (Qwen3_5ForConditionalGeneration)" in said

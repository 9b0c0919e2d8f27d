"""TRL's SFT of a tiny Gemma 3 with pictures, attached: the same losses, the tower in the manifest, and what the preflight says."""

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from isotype.integrations import attach
from tests.vlms import saved_with_processor

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

"""TRL's trainers of a tiny Gemma 3 with pictures, attached: the same losses, the tower in the
manifest, and what the preflight says.
"""

import json

import pytest
import torch
from PIL import Image

from isotype.integrations import attach
from tests.integrations.trainers import attached, curve

pytest.importorskip("trl")
LANGUAGE = r".*language_model.*\.(q_proj|v_proj|down_proj)"
COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20)}


def rows(kind, pictures=True):
    made = []
    for name, colour in [*COLOURS.items()] * 4:
        asked, answer = (
            [{"role": role, "content": said}]
            for role, said in (("user", "what colour?"), ("assistant", f"it is {name}."))
        )
        row = {
            "SFT": {"messages": asked + answer}, "GRPO": {"prompt": asked},
            "DPO": {"prompt": asked, "chosen": answer, "rejected": [{"role": "assistant", "content": "no."}]},
        }[kind]  # fmt: skip
        made.append({**row, "images": [Image.new("RGB", (64, 48), colour)]} if pictures else row)
    return made


def trainer_of(
    base, folder, kind="SFT", *, targets=LANGUAGE, model=None, pictures=True, steps=2, **more
):
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    torch.manual_seed(0)
    lengths = {"GRPO": {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}}.get(
        kind, {"max_length": None}
    )
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=2e-3, logging_steps=1, report_to=[],
        bf16=False, use_cpu=True, save_strategy="no", gradient_checkpointing=False, disable_tqdm=True, **lengths,
    )  # fmt: skip
    given = {"reward_funcs": longest} if kind == "GRPO" else {}
    return getattr(trl, f"{kind}Trainer")(
        model or AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32), args=args,
        train_dataset=Dataset.from_list(rows(kind, pictures)), peft_config=LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"),
        processing_class=AutoProcessor.from_pretrained(base) if pictures else AutoTokenizer.from_pretrained(base), **given, **more,
    )  # fmt: skip


def longest(completions, **_):
    return [float(len(str(completion))) for completion in completions]


def said(folder):
    """Of the preflight: code -> message of its findings, and the codes of the checks that did not
    run.
    """
    made = json.loads((folder / "isotype" / "preflight.json").read_text())
    return {one["code"]: one["message"] for one in made["findings"]}, {
        one["code"] for one in made["skipped"]
    }


@pytest.mark.parametrize(
    "kind", ["SFT", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("DPO", "GRPO"))]
)
def test_losses_with_pictures_are_the_unattached_trainers(kind, vlm, tmp_path):
    want = curve(trainer_of(vlm("gemma3"), tmp_path / "plain", kind))
    attached = trainer_of(vlm("gemma3"), tmp_path / "attached", kind)
    manifest = attach(attached, precision="fp32", quiet=True).manifest
    assert curve(attached) == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert any(want[1::2]), "no gradient would show no difference"
    tower = [line for line in str(manifest).splitlines() if "vision_tower" in line]
    assert any("left alone" in line and "it has 0 norms" in line for line in tower)
    assert any("attention" in line for line in tower)
    found, skipped = said(tmp_path / "attached")
    assert ("PF014" in skipped) == (kind == "GRPO"), "a step of rows with pictures is rehearsed"
    assert ("are places of pictures" in found.get("PF023", "")) == (kind == "SFT")
    assert "PF014" not in found


def test_adapters_of_a_tower_that_sees_no_picture_are_named(vlm, tmp_path):
    """`all-linear` puts them there, and on rows of text no gradient arrives."""
    trainer = attached(
        trainer_of(vlm("gemma3"), tmp_path, "SFT", targets="all-linear", pictures=False, steps=1),
        "fp32",
    )
    trainer.train()
    found, _ = said(tmp_path)
    assert "get no usable gradient: base_model.model.model.vision_tower." in found["PF014"]
    assert "PF023" not in found


def test_an_adapter_on_the_class_for_text_is_told_that_it_will_not_load(vlm, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(vlm("qwen3_5"), dtype=torch.float32)
    trainer = attached(
        trainer_of(
            vlm("qwen3_5"), tmp_path, targets=["q_proj"], model=model, pictures=False, steps=1
        ),
        "fp32",
    )
    trainer.train()
    assert (
        "will not load onto the released model (Qwen3_5ForConditionalGeneration)"
        in said(tmp_path)[0]["PF024"]
    )

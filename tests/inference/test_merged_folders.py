"""Merged folders of each family and of each kind of base: `merge --verify` accepts them, and plain
transformers computes the same logits from them as the trained model does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.api import load_run
from tests.commands import ask
from tests.gguf_files import splitting
from tests.inference.test_verify import FAMILIES, QUESTIONS
from tests.models import MIXTURES, SIZES, tiny
from tests.published import write as write_published
from tests.vlms import FAMILIES as VISION_FAMILIES
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

FP32 = {"preset": "fp32"}  # with fp32 products, logits differ only by the order of sums
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def save_base(folder: Path, family: str, **changes: Any) -> Path:
    tokenizer = splitting()
    sizes = {"vocab_size": 320, "bos_token_id": None}
    sizes |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    tiny(family, **{**sizes, **changes}).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(folder: Path, base: Path, content: Any = None, **sections: Any) -> Path:
    """Trains an adapter on the base, and returns the folder of the run.

    content  the content of each question in place of its text
    """
    rows = [
        [{"role": "user", "content": content or q}, {"role": "assistant", "content": a}]
        for q, a in QUESTIONS
    ]
    lines = [json.dumps({"messages": messages}) + "\n" for messages in rows]
    (folder / "chats.jsonl").write_text("".join(lines))
    config = {
        "model": {"name": str(base)},
        "data": {"train": str(folder / "chats.jsonl"), "eval_split": 0.2, "max_length": 96},
        "adapter": {"kind": "lora", "r": 8},
        "precision": FP32,
        "train": {"steps": 12, "batch_size": 4, "learning_rate": 2e-2, "schedule": "constant"},
        "run": {"folder": str(folder / "run"), "sample_every": 0, "samples": [], "report": False},
    }
    (folder / "run.yaml").write_text(json.dumps(config | sections))
    ask("train", folder / "run.yaml")
    return folder / "run"


def assert_merged_model_is_the_trained_model(run: Path, auto: Any = AutoModelForCausalLM) -> None:
    merged = run.parent / "merged"
    output = ask("merge", run, "--dtype", "fp32", "--out", merged, "--verify", "--json")
    verified = json.loads(output)["verify"]
    assert verified["differences"] == []
    assert verified["kept"] == pytest.approx(1.0, abs=0.005)
    trained = load_run(run).model
    ids = torch.arange(40, 70)[None]
    model = auto.from_pretrained(merged, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = trained(input_ids=ids).logits.float()
        actual = model(input_ids=ids).logits
        with trained.disable_adapter():
            base = trained(input_ids=ids).logits.float()
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-3)
    assert (base - expected).abs().max() > 0.1, "the adapter changes the logits"


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_family(tmp_path, family: str) -> None:
    base = save_base(tmp_path / "base", family)
    assert_merged_model_is_the_trained_model(train(tmp_path, base))


@pytest.mark.full
@pytest.mark.parametrize("family", MIXTURES)
def test_each_mixture_of_experts(tmp_path, family: str) -> None:
    base = save_base(tmp_path / "base", family)
    adapter = {"kind": "lora", "r": 8, "targets": ["q_proj", "o_proj"], "parameters": EXPERTS}
    if family == "deepseek_v3":
        adapter["targets"] = ["q_b_proj", "o_proj"]
    assert_merged_model_is_the_trained_model(train(tmp_path, base, adapter=adapter))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fp32", "nf4", "int8", "fp8"])
def test_each_base_that_is_quantised_when_it_is_loaded(tmp_path, kind: str) -> None:
    base = save_base(tmp_path / "base", "llama")
    run = train(tmp_path, base, precision={"preset": "fp32", "base": kind})
    assert_merged_model_is_the_trained_model(run)


@pytest.mark.full
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("fp8-block", "fp8"),
        ("int8-ct-channel", "int8"),
        ("int4-ct-packed", "int4"),
        ("gptq", "int4"),
        ("awq", "int4"),
        ("nvfp4-ct", "nvfp4"),
        ("mxfp4-ct", "mxfp4"),
    ],
)
def test_each_published_quantised_base(tmp_path, form: str, kind: str) -> None:
    tokenizer = splitting()
    sizes = SIZES | {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64}
    sizes |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    write_published(tiny("llama", **sizes), tokenizer, tmp_path / "base", form)
    run = train(tmp_path, tmp_path / "base", precision={"preset": "fp32", "base": kind})
    assert_merged_model_is_the_trained_model(run)


@pytest.mark.full
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_each_vision_language_family(tmp_path, vlm, family: str) -> None:
    picture = tmp_path / "red.png"
    Image.fromarray(np.full((48, 64, 3), (220, 20, 20), np.uint8)).save(picture)
    content = [{"type": "image", "path": str(picture)}, {"type": "text", "text": "what colour?"}]
    run = train(tmp_path, vlm(family), content)
    assert_merged_model_is_the_trained_model(run, AutoModelForImageTextToText)

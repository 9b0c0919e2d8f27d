"""`isotype inspect --against`: the same weights in another format are the same, and what a merge or a
conversion lost is named.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests import published
from tests.api import export_model, open_checkpoint, open_two
from tests.commands import ask, invoke
from tests.gguf_files import splitting
from tests.models import lora, tiny
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from isotype.errors import UsageError

Q = "model.layers.0.self_attn.q_proj.weight"


def against(first: Path, second: Path, *options: Any) -> dict[str, Any]:
    result = invoke("inspect", first, "--against", second, *options, "--json")
    assert result.exit_code in (0, 1), result.exception
    answer: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == int(not answer["is_same"])
    return answer


def change(folder: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    stored = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor.contiguous() for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> SimpleNamespace:
    """A bf16 base, an adapter of PEFT with a head that was trained in full, and PEFT's merge."""
    folder = tmp_path_factory.mktemp("against")
    tokenizer = splitting()
    ids = {"bos_token_id": None, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96}
    tiny("llama", **sizes, **ids).bfloat16().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = lora(model, r=4, modules_to_save=["lm_head"])
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder / "adapter")
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32),
        folder / "adapter",
    ).merge_and_unload()
    merged.bfloat16().save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")
    return SimpleNamespace(
        folder=folder, base=folder / "base", adapter=folder / "adapter", merged=folder / "merged"
    )


def test_merged_folder_is_its_base_with_the_adapter(files):
    for pair in ((files.merged, files.adapter), (files.adapter, files.merged)):
        answer = against(*pair)
        assert answer["is_same"], answer["differences"]
        assert answer["kept"] == pytest.approx(1, abs=1e-3)
    text = ask("inspect", files.merged, "--against", files.adapter)
    assert "result        the same" in text


def test_a_merge_may_round_the_base_before_it_adds_the_change(files, tmp_path):
    """The base has fp32 weights, and the merge loaded it in bf16, as a run in bf16 does."""
    wide = AutoModelForCausalLM.from_pretrained(files.base, dtype=torch.float32)
    for parameter in wide.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    wide.save_pretrained(tmp_path / "wide")
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(narrow.float(), files.adapter).merge_and_unload()
    merged.bfloat16().save_pretrained(tmp_path / "merged")
    answer = against(tmp_path / "merged", files.adapter, "--base", tmp_path / "wide")
    assert answer["is_same"], answer["differences"]


def test_what_a_merge_lost_is_named(files, tmp_path):
    """unsloth 869: the merged folder holds the base. unsloth-zoo 369: the head was not merged."""
    answer = against(files.base, files.adapter)
    assert not answer["is_same"]
    assert answer["kept"] == 0
    assert {d["name"] for d in answer["differences"]} >= {Q, "lm_head.weight"}
    shutil.copytree(files.merged, tmp_path / "merged")
    head = load_file(files.base / "model.safetensors")["lm_head.weight"]
    change(tmp_path / "merged", {"lm_head.weight": head})
    answer = against(tmp_path / "merged", files.adapter)
    assert [d["name"] for d in answer["differences"]] == ["lm_head.weight"]
    assert answer["kept"] == pytest.approx(1, abs=1e-3)
    change(tmp_path / "merged", {"model.norm.weight": None})
    assert against(tmp_path / "merged", files.adapter)["only_second"] == ["model.norm.weight"]


def test_a_change_within_the_rounding_of_a_file_is_still_missed(files, tmp_path):
    """A Q8_0 file of the base deviates from base and adapter by less than its rounding."""
    pytest.importorskip("gguf")
    shutil.copytree(files.adapter, tmp_path / "small")
    file = tmp_path / "small" / "adapter_model.safetensors"
    small = {
        name: tensor * 0.002 if "lora_B" in name else tensor
        for name, tensor in load_file(file).items()
    }
    [head] = [name for name in small if "lm_head" in name]
    small[head] = load_file(files.base / "model.safetensors")["lm_head.weight"].clone()
    save_file(small, file)
    export_model(files.base, tmp_path / "base.gguf", "Q8_0")
    answer = against(tmp_path / "base.gguf", tmp_path / "small")
    assert answer["differences"] == []
    assert abs(answer["kept"]) < 0.3
    assert answer["expected"] == pytest.approx(1, abs=1e-3)
    assert not answer["is_same"]


def test_two_files_of_one_dtype_must_be_equal(files, tmp_path):
    assert against(files.base, files.base)["is_same"]
    shutil.copytree(files.base, tmp_path / "other")
    weight = load_file(files.base / "model.safetensors")[Q]
    moved = weight.clone()
    moved[0, 0] = moved[0, 0] * (1 + 2**-7)
    change(tmp_path / "other", {Q: moved})
    [difference] = against(tmp_path / "other", files.base)["differences"]
    assert difference["name"] == Q
    assert difference["largest"] == float((moved.float() - weight.float()).abs().max())
    assert difference["share"] == 1 / weight.numel()
    wide = {name: t.float() for name, t in load_file(files.base / "model.safetensors").items()}
    change(tmp_path / "other", wide)
    assert against(tmp_path / "other", files.base)["is_same"]
    change(tmp_path / "other", {Q: weight.float() * 1.02})
    [difference] = against(tmp_path / "other", files.base)["differences"]
    assert difference["kinds"] == ["F32", "BF16"]


def test_gguf_file_and_the_folder_that_it_was_made_from(files, tmp_path):
    pytest.importorskip("gguf")
    for kind in ("BF16", "Q8_0"):
        file = tmp_path / f"{kind}.gguf"
        export_model(files.merged, file, kind)
        assert against(file, files.merged)["is_same"]
        assert against(file, files.adapter)["is_same"]  # base and adapter
        answer = against(files.base, file)
        assert {d["name"] for d in answer["differences"]} >= {Q}
    assert against(tmp_path / "BF16.gguf", tmp_path / "BF16.gguf")["is_same"]


FORMATS = [
    "fp8-block",
    *(
        pytest.param(form, marks=pytest.mark.full)
        for form in ("gptq", "nvfp4-modelopt", "int8-bnb")
    ),
]


@pytest.mark.parametrize("form", FORMATS)
def test_a_cast_without_scales_is_named(tmp_path, form):
    """unsloth-zoo 803: the stored numbers as weights. With their scales, they are the same."""
    model = tiny("llama", hidden_size=64, intermediate_size=96, vocab_size=320)
    published.write(model, splitting(), tmp_path / "packed", form)
    opened = open_checkpoint(tmp_path / "packed")
    packed, _ = open_two(opened, opened, None)
    assert len(packed.tensors) == 21
    tensors = {name: tensor.read().bfloat16() for name, tensor in packed.tensors.items()}
    (tmp_path / "dense").mkdir()
    for file in (tmp_path / "packed").iterdir():
        shutil.copy(file, tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    assert against(tmp_path / "packed", tmp_path / "dense")["is_same"]
    lost = {Q: tensors[Q] * 40}
    change(tmp_path / "dense", lost)
    [difference] = against(tmp_path / "dense", tmp_path / "packed")["differences"]
    assert difference["remark"] == "40 times the second"


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_a_merge_that_dropped_the_experts_is_named(tmp_path, family):
    """unsloth-zoo 647, 779, 812: attention was merged, and the experts kept the base's weights. The
    files hold one weight for each expert, and the adapter changes their stack.
    """
    tiny(family).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = lora(model, r=4, target_modules=["q_proj"], target_parameters=parameters)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    answer = against(tmp_path / "merged", tmp_path / "adapter")
    assert answer["is_same"], answer["differences"]
    assert answer["kept"] == pytest.approx(1, abs=1e-3)
    base = load_file(tmp_path / "base" / "model.safetensors")
    change(tmp_path / "merged", {name: t for name, t in base.items() if ".experts." in name})
    answer = against(tmp_path / "merged", tmp_path / "adapter")
    names = {d["name"] for d in answer["differences"]}
    assert names == {f"model.layers.{i}.{name}" for i in (0, 1) for name in parameters}
    assert answer["kept"] < 0.9


@pytest.mark.full
def test_an_adapter_with_dora(files, tmp_path):
    model = lora(AutoModelForCausalLM.from_pretrained(files.base), r=4, use_dora=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "dora")
    base = AutoModelForCausalLM.from_pretrained(files.base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "dora").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert against(tmp_path / "merged", tmp_path / "dora")["is_same"]
    assert not against(files.base, tmp_path / "dora")["is_same"]


def test_an_adapter_with_dora_on_an_nf4_base_in_the_home_folder(files, tmp_path, monkeypatch):
    """A packed weight has the shape that it has after dequantisation."""
    pytest.importorskip("bitsandbytes")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed = AutoModelForCausalLM.from_pretrained(
        files.base, quantization_config=settings, device_map="cpu"
    )
    packed.save_pretrained(tmp_path / "nf4")
    monkeypatch.setenv("HOME", str(tmp_path))
    model = lora(packed, r=4, use_dora=True)
    model.peft_config["default"].base_model_name_or_path = "~/nf4"
    model.save_pretrained(tmp_path / "dora")
    _, second = open_two(open_checkpoint(files.base), open_checkpoint(tmp_path / "dora"), None)
    assert second.tensors[Q].kind == "F32"
    for weights in (second, second.base):
        shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
        assert shapes[Q] == (64, 64)
        assert shapes == {name: tensor.read().shape for name, tensor in weights.tensors.items()}


def test_two_adapters(files, tmp_path):
    """B and A may be scaled against each other: only their product counts."""
    shutil.copytree(files.adapter, tmp_path / "other")
    file = tmp_path / "other" / "adapter_model.safetensors"
    stored = load_file(file)
    factors = {".lora_A.weight": 4.0, ".lora_B.weight": 0.25}
    scaled = {
        name: tensor * next((f for end, f in factors.items() if name.endswith(end)), 1.0)
        for name, tensor in stored.items()
    }
    save_file(scaled, file)
    assert against(tmp_path / "other", files.adapter)["is_same"]
    settings = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    settings["lora_alpha"] *= 2
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(settings))
    differences = against(tmp_path / "other", files.adapter)["differences"]
    assert {d["remark"] for d in differences} == {"2 times the second"}


def test_what_cannot_be_compared_is_one_line(files, tmp_path):
    other = tiny("gpt_oss")
    other.save_pretrained(tmp_path / "other")
    shutil.copytree(files.adapter, tmp_path / "hub")
    settings = json.loads((tmp_path / "hub" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "org/base"
    (tmp_path / "hub" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match=r"org/base: not a folder") as refused:
        ask("inspect", files.merged, "--against", tmp_path / "hub")
    assert refused.value.fix == "--base FOLDER"
    assert against(files.merged, tmp_path / "hub", "--base", files.base)["is_same"]
    with pytest.raises(UsageError, match="the adapter changes"):
        ask("inspect", files.merged, "--against", files.adapter, "--base", tmp_path / "other")
    with pytest.raises(UsageError, match="no effect without --against"):
        ask("inspect", files.merged, "--base", files.base)
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="no weight of the same name"):
        ask("inspect", files.merged, "--against", tmp_path / "a.safetensors")

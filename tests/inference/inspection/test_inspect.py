"""`isotype inspect`: each fault that a checkpoint can have without a message is named, and sound
checkpoints have none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import published
from tests.commands import ask, invoke
from tests.gguf_files import splitting
from tests.models import lora, tiny

from isotype.errors import UsageError


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A folder with a tiny bf16 Llama, its tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("inspect") / "sound"
    tokenizer = splitting()
    ids = {"bos_token_id": None, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    tiny("llama", vocab_size=320, **ids).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def copy(source: Path, folder: Path, **settings: Any) -> Path:
    """A copy of a folder; `settings` are written into its config.json."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change_json(folder / "config.json", **settings)
    return folder


def change_json(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change(folder: Path, tensors: dict[str, torch.Tensor | None]) -> Path:
    """Replaces tensors of model.safetensors; None removes one."""
    stored = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor.contiguous() for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def report(path: Path) -> dict[str, Any]:
    result = invoke("inspect", path, "--json")
    assert result.exit_code in (0, 1), result.exception
    answer: dict[str, Any] = json.loads(result.stdout)
    errors = [f for f in answer["findings"] if f["severity"] == "error"]
    assert result.exit_code == int(bool(errors))
    return answer


def codes(path: Path) -> list[str]:
    return [finding["code"] for finding in report(path)["findings"]]


Q = "model.layers.0.self_attn.q_proj"


def test_sound_checkpoint_has_no_findings_and_fits_a_screen(sound):
    text = ask("inspect", sound)
    assert len(text.splitlines()) <= 30
    assert "all finite; no matrix all zero" in text
    assert "LlamaForCausalLM in bf16" in text
    assert "chat_template.jinja" in text
    assert text.rstrip().endswith(": no findings")
    answer = report(sound)
    assert answer["findings"] == []
    assert answer["kind"] == "model"
    [group] = [g for g in answer["tensors"] if g["pattern"].endswith("q_proj.weight")]
    assert (group["count"], group["dtype"], group["shapes"]) == (2, "bf16", [[32, 32]])
    weights = load_file(sound / "model.safetensors")
    largest = max(
        float(weights[f"model.layers.{i}.self_attn.q_proj.weight"].abs().max()) for i in (0, 1)
    )
    assert group["values"]["largest"] == largest
    verbose = ask("inspect", sound, "--verbose")
    assert all(name in verbose for name in weights)


QUICK_FORMATS = ("fp8-block", "int8-bnb", "int4-ct-asymmetric", "gptq", "nvfp4-modelopt")
ALL_FORMATS = [
    pytest.param(form, marks=[] if form in QUICK_FORMATS else [pytest.mark.full])
    for form in published.FORMATS
]


@pytest.mark.parametrize("form", ALL_FORMATS)
def test_every_published_format_is_sound_and_a_lost_scale_is_named(tmp_path, form):
    model = tiny("llama", hidden_size=64, intermediate_size=96, vocab_size=320)
    published.write(model, splitting(), tmp_path / "packed", form)
    answer = report(tmp_path / "packed")
    assert answer["findings"] == []
    assert len(answer["scales"]["quantised"]) == 14
    names = load_file(tmp_path / "packed" / "model.safetensors")
    [scale, *_] = sorted(
        name for name in names if name.startswith(f"{Q}.") and ("scale" in name or "SCB" in name)
    )
    change(tmp_path / "packed", {scale: None})
    answer = report(tmp_path / "packed")
    if scale.endswith("input_scale"):  # only servers use it
        assert answer["findings"] == []
    else:
        assert list(answer["scales"]["missing"]) == [Q]
        assert [f["code"] for f in answer["findings"]] == ["MF006"]


def test_values_that_no_program_reports(sound, tmp_path):
    weight = load_file(sound / "model.safetensors")[f"{Q}.weight"]
    broken = weight.clone()
    broken[0, :2] = torch.tensor([torch.nan, torch.inf])
    folder = change(copy(sound, tmp_path / "nan"), {f"{Q}.weight": broken})
    [finding] = report(folder)["findings"]
    assert finding["code"] == "MF001"
    assert "not finite (1 NaN, 1 infinite)" in finding["message"]
    assert Q in finding["message"]
    folder = change(copy(sound, tmp_path / "zero"), {f"{Q}.weight": torch.zeros_like(weight)})
    assert codes(folder) == ["MF002"]
    folder = change(copy(sound, tmp_path / "large"), {f"{Q}.weight": weight + 70000})
    answer = report(folder)
    assert [f["code"] for f in answer["findings"]] == ["MF005"]
    assert answer["values"]["overflow"] == weight.numel()


def test_dtypes_that_contradict_config_json(sound, tmp_path):
    """torchtitan 4166: the log said fp32, the tensors were bf16. The reverse: bf16 values in fp32."""
    assert codes(copy(sound, tmp_path / "declared", dtype="float32")) == ["MF003"]
    stored = load_file(sound / "model.safetensors")
    wide = {name: tensor.float() for name, tensor in stored.items()}
    folder = change(copy(sound, tmp_path / "wide", dtype="float32"), wide)
    assert codes(folder) == ["MF004"]
    wide[f"{Q}.weight"] = wide[f"{Q}.weight"] * 1.0001
    assert codes(change(folder, wide)) == []


def test_fp8_numbers_that_were_written_as_16_bit_weights(tmp_path):
    """unsloth-zoo 803: no setting says that weights are fp8, and scales stay beside bf16 weights."""
    model = tiny("llama", hidden_size=64, intermediate_size=96, vocab_size=320)
    published.write(model, splitting(), tmp_path / "fp8", "fp8-block")
    settings = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del settings["quantization_config"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(settings))
    assert codes(tmp_path / "fp8") == ["MF008"]
    cast = load_file(tmp_path / "fp8" / "model.safetensors")
    cast = {name: tensor.bfloat16() for name, tensor in cast.items() if name.endswith(".weight")}
    change(tmp_path / "fp8", cast)
    answer = report(tmp_path / "fp8")
    assert [f["code"] for f in answer["findings"]] == ["MF007"]
    assert len(answer["scales"]["orphaned"]) == 14


@pytest.mark.parametrize("section", ["", "text_config"])
def test_quantization_config_that_a_merge_kept(sound, tmp_path, section):
    """unsloth 1601 and unsloth-zoo 808: a folder of bf16 weights keeps the setting of its base."""
    setting = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    folder = copy(sound, tmp_path / "kept", **({section: setting} if section else setting))
    assert codes(folder) == ["MF008"]


def test_tied_weights_that_differ(sound, tmp_path):
    folder = copy(sound, tmp_path / "tied", tie_word_embeddings=True)
    assert codes(folder) == ["MF009"]
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, {"lm_head.weight": embedding.clone()})
    assert "stored twice, equal" in ask("inspect", folder)
    change(folder, {"lm_head.weight": None})
    assert "stored once" in ask("inspect", folder)


def test_files_on_which_programs_disagree(sound, tmp_path):
    """unsloth-zoo 808: files of an earlier save. torchtitan 2137: several files and no index."""
    folder = copy(sound, tmp_path / "stale")
    stored = load_file(folder / "model.safetensors")
    save_file(stored, folder / "model-00001-of-00002.safetensors")
    assert codes(folder) == ["MF010"]
    (folder / "model.safetensors").unlink()
    assert "MF010" in codes(folder)
    index = {"weight_map": dict.fromkeys(stored, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert codes(folder) == []
    index["weight_map"][f"{Q}.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=rf"{Q}\.weight is in model-00002-of-00002") as refused:
        ask("inspect", folder)
    assert refused.value.fix


def test_names_and_shapes_that_the_class_does_not_have(sound, tmp_path):
    """unsloth-zoo 802: transformers initialises what it does not find, and continues."""
    weight = load_file(sound / "model.safetensors")[f"{Q}.weight"]
    folder = change(
        copy(sound, tmp_path / "renamed"),
        {f"{Q}.weight": None, f"{Q}.linear.weight": weight.clone()},
    )
    answer = report(folder)
    assert answer["transformers"]["missing"] == [f"{Q}.weight"]
    assert answer["transformers"]["unexpected"] == [f"{Q}.linear.weight"]
    assert [f["code"] for f in answer["findings"]] == ["MF011", "MF011"]
    assert codes(copy(sound, tmp_path / "shape", intermediate_size=64)) == ["MF011"]


def test_a_bias_that_stays_in_fp32_was_rounded(tmp_path, monkeypatch):
    """torchtitan 3861: a transfer in bf16 rounded the bias that selects experts. The weight of a
    router is published in bf16, and transformers 5.24 keeps it in fp32.
    """
    model = tiny("deepseek_v3").bfloat16()
    kept = {"e_score_correction_bias", "gate.weight"}
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", kept)
    model.save_pretrained(tmp_path / "rounded")
    answer = report(tmp_path / "rounded")
    assert [f["code"] for f in answer["findings"]] == ["MF012"]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert answer["transformers"]["narrowed"] == [name]
    change(tmp_path / "rounded", {name: torch.randn(4)})
    assert codes(tmp_path / "rounded") == []


def test_end_tokens_and_vocabulary(sound, tmp_path):
    """unsloth 5386: the tokenizer's end token was replaced, and no setting stops at the turn's."""
    folder = copy(sound, tmp_path / "ends")
    change_json(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    assert codes(folder) == ["MF013"]
    change_json(folder / "generation_config.json", eos_token_id=0)
    change_json(folder / "config.json", eos_token_id=0)
    [finding] = report(folder)["findings"]
    assert "answers end with <|im_end|> in the chat template" in finding["message"]
    rows = load_file(sound / "model.safetensors")["model.embed_tokens.weight"][:300]
    small = {"model.embed_tokens.weight": rows, "lm_head.weight": rows.clone()}
    assert codes(change(copy(sound, tmp_path / "rows", vocab_size=300), small)) == ["MF014"]


def test_adapters(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")
    model = lora(tiny("llama"))
    model.save_pretrained(tmp_path / "fresh")
    file = tmp_path / "fresh" / "adapter_model.safetensors"
    stored = load_file(file)
    save_file({n: torch.zeros_like(t) if "lora_B" in n else t for n, t in stored.items()}, file)
    assert codes(tmp_path / "fresh") == ["MF002"]
    trained = {n: torch.randn_like(t) for n, t in stored.items()}
    save_file(trained, file)
    answer = report(tmp_path / "fresh")
    assert answer["findings"] == []
    assert "--max-lora-rank" in answer["readers"]["vLLM"]
    first = next(iter(trained))
    save_file({name: tensor for name, tensor in trained.items() if name != first}, file)
    assert "MF015" in codes(tmp_path / "fresh")


def test_lora_file_of_kohya(tmp_path):
    down = {f"lora_unet_a_{i}.lora_down.weight": torch.randn(4, 8) for i in range(2)}
    up = {f"lora_unet_a_{i}.lora_up.weight": torch.randn(8, 4) for i in range(2)}
    alphas = {f"lora_unet_a_{i}.alpha": torch.tensor(4.0) for i in range(2)}
    save_file(down | up | alphas, tmp_path / "dog.safetensors")
    answer = report(tmp_path / "dog.safetensors")
    assert answer["adapter"]["description"] == (
        "LoRA, as kohya writes it, rank 4, alpha in the file"
    )
    assert answer["findings"] == []


def test_gguf_file(tmp_path, sound):
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_token_list(["a", "b", "</s>"])
    writer.add_eos_token_id(2)
    weight = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    answer = report(file)
    assert [f["code"] for f in answer["findings"]] == ["MF014"]  # 3 tokens, 2 rows
    assert answer["tensors"][0]["values"]["largest"] == pytest.approx(1, rel=1e-2)
    assert answer["tokens"]["names"] == {"2": "</s>"}
    assert answer["tokens"]["template"] == ""


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


FILES = {
    "cut": (header(a={"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}) + bytes(8), "'a' ends after"),
    "header cut": (header(a={"dtype": "BF16"})[:-4], "its header is cut"),
    "empty dtype": (  # torchtitan 3764: the entry of a tied head
        header(lm_head={"dtype": "", "shape": [], "data_offsets": [0, 0]}),
        "an empty dtype for 'lm_head'",
    ),
    "wrong size": (
        header(a={"dtype": "BF16", "shape": [8], "data_offsets": [0, 8]}) + bytes(8),
        "'a' has 8 bytes, and its shape",
    ),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    "empty": (b"", "no safetensors header"),
    "no tensor": (header(), "without tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_damaged_file_gives_one_line_with_file_key_and_fix(tmp_path, name):
    content, message = FILES[name]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    result = invoke("inspect", file)
    assert isinstance(result.exception, UsageError)
    assert result.exception.exit_status == 2
    assert message in result.exception.message
    assert str(file) in result.exception.message
    assert result.exception.fix
    assert "\n" not in result.exception.message
    found = json.loads(invoke("doctor", file, "--json").stdout)["findings"]
    assert "MF000" in [finding["code"] for finding in found]


def test_other_paths_are_refused_with_what_may_be_meant(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        ask("inspect", tmp_path / "absent")
    with pytest.raises(UsageError, match="the folder is empty"):
        ask("inspect", tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"no \.safetensors file"):
        ask("inspect", tmp_path)
    with pytest.raises(UsageError, match="not a format of weights"):
        ask("inspect", tmp_path / "notes.txt")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match="a pickle"):
        ask("inspect", tmp_path)
    (tmp_path / "model_index.json").touch()
    with pytest.raises(UsageError, match="a pipeline of diffusers"):
        ask("inspect", tmp_path)


def test_doctor_inspects_a_folder_of_a_model(sound, tmp_path):
    weight = load_file(sound / "model.safetensors")[f"{Q}.weight"]
    folder = change(copy(sound, tmp_path / "nan"), {f"{Q}.weight": weight * torch.nan})
    result = invoke("doctor", folder)
    assert result.exit_code == 1
    assert "error MF001" in result.stdout
    assert "  inspect  21 tensors: 1 finding" in result.stdout

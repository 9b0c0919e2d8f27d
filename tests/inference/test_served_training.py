"""`adapter.serve_as`: the file that is exported has the weights with which the run trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.api import (
    RunWeights,
    export_language,
    load_run,
    lora_layers,
    pack_compressed,
    read_projection,
    restore_rows,
    served_merged_weight,
    served_weight,
)
from tests.commands import ask
from tests.gguf_files import splitting
from tests.inference.test_verify import QUESTIONS, file_tensors, verify
from tests.models import SIZES, tiny

from isotype import load_packed
from isotype.errors import UsageError

gguf = pytest.importorskip("gguf")
STEPS = 8
HEADS = {"q_proj": SIZES["num_attention_heads"], "k_proj": SIZES["num_key_value_heads"]}


def write_run(folder: Path, name: str, **changes: Any) -> Path:
    """Writes the configuration of a run in a folder with a base and data. Keys of `changes` are
    sections, or dotted keys with `__`."""
    config: dict[str, Any] = {
        "model": {"name": str(folder / "base")},
        "data": {"train": str(folder / "chats.jsonl"), "eval_split": 0.2, "max_length": 96},
        "adapter": {"kind": "lora", "r": 8, "serve_as": "q4_0"},
        "precision": {"preset": "bf16-lora"},
        "train": {
            "steps": STEPS,
            "batch_size": 4,
            "learning_rate": 2e-2,
            "schedule": "constant",
            "eval_every": STEPS,
        },
        "run": {"folder": str(folder / name), "sample_every": 0, "samples": [], "report": False},
    }
    for key, value in changes.items():
        section, _, setting = key.partition("__")
        config.setdefault(section, {})[setting] = value
    (folder / f"{name}.yaml").write_text(json.dumps(config))
    return folder / f"{name}.yaml"


def read_values(stored: dict[str, Any], name: str, heads: int = 0) -> torch.Tensor:
    """Returns the dequantised values of a weight, with rows in transformers' order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    tensor = stored[names.get_name(name, try_suffixes=(".weight",))]
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    return restore_rows(values, heads) if heads else values


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a tiny bf16 base and chats."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = splitting()
    sizes = SIZES | {"vocab_size": 320, "bos_token_id": None, "hidden_size": 64}
    sizes |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    tiny("llama", **{**sizes, "intermediate_size": 64}).bfloat16().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in QUESTIONS
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def served(place) -> SimpleNamespace:
    ask("train", write_run(place, "run"))
    file = place / "run.gguf"
    report = ask(
        "export", place / "run", "--to", "gguf", "--type", "Q4_0", "--out", file, "--verify"
    )
    return SimpleNamespace(folder=place, run=place / "run", file=file, report=report)


def test_the_file_has_the_weights_of_the_trained_forward(served) -> None:
    run = load_run(served.run)
    weights = RunWeights(load_run(served.run, as_served=False))
    stored = file_tensors(served.file)
    checked = 0
    for path, layer in lora_layers(run.model):
        projection = read_projection(layer, torch.zeros(1, layer.in_features), for_served=True)
        packed, state = served_weight(layer).round_weight(projection)
        name = path.removeprefix("base_model.model.") + ".weight"
        values = read_values(stored, name, HEADS.get(path.rpartition(".")[2], 0))
        assert torch.equal(values, state.dequantise(packed, torch.float32)), name
        assert torch.equal(weights.unrounded(name), served_merged_weight(projection)), name
        checked += 1
    assert checked == 14
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        values = read_values(stored, name)
        frozen = run.model.get_base_model().get_parameter(name)
        assert torch.equal(values.to(frozen.dtype), frozen), name


def test_verify_shows_both_sides(served) -> None:
    result = verify(served.run, served.file)
    assert result["same"]
    assert result["kept"] == pytest.approx(1.0, abs=1e-6)
    assert result["loss"]["served"] == result["loss"]["trained"]
    assert "trained for q4_0" in result["notes"][0]
    assert "without the rounding" in served.report


def test_the_role_is_declared_and_observed(served) -> None:
    record = json.loads((served.run / "precision.json").read_text())
    declared = record["declared"]["served"]
    assert declared == {"value": "q4_0", "reason": f"adapter.serve_as, {served.run}.yaml:1"}
    assert record["observed"]["served"] == {"q4_0": 14}
    assert record["precision"] == "bf16-lora served=q4_0"


@pytest.mark.full
def test_rounding_begins_after_a_share_of_the_steps(served) -> None:
    ask(
        "train", write_run(served.folder, "late", adapter__serve_from=0.5, adapter__serve_as="q8_0")
    )
    config = write_run(served.folder, "plain")
    plain = json.loads(config.read_text())
    del plain["adapter"]["serve_as"]
    config.write_text(json.dumps(plain))
    ask("train", config)
    late, unrounded = (
        [
            row["loss"]
            for row in map(json.loads, (served.folder / name / "metrics.jsonl").open())
            if "loss" in row
        ]
        for name in ("late", "plain")
    )
    # the frozen matrices are rounded from the start
    assert late[0] == pytest.approx(unrounded[0], abs=0.02)
    record = json.loads((served.folder / "late" / "precision.json").read_text())
    assert record["observed"]["served"] == {"q8_0": 14}


@pytest.mark.full
def test_a_resumed_run_has_the_same_bytes(served) -> None:
    """The weights are rounded before and after the interruption."""
    ask("train", write_run(served.folder, "cut", run__save_every=4))
    cut = served.folder / "cut"
    shutil.rmtree(cut / "adapter")
    shutil.rmtree(cut / "checkpoints" / f"step_{STEPS}")
    ask("train", "--resume", cut)
    whole = (served.run / "adapter" / "adapter_model.safetensors").read_bytes()
    assert (cut / "adapter" / "adapter_model.safetensors").read_bytes() == whole


REFUSED = {
    "adapter__dora": (True, "rows are scaled"),
    "adapter__dropout": (0.1, "input of the adapter only"),
    "adapter__start": ("pissa", "another pair of matrices"),
    "adapter__modules_to_save": (["lm_head"], "whole modules"),
    "adapter__train_tokens": (["<|im_start|>"], "rows of the embedding"),
    "adapter__targets": (["lm_head"], "on the embedding or on the head"),
    "adapter__kind": ("none", "every weight"),
    "precision__trainable": ("bf16", "rounds A and B"),
    "model__optimize": (False, "leaves the adapter to PEFT"),
}


def test_settings_with_which_the_file_would_differ_are_refused(place, subtests) -> None:
    for key, (value, message) in REFUSED.items():
        with subtests.test(key), pytest.raises(UsageError, match=message):
            ask("plan", write_run(place, "refused", **{key: value}))
    config = write_run(place, "refused", adapter__serve_as=None, adapter__serve_from=0.5)
    with pytest.raises(UsageError, match="has no effect without"):
        ask("plan", config)


def test_a_matrix_that_does_not_fit_the_blocks_is_refused(place, tmp_path) -> None:
    tiny("llama", **{**SIZES, "vocab_size": 320, "hidden_size": 48}).save_pretrained(tmp_path)
    splitting().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="rows of 48 values, no multiple of 32"):
        ask("plan", write_run(place, "refused", model__name=str(tmp_path)))


@pytest.mark.full
def test_a_merged_folder_has_the_rounded_weights(served, tmp_path) -> None:
    ask("merge", served.run, "--out", tmp_path / "merged", "--dtype", "fp32")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    weights = RunWeights(load_run(served.run, as_served=False))
    for name, value in merged.items():
        assert torch.equal(value, weights.trained(name)), name


def test_without_a_type_ollama_gets_the_rounded_weights(served, tmp_path) -> None:
    """The types of compressed-tensors have no GGUF type that `--type` could be equal to."""
    run = load_run(served.run, as_served=False)
    run = replace(run, precision=run.precision.but(served="int4"))
    export_language(
        served.run, tmp_path / "out", to="ollama", kind=None, name="mine", load=lambda _: run
    )
    stored = file_tensors(tmp_path / "out" / "model.gguf")
    name = "model.layers.1.mlp.down_proj.weight"
    rounded = RunWeights(run).trained(name)
    assert not torch.equal(rounded, RunWeights(run).unrounded(name))
    assert torch.equal(read_values(stored, name), rounded.bfloat16().float())


@pytest.mark.parametrize(
    "name",
    [
        "fp8",
        "int4",
        "nvfp4",
        pytest.param("int8", marks=pytest.mark.full),
        pytest.param("mxfp4", marks=pytest.mark.full),
    ],
)
def test_a_folder_of_compressed_tensors_keeps_the_rounded_weights(served, tmp_path, name) -> None:
    """The folder is read by `verify`, and loaded as a packed base."""
    folder = tmp_path / name
    ask("export", served.run, "--to", "compressed-tensors", "--type", name, "--out", folder)
    result = verify(served.run, folder, "--keep", 0.0)
    assert result["format"] == f"folder, {name}"
    assert result["differences"] == []
    loaded = load_packed(str(folder), dtype=torch.bfloat16)
    weights = RunWeights(load_run(served.run, as_served=False))
    layer = "model.layers.1.mlp.down_proj"
    packed = loaded.get_submodule(layer).weight
    values = packed.quant_state.dequantise(packed.data, torch.float32)
    exact = weights.trained(f"{layer}.weight")
    global_scale = load_file(folder / "model.safetensors").get(f"{layer}.weight_global_scale")
    want, state = pack_compressed(exact, name, group=64, global_scale=global_scale)
    assert torch.equal(values, state.dequantise(want, torch.float32))
    assert torch.equal(
        loaded.lm_head.weight.float(), weights.trained("lm_head.weight").bfloat16().float()
    )


JOINED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def global_scales(folder: Path) -> list[set[float]]:
    """Returns the global scales in nvfp4 of the matrices that vLLM joins, for each joined matrix."""
    stored = load_file(folder / "model.safetensors")
    return [
        {
            float(stored[f"model.layers.{layer}.{block}.{name}.weight_global_scale"])
            for name in names
        }
        for layer in range(2)
        for block, names in JOINED
    ]


def enlarge(base: Path, factors: dict[str, float]) -> None:
    """Multiplies matrices of a base by different factors, so that their largest values differ."""
    tensors = load_file(base / "model.safetensors")
    for name, tensor in tensors.items():
        for part, factor in factors.items():
            if part in name:
                tensors[name] = tensor * factor
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("serve_as", ["nvfp4", pytest.param(None, marks=pytest.mark.full)])
def test_matrices_that_a_server_joins_have_one_global_scale(place, tmp_path, serve_as) -> None:
    """vLLM keeps the largest `weight_global_scale` of q, k and v, and of gate and up."""
    shutil.copytree(place / "base", tmp_path / "base")
    enlarge(tmp_path / "base", {"k_proj": 8.0, "up_proj": 0.2})
    changes = {"model__name": str(tmp_path / "base"), "train__steps": 2}
    targets = {"adapter__targets": ["q_proj", "up_proj"], "adapter__serve_as": serve_as}
    ask("train", write_run(place, f"joined-{serve_as}", **changes, **targets))
    run = place / f"joined-{serve_as}"
    folder = tmp_path / "nvfp4"
    ask("export", run, "--to", "compressed-tensors", "--type", "nvfp4", "--out", folder)
    assert [scales for scales in global_scales(folder) if len(scales) > 1] == []
    result = verify(run, folder, "--keep", 0.0)
    assert result["differences"] == []
    if serve_as:
        assert result["loss"]["served"] == result["loss"]["trained"]


@pytest.mark.full
def test_a_published_nvfp4_base_gets_one_global_scale(place, tmp_path) -> None:
    """The matrices of a base may have different global scales, as other programs write them."""
    changes = {"adapter__serve_as": None, "train__steps": 2}
    ask("train", write_run(place, "to-nvfp4", **changes))
    base = tmp_path / "base"
    ask(
        "export", place / "to-nvfp4", "--to", "compressed-tensors", "--type", "nvfp4", "--out", base
    )
    tensors = load_file(base / "model.safetensors")
    for name in tensors:
        if "k_proj.weight_global_scale" in name:
            tensors[name] = tensors[name] * 4
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    settings = {"model__name": str(base), "precision__preset": "auto"}
    targets = {"adapter__targets": ["q_proj"]}
    ask("train", write_run(place, "from-nvfp4", **changes, **settings, **targets))
    folder = tmp_path / "nvfp4"
    ask("export", place / "from-nvfp4", "--to", "compressed-tensors", "--out", folder)
    assert [scales for scales in global_scales(folder) if len(scales) > 1] == []
    assert verify(place / "from-nvfp4", folder, "--keep", 0.0)["differences"] == []
    stored = load_file(folder / "model.safetensors")
    for part in ("weight_packed", "weight_scale", "weight_global_scale"):
        name = f"model.layers.0.mlp.up_proj.{part}"
        assert torch.equal(stored[name].view(torch.uint8), tensors[name].view(torch.uint8)), part


@pytest.mark.full
@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "nvfp4", "mxfp4"])
def test_a_run_that_trains_for_compressed_tensors_is_its_folder(place, tmp_path, name) -> None:
    ask("train", write_run(place, name, adapter__serve_as=name))
    folder = tmp_path / name
    ask("export", place / name, "--to", "compressed-tensors", "--out", folder)
    result = verify(place / name, folder)
    assert result["same"], result
    assert result["loss"]["served"] == result["loss"]["trained"]
    stored = load_file(folder / "model.safetensors")
    run = load_run(place / name)
    for path, layer in lora_layers(run.model):
        projection = read_projection(layer, torch.zeros(1, layer.in_features), for_served=True)
        packed, state = served_weight(layer).round_weight(projection)
        owner = path.removeprefix("base_model.model.")
        for part, tensor in {state.layout.packed_tensor[0]: packed, **state.tensors}.items():
            file_bytes = stored[f"{owner}.{part}"].contiguous().view(torch.uint8)
            assert torch.equal(file_bytes, tensor.contiguous().view(torch.uint8)), (owner, part)


@pytest.mark.full
def test_a_published_base_goes_back_into_its_own_format(served, tmp_path) -> None:
    base = tmp_path / "base"
    ask("export", served.run, "--to", "compressed-tensors", "--type", "fp8", "--out", base)
    changes = {"adapter__serve_as": None, "adapter__targets": ["q_proj"]}
    settings = {"model__name": str(base), "precision__preset": "auto"}
    ask("train", write_run(served.folder, "back", **changes, **settings))
    folder = tmp_path / "back"
    ask("export", served.folder / "back", "--to", "compressed-tensors", "--out", folder)
    assert verify(served.folder / "back", folder, "--keep", 0.0)["differences"] == []
    before = load_file(base / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        is_same = torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8))
        assert is_same or "q_proj.weight" in name, name
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))

"""GGUF files as bases, against transformers' own widening of the same file and the package gguf."""

import json
import struct
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from isotype import load_packed
from isotype.environment.hardware import detect
from isotype.errors import UsageError
from isotype.inference.loaded import load_run
from isotype.inference.merge import merged_state
from isotype.lora import PackedLinear
from isotype.precision import PRESETS
from isotype.tasks.choose import train
from tests.api import (
    BLOCKS,
    decode_blocks,
    export_model,
    find_non_finite,
    read_architecture,
    read_header,
)
from tests.commands import ask
from tests.gguf_files import blocks, splitting, write
from tests.model.test_packed import BF16, adapted, dense, off, step, user
from tests.models import tiny

gguf = pytest.importorskip("gguf")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 320}
# transformers takes widths of these families from its own defaults
EXPERTS = {"head_dim": 128, "num_experts": 4, "moe_intermediate_size": 768}
GEMMA = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 8,
    "num_hidden_layers": 7,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": EXPERTS,
    "gemma3_text": GEMMA,
}
MIXED = {"ffn_down.weight": "Q6_K", "attn_v.weight": "Q5_K"}
IDS = torch.arange(3, 51).view(2, 24)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """`file(family)`: a model's file, alone in its folder."""
    place, tokenizer = tmp_path_factory.mktemp("gguf"), splitting()
    tokenizer.save_pretrained(place / "tokenizer")

    def make(family: str = "llama", kind: str = "Q4_K", **changes):
        at = place / "-".join((family, kind, *map(str, changes))) / "model.gguf"
        if not at.exists():
            at.parent.mkdir()
            ids = {
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
            }
            model = tiny(family, **SIZES | ids | FAMILIES[family] | changes)
            write(model, place / "tokenizer", at, kind, others=MIXED if kind == "Q4_K" else {})
        return at

    return make


def test_blocks_have_the_bits_of_the_package(subtests):
    for kind, (_, size, halves) in BLOCKS.items():
        with subtests.test(kind):
            raw = blocks(kind, 24, 768)
            want = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))
            packed = torch.from_numpy(raw)
            assert torch.equal(
                decode_blocks(kind, packed, torch.float32).view(torch.int32), want.view(torch.int32)
            )
            torch.testing.assert_close(
                decode_blocks(kind, packed, torch.float64), want.double(), rtol=1e-6, atol=1e-6
            )
            assert not find_non_finite(kind, packed).any()
            packed[5, size + halves[-1] : size + halves[-1] + 2] = torch.tensor(
                [torch.nan], dtype=torch.float16
            ).view(torch.uint8)
            assert find_non_finite(kind, packed).nonzero().tolist() == [[5, 1]]


def test_a_file_is_the_model_that_transformers_widens(file, subtests):
    for family in FAMILIES:
        with subtests.test(family):
            path = file(family)
            model = load_packed(str(path), dtype=torch.float32)
            want = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            )
            torch.testing.assert_close(model(IDS).logits, want(IDS).logits, rtol=1e-5, atol=1e-5)
            layer = model.model.layers[0].self_attn.q_proj
            assert type(layer) is PackedLinear
            assert layer.weight.nbytes == layer.out_features * 144, "as many bytes as in the file"


def test_a_file_that_does_not_count_heads_of_keys_has_one_for_each_head(tmp_path):
    splitting().save_pretrained(tmp_path / "tokenizer")
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    model = tiny("llama", **SIZES | ids | {"num_key_value_heads": SIZES["num_attention_heads"]})
    write(model, tmp_path / "tokenizer", tmp_path / "a.gguf", "Q8_0")
    write(
        model,
        tmp_path / "tokenizer",
        tmp_path / "b.gguf",
        "Q8_0",
        keys={"llama.attention.head_count_kv": None},
    )
    said, silent = (
        load_packed(str(tmp_path / name), dtype=torch.float32)(IDS).logits
        for name in ("a.gguf", "b.gguf")
    )
    assert torch.equal(said, silent)


@pytest.mark.parametrize(
    "kind",
    ["Q4_K", *(pytest.param(k, marks=pytest.mark.full) for k in ("Q8_0", "Q5_K", "Q6_K", "Q3_K"))],
)
def test_gradients_are_as_near_as_those_of_the_dense_weights(file, kind):
    model = load_packed(str(file(kind=kind)))
    plain, exact = dense(model, torch.bfloat16), dense(model, torch.float64)
    logits, grads = step(adapted(model, BF16.but(base="gguf")), IDS)
    plain_logits, plain_grads = step(adapted(plain, BF16), IDS)
    exact_logits, exact_grads = step(adapted(exact, None).double(), IDS)
    assert off(logits, exact_logits) <= 1.5 * off(plain_logits, exact_logits)
    for n, grad in grads.items():
        assert off(grad, exact_grads[n]) <= 1.5 * off(plain_grads[n], exact_grads[n]) + 1e-3, n


def test_a_file_is_trained_resumed_and_merged_as_peft_would(file, configured, tmp_path):
    path = file()
    assert (
        train(
            configured(model={"name": str(path)}, precision={"preset": "auto"}, train={"steps": 2})
        )
        == 0
    )
    run = tmp_path / "run"
    said = json.loads((run / "precision.json").read_text())
    # fp32 on a CPU without bf16 instructions
    preset = "bf16-lora" if detect("cpu").bf16 == "native" else "fp32"
    assert said["precision"] == f"{preset} base=gguf"
    # the head is packed, the embedding is not
    assert said["observed"]["base"] == {"gguf": 15, PRESETS[preset].compute: 6}
    assert said["violations"] == []
    notes = json.loads((run / "manifest.json").read_text())["notes"]
    assert "the base came quantised: gguf, blocks Q4_K, Q5_K, Q6_K" in notes
    ask("train", "--resume", run, "train.steps=3")
    assert 'isotype.load_packed("' in (run / "adapter/README.md").read_text()
    # the dense weights, as transformers widens the file: PEFT loads the adapter there, and merges
    # to the same
    plain = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    expected = (
        PeftModel.from_pretrained(plain, str(run / "adapter")).merge_and_unload().state_dict()
    )
    state, _, count = merged_state(load_run(run).model, torch.float32)
    assert count == 14
    for name, value in state.items():
        assert off(value.double(), expected[name].double()) <= 2e-5 + (
            2e-3 if "embed" in name else 0
        ), name
    assert "checked" in ask("merge", run, "--out", tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    assert "14 layers" in ask("export", run, "--to", "gguf", "--out", tmp_path / "adapter.gguf")


def test_llama_3s_scaling_of_positions_is_found_again(tmp_path):
    """transformers leaves it out, and has other angles."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope |= {"original_max_position_embeddings": 8192}
    tiny("llama", **SIZES, rope_parameters=rope, head_dim=64).save_pretrained(tmp_path / "model")
    splitting().save_pretrained(tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "model.gguf", "Q8_0")
    assert read_architecture(str(tmp_path / "model.gguf")).rope_parameters == rope


def test_gemma_3_has_the_constants_of_llama_cpp(tmp_path, monkeypatch, subtests):
    splitting().save_pretrained(tmp_path / "tokenizer")
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    model = tiny("gemma3_text", **SIZES | ids | GEMMA)

    def read(name: str, **keys):
        file = tmp_path / f"{name}.gguf"
        settings = {f"gemma3.{key}": value for key, value in keys.items()}
        write(model, tmp_path / "tokenizer", file, "Q8_0", keys=settings)
        return read_architecture(str(file))

    with subtests.test("as released"):
        config = read("plain")
        assert config.layer_types == model.config.layer_types
        assert (config.sliding_window, config.query_pre_attn_scalar) == (8, 256)
        assert config.rope_parameters == GEMMA["rope_parameters"]
    with subtests.test("positions of the larger ones"):
        scaled = read("scaled", **{"rope.scaling.type": "linear", "rope.scaling.factor": 8})
        whole = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
        assert scaled.rope_parameters["full_attention"] == whole
        local = GEMMA["rope_parameters"]["sliding_attention"]
        assert scaled.rope_parameters["sliding_attention"] == local
    with subtests.test("the 27B scales by the hidden size"):
        monkeypatch.setattr("isotype.model.gguf._GEMMA3_27B_LAYERS", 7)
        assert read("large").query_pre_attn_scalar == 256 // 8
    with subtests.test("no window"), pytest.raises(UsageError, match="sliding_window is missing"):
        read("full", **{"attention.sliding_window": None})


UNREAD = (
    ("general.architecture", "gemma2", "GGUF files of gemma2 are not read"),
    ("split.count", 2, "a part of 2"),
    ("llama.attention.sliding_window", 8, "llama.attention.sliding_window: 8 is not read"),
    ("llama.rope.scaling.type", "longrope", "rope.scaling.type: longrope is not read"),
    (
        "tokenizer.ggml.pre",
        "own-words",
        "how its tokenizer splits text (tokenizer.ggml.pre: own-words) is not known",
    ),
)


def test_what_is_not_read_is_refused_by_name(workshop, tmp_path, subtests):
    splitting().save_pretrained(tmp_path / "tokenizer")
    model = tiny("llama", **SIZES | {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2})
    for key, value, message in UNREAD:
        with subtests.test(key):
            write(
                model, tmp_path / "tokenizer", tmp_path / f"{key}.gguf", "Q8_0", keys={key: value}
            )
            error = user(["--model", str(tmp_path / f"{key}.gguf"), "--data", str(workshop.chats)])
            assert message in str(error)
            assert error.exit_status == 2


def test_the_package_is_named_where_it_is_missing(file, workshop, monkeypatch):
    """transformers before 5.23 reads the tokenizer with it; nothing else does."""
    path = file()  # the package writes it
    monkeypatch.setitem(sys.modules, "gguf", None)
    path.touch()
    assert len(read_header(path).tensors) == 21

    def needs_package(*args, **kwargs):
        raise ImportError("gguf>=0.10 is required")

    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", needs_package)
    assert "[gguf]'" in str(user(["--model", str(path), "--data", str(workshop.chats)]))


def test_a_header_is_read_without_the_tokens_of_a_vocabulary(tmp_path, workshop):
    """A refusal of Gemma's 262,144 tokens took 27 s: each became an object of the package."""
    writer = gguf.GGUFWriter(str(tmp_path / "large.gguf"), "mamba")
    writer.add_token_list([f"token {i}" for i in range(60_000)])
    writer.add_token_scores([0.5] * 60_000)
    writer.add_array("mamba.pattern", [True, False])
    writer.add_tensor("output_norm.weight", np.arange(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tracemalloc.start()
    header = read_header(tmp_path / "large.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000, "bytes: no object a token"
    assert header.fields == {"general.architecture": "mamba", "mamba.pattern": [True, False]}
    entry = header.tensors["output_norm.weight"]
    assert (entry.kind, entry.shape, entry.size) == ("F32", (8,), 32)
    content = (tmp_path / "large.gguf").read_bytes()[entry.offset :][:32]
    assert np.frombuffer(content, np.float32).tolist() == list(range(8))
    error = user(["--model", str(tmp_path / "large.gguf"), "--data", str(workshop.chats)])
    assert "GGUF files of mamba are not read" in str(error)


def test_a_header_that_says_what_is_not_there_is_refused(file, tmp_path, subtests):
    content = file(kind="Q8_0").read_bytes()
    name = b"blk.0.ffn_up.weight"
    entry = content.index(name) + len(name)
    changes = {
        "does not begin with GGUF": (0, b"GGML"),
        "version 9": (4, struct.pack("<I", 9)),
        "entries": (8, struct.pack("<Q", 1 << 40)),
        "a value of kind 77": (content.index(b"general.architecture") + 20, struct.pack("<I", 77)),
        "9 dimensions": (entry, struct.pack("<I", 9)),
        "in blocks of 32": (entry + 4, struct.pack("<Q", 33)),
        "ends after the file does": (entry + 12, struct.pack("<Q", 1 << 40)),
    }
    for message, (at, value) in changes.items():
        damaged = bytearray(content)
        damaged[at : at + len(value)] = value
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        with subtests.test(message), pytest.raises(ValueError, match=message):
            read_header(tmp_path / "damaged.gguf")
    for length in (0, 3, 20, 200, entry):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with subtests.test(f"{length} bytes"), pytest.raises(ValueError, match=r"cut|empty"):
            read_header(tmp_path / "cut.gguf")


def test_damaged_files_are_named(file, workshop, tmp_path):
    assert "model.name: no.gguf: no such file" in str(
        user(["--model", "no.gguf", "--data", str(workshop.chats)])
    )
    content = file(kind="Q8_0").read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/model.gguf").write_bytes(content[: len(content) // 2])
    assert "no whole GGUF file" in str(
        user(["--model", str(tmp_path / "cut"), "--data", str(workshop.chats)])
    )
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(content)
    assert "2 GGUF files" in str(user(["--model", str(tmp_path), "--data", str(workshop.chats)]))
    path = tmp_path / "a.gguf"
    at = {t.name: t for t in gguf.GGUFReader(str(path)).tensors}["blk.1.ffn_up.weight"].data_offset
    damaged = bytearray(content)
    damaged[at : at + 2] = b"\x00\x7e"
    path.write_bytes(bytes(damaged))
    error = user(
        ["--model", str(path), "--data", str(workshop.chats), f"run.folder={tmp_path / 'run'}"],
        "train",
    )
    assert "model.layers.1.mlp.up_proj.Q8_0 is not finite at [0, 0]" in str(error)

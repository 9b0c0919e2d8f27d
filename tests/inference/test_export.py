"""Results as llama.cpp, Ollama and vLLM read them: read back by transformers, or computed as their
readers compute.
"""

from __future__ import annotations

import json
import math
import os
import signal
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.api import (
    GGUF_FAMILIES,
    export_adapter,
    export_language,
    export_model,
    export_vllm,
    find_turns,
    tokenizer_keys,
)
from tests.api import gguf_file_FAMILIES as FAMILIES
from tests.commands import ask
from tests.gguf_files import TEXTS, splitting
from tests.models import FAMILIES as SETTINGS
from tests.models import SIZES, lora, tiny
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from isotype.errors import RunError, UsageError
from isotype.inference.loaded import load_run
from isotype.inference.merge import merge
from isotype.model.gguf import load_gguf_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return splitting()


# transformers reads neither the width of a head nor Gemma's scale from the file, and takes those of
# released models
HEADS = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}


def saved(folder: Path, family: str, tokenizer, dtype=torch.float16, **changes) -> Path:
    """A random model's folder, its values those of `dtype`; norms are no ones."""
    sizes = {
        **SIZES,
        "vocab_size": 320,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    heads = (
        {"head_dim": HEADS[family], "query_pre_attn_scalar": HEADS[family]}
        if family in HEADS
        else {}
    )
    model = tiny(family, **{**sizes, **SETTINGS.get(family, {}), **heads, **changes})
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", ".bias")):
            torch.nn.init.normal_(parameter, std=0.5)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 35)[None]).logits


def test_a_model_of_each_family_is_read_back_bit_for_bit(
    tmp_path: Path, tokenizer, subtests
) -> None:
    pytest.importorskip("gguf")
    for family, (kind, dtype) in product(
        GGUF_FAMILIES, (("F16", torch.float16), ("BF16", torch.bfloat16))
    ):
        with subtests.test(f"{family} {kind}"):
            place = tmp_path / family
            folder, as_it_is = (
                saved(place / kind, family, tokenizer, dtype),
                {"dtype": torch.float32, "attn_implementation": "eager"},
            )
            export_model(folder, place / f"{kind}.gguf", kind)
            want = AutoModelForCausalLM.from_pretrained(folder, **as_it_is)
            read = AutoModelForCausalLM.from_pretrained(place, gguf_file=f"{kind}.gguf", **as_it_is)
            # Gemma's norms are stored with 1 added, in fp32
            tolerance = 2e-6 if FAMILIES[family].norm_offset else 0.0
            torch.testing.assert_close(logits(read), logits(want), rtol=tolerance, atol=tolerance)


def test_a_whole_model_is_not_named_as_an_adapter(tmp_path: Path, tokenizer) -> None:
    pytest.importorskip("gguf")
    folder = saved(tmp_path / "mine", "llama", tokenizer)
    assert str(folder / "mine-model.gguf") in ask("export", folder, "--to", "gguf")


def test_q8_0_is_off_by_its_rounding_only(tmp_path: Path, tokenizer) -> None:
    gguf = pytest.importorskip("gguf")
    folder = saved(tmp_path / "model", "llama", tokenizer, hidden_size=64)
    export_model(folder, tmp_path / "model.gguf", "Q8_0")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kinds = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader(str(tmp_path / "model.gguf")).tensors
    }
    assert kinds["blk.0.attn_q.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_down.weight"] == "F16", "rows of 48"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    for name, parameter in rounded.named_parameters():
        if parameter.ndim == 2 and parameter.shape[1] % 32 == 0:
            blocks = gguf.quants.quantize(
                parameter.detach().numpy(), gguf.GGMLQuantizationType.Q8_0
            )
            parameter.data = torch.from_numpy(
                gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
            )
            torch.testing.assert_close(
                read.get_parameter(name), parameter, rtol=0, atol=0, msg=name
            )
    torch.testing.assert_close(logits(read), logits(rounded))


@pytest.mark.full
def test_a_gguf_file_of_another_family_is_refused_as_a_base_with_the_way(
    tmp_path: Path, tokenizer, monkeypatch
) -> None:
    gguf = pytest.importorskip("gguf")
    folder = saved(tmp_path / "model", "phi3", tokenizer, hidden_size=64)
    (tmp_path / "gguf").mkdir()
    file = tmp_path / "gguf/model.gguf"
    export_model(folder, file, "Q8_0")
    (tmp_path / "rows.jsonl").write_text('{"text": "one row of text"}\n' * 8)
    for given in (file, file.parent):
        with pytest.raises(UsageError, match="GGUF files of phi3 are not read") as refused:
            ask("plan", "--model", given, "--data", tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    code = (
        str(refused.value.fix)
        .removeprefix("transformers can dequantise it: ")
        .partition("; then")[0]
    )
    exec(f"from transformers import *; {code}", {})
    blocks = {t.name: t for t in gguf.GGUFReader(str(file)).tensors}["blk.0.ffn_up.weight"]
    weight = AutoModelForCausalLM.from_pretrained("DENSE").model.layers[0].mlp.gate_up_proj.weight
    assert torch.equal(
        weight.float(),
        torch.from_numpy(gguf.quants.dequantize(blocks.data, blocks.tensor_type))
        .bfloat16()
        .float(),
    )
    assert "int8" in ask(
        "plan", "--model", "DENSE", "--data", tmp_path / "rows.jsonl", "precision.base=int8"
    )


def test_llama_3s_scaled_rotary_embedding_is_in_the_file(tmp_path: Path, tokenizer) -> None:
    """Against the formula in llama.cpp's converter: transformers' reader ignores the tensor."""
    gguf = pytest.importorskip("gguf")
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    folder = saved(tmp_path / "model", "llama", tokenizer, rope_parameters=rope, head_dim=32)
    export_model(folder, tmp_path / "model.gguf", "F16")
    (found,) = (
        t.data
        for t in gguf.GGUFReader(str(tmp_path / "model.gguf")).tensors
        if t.name == "rope_freqs.weight"
    )
    want = []
    for i in range(0, 32, 2):
        length = 2 * math.pi * 5e5 ** (i / 32)
        smooth = (64 / length - 1.0) / (4.0 - 1.0)
        want.append(
            1.0
            if length < 64 / 4.0
            else 8.0
            if length > 64 / 1.0
            else 1 / ((1 - smooth) / 8.0 + smooth)
        )
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert len({round(x, 4) for x in want}) > 2


def test_the_tokenizer_and_its_template_are_read_back(tmp_path: Path, tokenizer) -> None:
    gguf = pytest.importorskip("gguf")
    export_model(saved(tmp_path / "model", "qwen2", tokenizer), tmp_path / "model.gguf", "F16")
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert [read(text)["input_ids"] for text in TEXTS] == [
        tokenizer(text)["input_ids"] for text in TEXTS
    ]
    assert read.chat_template == tokenizer.chat_template
    fields = gguf.GGUFReader(str(tmp_path / "model.gguf")).fields
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert fields["tokenizer.ggml.token_type"].contents()[:4] == [3, 3, 3, 1]
    assert fields["tokenizer.ggml.token_type"].contents()[-1] == 5, "an id without a token"


def pieces(text: str, scores: dict[str, float]) -> list[str]:
    """llama.cpp's way with a vocabulary of pieces: the neighbours whose product has the highest
    score, the first of equals, until none.
    """
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        found = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not found:
            return parts
        at = -max(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_scores_of_pieces_merge_in_the_order_of_the_merges(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    texts = [
        "how much wood would a woodchuck chuck",
        "much ado about nothing",
        "a cuckoo would chuck",
    ]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>", "<0x0A>"]),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    keys = dict(tokenizer_keys(tmp_path, 130, ""))
    assert (keys["add_tokenizer_model"], keys["add_add_space_prefix"]) == ("llama", True)
    assert [keys["add_token_types"][i] for i in (0, 1, 3, 4, 129)] == [2, 3, 6, 1, 5]
    scores = {
        token: score
        for token, score, kind in zip(
            keys["add_token_list"], keys["add_token_scores"], keys["add_token_types"], strict=True
        )
        if kind == 1
    }
    for text in [*texts, "would a cuckoo chuck much"]:
        assert pieces(text, scores) == tokenizer.encode(text).tokens


def adapter_of(folder: Path, base: Path, **settings) -> Path:
    model = lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), **settings)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def test_every_family_of_adapters_has_names_for_its_attention(subtests) -> None:
    gguf = pytest.importorskip("gguf")
    for family in sorted(set(FAMILIES) - {"gemma3"}):
        with subtests.test(family):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.for_model(family, **{**SIZES, **SETTINGS.get(family, {})})
                )
            names = gguf.get_tensor_name_map(
                getattr(gguf.MODEL_ARCH, FAMILIES[family].architecture), 2
            )
            linear = [
                name
                for name, module in model.named_modules()
                if isinstance(module, torch.nn.Linear) and ".self_attn." in name
            ]
            found = {names.get_name(name) for name in linear}
            assert len(found) == len(linear) >= 4
            assert all(name and name.startswith("blk.") for name in found)


PATTERNS = {
    "lora_alpha": 6,
    "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8},
    "alpha_pattern": {"v_proj": 11},
}


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {"use_rslora": True}), ("phi3", {}), ("gemma2", PATTERNS)]
)
def test_an_adapter_on_its_base_is_the_merged_model(
    tmp_path: Path, tokenizer, family: str, settings: dict
) -> None:
    """With llama.cpp's arithmetic: each layer adds alpha over its rank times B A."""
    gguf = pytest.importorskip("gguf")
    base = saved(tmp_path / "base", family, tokenizer, torch.float32, intermediate_size=64)
    adapter = adapter_of(tmp_path / "adapter", base, **settings)
    merge(load_run(adapter), tmp_path / "merged", dtype="fp32")
    export_adapter(adapter, tmp_path / "lora.gguf")
    found = gguf.GGUFReader(str(tmp_path / "lora.gguf"))
    alpha = found.fields["adapter.lora.alpha"].contents()
    assert found.fields["general.architecture"].contents() == family
    pairs = {tensor.name: torch.tensor(np.array(tensor.data)) for tensor in found.tensors}
    weights = []
    for name in ("base", "merged"):
        export_model(tmp_path / name, tmp_path / f"{name}.gguf", "BF16")
        reader = gguf.GGUFReader(str(tmp_path / f"{name}.gguf"))
        weights.append(
            {
                t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type))
                for t in reader.tensors
            }
        )
    changed = 0
    for name, before in weights[0].items():
        a, b = pairs.pop(f"{name}.lora_a", None), pairs.pop(f"{name}.lora_b", None)
        want = before if a is None else before + alpha / a.shape[0] * b @ a
        changed += a is not None
        torch.testing.assert_close(
            weights[1][name], want, rtol=0.02, atol=0.02 * float(want.abs().max()), msg=name
        )
    assert not pairs
    assert changed == sum(
        p.endswith("lora_A.weight") for p in load_file(adapter / "adapter_model.safetensors")
    )


@pytest.mark.parametrize("settings", [{"use_rslora": True}, PATTERNS], ids=["rslora", "patterns"])
def test_vllm_computes_what_peft_does(tmp_path: Path, tokenizer, settings: dict) -> None:
    base = saved(tmp_path / "base", "llama", tokenizer, torch.float32)
    adapter = adapter_of(tmp_path / "adapter", base, **settings)
    command = export_vllm(adapter, tmp_path / "out", "mine")
    assert command.startswith(
        f"vllm serve {base} --enable-lora --max-lora-rank 8 --lora-modules mine={tmp_path / 'out'}"
    )
    read = json.loads((tmp_path / "out/adapter_config.json").read_text())
    # vLLM's PEFTHelper: one scale, from these three alone
    scale = read["lora_alpha"] / (math.sqrt(read["r"]) if read["use_rslora"] else read["r"])
    tensors = load_file(tmp_path / "out/adapter_model.safetensors")
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter)
    )
    layers = {
        name: layer for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")
    }
    for name, layer in layers.items():
        a, b = (tensors[f"{name}.lora_{part}.weight"] for part in "AB")
        assert a.shape[0] <= read["r"]
        torch.testing.assert_close(scale * b @ a, layer.get_delta_weight("default"))
    assert 2 * len(layers) == len(tensors)
    same = [
        (folder / "adapter_model.safetensors").read_bytes()
        for folder in (tmp_path / "out", adapter)
    ]
    assert (same[0] == same[1]) == (settings is not PATTERNS)


def test_adapters_that_a_reader_misreads_are_refused(tmp_path: Path, tokenizer, subtests) -> None:
    pytest.importorskip("gguf")
    for family, settings, said in (
        (
            "qwen3_moe",
            {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
            "adapts stacked experts",
        ),
        ("llama", {"use_dora": True}, "DoRA"),
        (
            "llama",
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            "beside its pairs",
        ),
    ):
        adapter = adapter_of(
            tmp_path / said, saved(tmp_path / family, family, tokenizer, torch.float32), **settings
        )
        for export, out in (
            (export_vllm, (tmp_path / "out", "x")),
            (export_adapter, (tmp_path / "x.gguf",)),
        ):
            with subtests.test(said), pytest.raises(UsageError, match=said) as refused:
                export(adapter, *out)
            assert refused.value.fix == "isotype merge writes a whole model, with everything in it"


PROGRAMS = {
    "copies": 'echo "[   1/   9] token_embd.weight"\ncp "$1" "$2"\n',
    "fails": 'echo "starting"\nprintf half > "$2"\necho "failed to quantize: no space" >&2\nexit 3\n',
    "writes nothing": "exit 0\n",
    "is interrupted": 'printf half > "$2"\necho "[   1/   9] x"\nsleep 0.5\nkill -INT $PPID\nexec sleep 60\n',
}


@pytest.fixture
def install_quantiser(tmp_path: Path, monkeypatch):
    """Makes a program named llama-quantize the only program of this name on the path."""

    def install(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "llama-quantize"
        program.write_text(f'#!/bin/sh\necho "$3" > {tmp_path}/type\n{script}')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return install


def test_llama_quantize_writes_k_types(tmp_path: Path, tokenizer, install_quantiser) -> None:
    """The program gets the F16 file, and only its result stays in the folder."""
    pytest.importorskip("gguf")
    folder = saved(tmp_path / "model", "llama", tokenizer)
    place = tmp_path / "place"
    place.mkdir()
    install_quantiser(PROGRAMS["copies"])
    facts, lines = export_language(folder, place / "k.gguf", to="gguf", kind="q4_k_m", name="x")
    assert (tmp_path / "type").read_text() == "Q4_K_M\n"
    assert facts["type"] == "Q4_K_M"
    assert lines == [f"exported  {facts['tensors']} tensors in Q4_K_M to {place / 'k.gguf'}"]
    assert [file.name for file in place.iterdir()] == ["k.gguf"]
    export_language(folder, tmp_path / "f16.gguf", to="gguf", kind="F16", name="x")
    assert (place / "k.gguf").read_bytes() == (tmp_path / "f16.gguf").read_bytes()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("fails", r"llama-quantize failed \(exit status 3\): failed to quantize: no space"),
        ("writes nothing", r"llama-quantize failed \(exit status 0\): it printed nothing"),
    ],
)
def test_a_failing_llama_quantize_leaves_no_file(
    script: str, message: str, tmp_path: Path, tokenizer, install_quantiser
) -> None:
    pytest.importorskip("gguf")
    folder = saved(tmp_path / "model", "llama", tokenizer)
    place = tmp_path / "place"
    place.mkdir()
    install_quantiser(PROGRAMS[script])
    with pytest.raises(RunError, match=message):
        export_language(folder, place / "k.gguf", to="gguf", kind="Q6_K", name="x")
    assert list(place.iterdir()) == []


def test_ctrl_c_stops_llama_quantize_and_leaves_the_earlier_file(
    tmp_path: Path, tokenizer, install_quantiser
) -> None:
    """The terminal sends SIGINT while the program has written a part of its file."""
    pytest.importorskip("gguf")
    folder = saved(tmp_path / "model", "llama", tokenizer)
    place = tmp_path / "place"
    place.mkdir()
    (place / "k.gguf").write_text("the file of an earlier export")
    install_quantiser(f"echo $$ > {tmp_path}/process\n{PROGRAMS['is interrupted']}")
    # a shell ignores the signal in processes that it starts in the background
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            export_language(folder, place / "k.gguf", to="gguf", kind="Q6_K", name="x")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [file.name for file in place.iterdir()] == ["k.gguf"]
    assert (place / "k.gguf").read_text() == "the file of an earlier export"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)


def test_a_missing_llama_quantize_is_refused_before_the_merge(
    tmp_path: Path, tokenizer, monkeypatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = saved(tmp_path / "model", "llama", tokenizer)
    with pytest.raises(UsageError, match="Q4_K_M: llama-quantize writes this type") as refused:
        export_language(folder, tmp_path / "k.gguf", to="gguf", kind="q4_k_m", name="x")
    assert "install llama.cpp" in str(refused.value.fix)


@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_a_base_that_is_not_here_is_named(kind: str | None, tmp_path: Path, tokenizer) -> None:
    """For the adapter alone and for the whole model."""
    pytest.importorskip("gguf")
    base = saved(tmp_path / "base", "llama", tokenizer)
    lora(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "adapter")
    settings = tmp_path / "adapter/adapter_config.json"
    content = json.loads(settings.read_text()) | {"base_model_name_or_path": "small-llama"}
    settings.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"^base small-llama: ") as refused:
        export_language(tmp_path / "adapter", tmp_path / "x.gguf", to="gguf", kind=kind, name="x")
    assert refused.value.fix


def test_what_is_not_written_here_has_llama_cpps_command(tmp_path: Path, tokenizer) -> None:
    pytest.importorskip("gguf")
    folder = saved(tmp_path / "model", "llama", tokenizer)
    out = tmp_path / "out.gguf"
    with pytest.raises(UsageError, match="F16, BF16, Q8_0") as refused:
        export_language(folder, out, to="gguf", kind="IQ2_XS", name="x")
    assert f"convert_hf_to_gguf.py {folder}" in str(refused.value.fix)
    assert str(refused.value.fix).endswith("llama-quantize whole.gguf IQ2_XS.gguf IQ2_XS")
    with pytest.raises(UsageError, match="olmoe: whole models are written of llama") as refused:
        export_language(
            saved(tmp_path / "olmoe", "olmoe", tokenizer), out, to="gguf", kind=None, name="x"
        )
    assert "convert_hf_to_gguf.py" in str(refused.value.fix)
    rope = saved(
        tmp_path / "rope",
        "qwen2",
        tokenizer,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    )
    with pytest.raises(UsageError, match="rope_type linear"):
        export_language(rope, out, to="gguf", kind="F16", name="x")
    with pytest.raises(UsageError, match="splits no text as this tokenizer does"):
        export_language(
            saved(tmp_path / "split", "llama", splitting(r"\s+")),
            out,
            to="gguf",
            kind="F16",
            name="x",
        )
    big = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    big.model.embed_tokens.weight.data[5, 5] = 1e5
    big.save_pretrained(folder)
    with pytest.raises(UsageError, match="beyond fp16"):
        export_language(folder, out, to="gguf", kind="F16", name="x")
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))
    assert export_language(folder, out, to="gguf", kind=None, name="x")[0]["type"] == "BF16"


def test_a_modelfiles_template_is_the_models(subtests) -> None:
    """`turns_of` compares its text with the chat template's; here with conversations of other
    lengths, and by hand.
    """
    from isotype.data.chat import chat_template

    own = splitting()
    own.add_tokens(
        [
            "<start_of_turn>",
            "<end_of_turn>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ]
    )
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} said\n{i}"} for i in range(7)
    ]
    for name in ("llama3", "gemma", "mistral", "chatml"):
        own.chat_template = chat_template(own, name).text
        with subtests.test(name):
            assert find_turns(own).text(messages) == chat_template(own, None).render(
                messages, generation_prompt=True, location=""
            )
    assert find_turns(own).to_go_template() == (
        '{{ $first := true }}{{ $last := "" }}{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n<|im_start|>user\n'
        "{{ else }}<|im_start|>user\n{{ end }}"
        '{{ range .Messages }}{{ if eq .Role "user" }}{{ if $first }}{{ $first = false }}{{ else }}<|im_end|>\n<|im_start|>user\n'
        '{{ end }}{{ .Content }}{{ $last = .Role }}{{ else if eq .Role "assistant" }}<|im_end|>\n<|im_start|>assistant\n'
        '{{ .Content }}{{ $last = .Role }}{{ end }}{{ end }}{{ if eq $last "user" }}<|im_end|>\n<|im_start|>assistant\n{{ end }}'
    )


def test_ollama_gets_weights_template_and_stop_tokens(tmp_path: Path, tokenizer) -> None:
    pytest.importorskip("gguf")
    adapter = adapter_of(
        tmp_path / "adapter", saved(tmp_path / "base", "qwen2", tokenizer, torch.bfloat16), r=2
    )
    written, lines = export_language(adapter, tmp_path / "out", to="ollama", kind=None, name="Mine")
    assert lines[1] == f"create    ollama create mine -f {tmp_path / 'out/Modelfile'}"
    content = (tmp_path / "out/Modelfile").read_text()
    assert (
        content
        == f'FROM ./model.gguf\nTEMPLATE """{find_turns(tokenizer).to_go_template()}"""\nPARAMETER stop "<|im_end|>"\n'
    )
    assert written["folder"] == str(tmp_path / "out")
    merge(load_run(adapter), tmp_path / "merged")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
    )
    torch.testing.assert_close(
        logits(read),
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)),
    )


def test_a_folder_for_ollamas_own_converter_has_what_it_reads(tmp_path: Path, tokenizer) -> None:
    """Its converter reads `rope_theta` beside `rope_parameters`, which transformers 5 does not
    write.
    """
    folder = saved(
        tmp_path / "model",
        "mixtral",
        tokenizer,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    export_language(folder, tmp_path / "out", to="ollama", kind=None, name="x")
    assert (tmp_path / "out/Modelfile").read_text().startswith("FROM .\nTEMPLATE ")
    assert json.loads((tmp_path / "out/config.json").read_text())["rope_theta"] == 1e6
    assert (
        json.loads((tmp_path / "out/tokenizer_config.json").read_text())["add_bos_token"] is False
    )
    same = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        for name in ("model", "out")
    ]
    torch.testing.assert_close(logits(same[0]), logits(same[1]), rtol=0, atol=0)


def test_a_served_conversation_begins_with_the_tokens_of_training(tmp_path: Path, subtests) -> None:
    """The tokenizer adds the first token or not, and so does the chat template: a server that puts
    it before the text where the flag is set gets what the template alone gives.
    """
    pytest.importorskip("gguf")
    from tokenizers import processors

    from isotype.data.chat import chat_template

    messages = [{"role": "user", "content": "Hi"}]
    for adds, writes, first in product(
        (True, False), (True, False), ("<|endoftext|>", "<|im_start|>")
    ):
        own = splitting()
        own.bos_token = first
        token = (first, own.bos_token_id)
        if adds:
            own._tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{first} $A", special_tokens=[token]
            )
        # <|im_start|> is SmolLM2's first token: its template begins with it as it is
        if writes and first == "<|endoftext|>":
            own.chat_template = "{{ bos_token }}" + own.chat_template
        if not writes and first == "<|im_start|>":
            own.chat_template = own.chat_template.replace("<|im_start|>", "<|im_end|>")
        wanted = chat_template(own, None).render(messages, generation_prompt=True, location="")
        with subtests.test(f"{first}: tokenizer {adds}, template {writes}"):
            assert wanted.startswith(first) is writes
            own.save_pretrained(tmp_path)
            values = dict(tokenizer_keys(tmp_path, 320, "command"))
            flag = values["add_add_bos_token"]
            assert flag is (adds and writes)
            served = find_turns(own).text(messages)
            assert (first if flag else "") + served == wanted
            # llama.cpp renders the template, takes the first token off where its flag is set, and
            # puts it back as it tokenises
            assert values["add_chat_template"] == own.chat_template


def test_a_model_as_smollm2_is_takes_every_way_of_gguf(tmp_path: Path) -> None:
    """Its tokenizer cuts numbers into digits by a step of its own, and was refused as a base, as a
    whole file and for Ollama.
    """
    gguf = pytest.importorskip("gguf")
    from tokenizers import pre_tokenizers

    own = splitting()
    own.bos_token = "<|im_start|>"
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    folder = saved(tmp_path / "model", "llama", own, torch.bfloat16, hidden_size=64)
    (tmp_path / "gguf").mkdir()
    file = tmp_path / "gguf/model.gguf"
    export_language(folder, file, to="gguf", kind="Q8_0", name="x")
    fields = gguf.GGUFReader(str(file)).fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    export_language(folder, tmp_path / "ollama", to="ollama", kind=None, name="x")
    assert (tmp_path / "ollama/Modelfile").is_file()
    read = load_gguf_tokenizer(file)
    texts = [*TEXTS, "12345 and 3.14, 2²"]
    assert [read(text)["input_ids"] for text in texts] == [own(text)["input_ids"] for text in texts]
    (tmp_path / "rows.jsonl").write_text('{"text": "one row of 12 words"}\n' * 8)
    said = ask("plan", "--model", file, "--data", tmp_path / "rows.jsonl")
    assert "the base came quantised: gguf, blocks Q8_0" in said

"""`--verify` and `isotype verify`: files that hold what was trained are the same, and each fault of a
file is named.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.api import (
    ReferenceModel,
    RunWeights,
    TensorEntry,
    Verification,
    WrittenModel,
    WrittenTensor,
    _changed_settings,
    _file_type,
    _find_units,
    _score_tokens,
    compute_expectations,
    export_model,
    find_damage,
    header_keys,
    kept_share,
    load_evaluation,
    load_run,
    read_header,
    read_tensor_values,
    tokenizer_keys,
    verify_gguf_model,
    verify_reference,
    verify_tensors,
)
from tests.api import gguf_file_FAMILIES as GGUF_FAMILIES
from tests.commands import ask, invoke
from tests.gguf_files import splitting
from tests.gguf_files import write as write_file
from tests.models import SIZES, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from isotype.errors import RunError, UsageError

gguf = pytest.importorskip("gguf")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
QUESTIONS = [
    (f"How much is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a in range(3) for b in range(12)
]


def train_family(folder: Path, family: str, **changes: Any) -> SimpleNamespace:
    """Trains a tiny bf16 model of the family until its loss has clearly fallen."""
    folder.mkdir()
    tokenizer = splitting()
    sizes = SIZES | {
        "vocab_size": 320,
        "bos_token_id": None,
        "hidden_size": 64,
        "intermediate_size": 64,
    }
    sizes |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    tiny(family, **{**sizes, **changes}).bfloat16().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in QUESTIONS
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"name": str(folder / "base")},
        "data": {"train": str(folder / "chats.jsonl"), "eval_split": 0.2, "max_length": 96},
        "adapter": {"kind": "lora", "r": 8},
        "precision": {"preset": "bf16-lora"},
        "train": {
            "steps": 16,
            "batch_size": 4,
            "learning_rate": 2e-2,
            "schedule": "constant",
            "eval_every": 16,
        },
        "run": {"folder": str(folder / "run"), "sample_every": 0, "samples": [], "report": False},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    ask("train", folder / "run.yaml")
    return SimpleNamespace(folder=folder, run=folder / "run", base=folder / "base")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> SimpleNamespace:
    """A run of Llama, its BF16 file and its merged folder."""
    trained = train_family(tmp_path_factory.mktemp("verify") / "llama", "llama")
    trained.file = trained.folder / "bf16.gguf"
    trained.report = ask(
        "export",
        trained.run,
        "--to",
        "gguf",
        "--type",
        "BF16",
        "--out",
        trained.file,
        "--verify",
        "--json",
    )
    trained.merged = trained.folder / "merged"
    ask("merge", trained.run, "--out", trained.merged)
    return trained


def verify(run: Path, file: Path, *options: Any) -> dict[str, Any]:
    """Returns the object of `--json`, and checks that the exit status agrees with it."""
    outcome = invoke("verify", run, "--file", file, "--json", *options)
    if isinstance(outcome.exception, UsageError):
        raise outcome.exception
    result = json.loads(outcome.stdout)
    assert outcome.exit_code == (0 if result["same"] else 1)
    return result


def assert_kept(trained: SimpleNamespace, tmp_path: Path, kind: str, tolerance: float) -> None:
    file = tmp_path / f"{kind}.gguf"
    ask("export", trained.run, "--to", "gguf", "--type", kind, "--out", file)
    result = verify(trained.run, file)
    assert result["differences"] == []
    assert result["kept"] == pytest.approx(1.0, abs=tolerance)
    assert result["loss"]["base"] - result["loss"]["trained"] > 0.2


def test_an_exported_file_keeps_what_was_learnt(llama, tmp_path) -> None:
    result = json.loads(llama.report)["verify"]
    assert result["same"]
    assert result["kept"] == pytest.approx(1.0, abs=0.005)
    assert result["loss"]["served"] == pytest.approx(result["loss"]["trained"], abs=1e-3)
    assert result["rows"] == {"count": 7, "tokens": result["rows"]["tokens"], "source": "held-out"}
    assert_kept(llama, tmp_path, "F16", 0.005)
    assert_kept(llama, tmp_path, "Q8_0", 0.01)
    stored = json.loads((llama.run / "verify.json").read_text())
    assert {"bf16.gguf", "F16.gguf", "Q8_0.gguf"} <= set(stored)
    causes = stored["Q8_0.gguf"]["causes"]
    assert "all tensors in the file" in causes, "a small change is not split into groups"
    assert "attention in the file" not in causes


def test_a_merged_folder_and_adapters_alone_keep_what_was_learnt(llama, tmp_path) -> None:
    ask("export", llama.run, "--to", "gguf", "--out", tmp_path / "lora.gguf")
    ask("export", llama.run, "--to", "vllm", "--out", tmp_path / "vllm")
    for file in (llama.merged, tmp_path / "lora.gguf", tmp_path / "vllm"):
        result = verify(llama.run, file)
        assert result["differences"] == []
        assert result["kept"] == pytest.approx(1.0, abs=0.005)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_files_of_each_family_keep_what_was_learnt(tmp_path, family: str) -> None:
    changes = {"head_dim": 16, "query_pre_attn_scalar": 16} if family.startswith("gemma") else {}
    trained = train_family(tmp_path / family, family, **changes)
    assert_kept(trained, tmp_path, "F16", 0.005)
    assert_kept(trained, tmp_path, "BF16", 0.005)
    assert_kept(trained, tmp_path, "Q8_0", 0.01)
    ask("export", trained.run, "--to", "gguf", "--out", tmp_path / "lora.gguf", "--verify")
    ask("merge", trained.run, "--out", tmp_path / "merged", "--verify")


def copy_file(llama: SimpleNamespace, tmp_path: Path) -> tuple[Path, Any]:
    """Returns a copy of the BF16 file, and a reader that writes into it."""
    file = tmp_path / "broken.gguf"
    shutil.copy(llama.file, file)
    return file, gguf.GGUFReader(str(file), "r+")


def set_field(reader: Any, key: str, value: Any) -> None:
    field = reader.fields[key]
    part = field.parts[field.data[0]]
    if isinstance(value, bytes):
        part[: len(value)] = np.frombuffer(value, np.uint8)
    else:
        part[0] = value
    reader.data.flush()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.chat_template", b"{% for m in messages %}"),
        ("tokenizer.ggml.add_bos_token", True),
        ("tokenizer.ggml.eos_token_id", 5),
        ("llama.rope.freq_base", 5e5),
        ("llama.attention.layer_norm_rms_epsilon", 1e-2),
    ],
)
def test_a_setting_of_a_file_that_differs_is_named(llama, tmp_path, key: str, value: Any) -> None:
    file, reader = copy_file(llama, tmp_path)
    set_field(reader, key, value)
    result = verify(llama.run, file)
    assert [difference["name"] for difference in result["differences"]] == [key]
    if key.startswith("llama."):
        assert abs(result["loss"]["served"] - result["loss"]["trained"]) > 1e-5
        assert "settings of the file" in result["causes"]


@pytest.mark.parametrize("change", ["zero", "transpose", "not finite"])
def test_a_changed_tensor_is_named(llama, tmp_path, change: str) -> None:
    file, reader = copy_file(llama, tmp_path)
    name = "blk.1.attn_q.weight"
    (data,) = (tensor.data for tensor in reader.tensors if tensor.name == name)
    words = data.view(np.uint16)
    if change == "zero":
        words[:] = 0
    elif change == "transpose":
        words[:] = words.T.copy()
    else:
        words[0, 0] = 0x7FC0
    reader.data.flush()
    result = verify(llama.run, file)
    assert [difference["name"] for difference in result["differences"]] == [name]
    if change == "not finite":
        assert result["loss"]["served"] is None
        assert "not finite" in result["differences"][0]["message"]


def test_a_file_of_the_base_is_named_as_not_merged(llama, tmp_path, monkeypatch) -> None:
    export_model(llama.base, tmp_path / "base.gguf", "BF16")
    result = verify(llama.run, tmp_path / "base.gguf")
    assert result["differences"][0]["name"] == "adapter"
    assert "not merged" in result["differences"][0]["message"]
    assert result["kept"] == pytest.approx(0.0, abs=0.01)

    def refuse(path, text):
        raise RunError(f"could not write {path}: Permission denied", code="CK001")

    # the run of another user: the result is shown, although it cannot be stored
    monkeypatch.setattr("isotype.inference.verify.result.write_text", refuse)
    outcome = invoke("verify", llama.run, "--file", tmp_path / "base.gguf")
    assert outcome.exit_code == 1
    assert "Permission denied; the result is only shown here" in outcome.stderr
    assert "keeps less than --keep 0.9" in outcome.stdout
    assert "higher learning rate" in outcome.stdout


def test_a_q4_0_file_is_reported_with_what_it_keeps(llama, tmp_path, monkeypatch) -> None:
    # this file keeps nearly everything; here also its small change is split into groups
    monkeypatch.setattr("isotype.inference.verify.measure._SMALL_SHARE", 0.0)
    file = tmp_path / "q4.gguf"
    ask("export", llama.run, "--to", "gguf", "--type", "Q4_0", "--out", file)
    result = verify(llama.run, file, "--keep", 0.0)
    assert result["format"] == "GGUF, Q4_0"
    assert result["differences"] == []
    assert 0.3 < result["kept"] < 1.2
    groups = {"embedding and head in the file", "attention in the file", "mlp in the file"}
    assert groups <= set(result["causes"])


MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}


def write_mixture(folder: Path, out: Path, kind: str, *, fused: bool = False) -> None:
    """Writes a merged mixture of experts as llama.cpp's converter does: gate and up projection are
    apart, or together in one tensor, and the router stays fp32.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    family = GGUF_FAMILIES[model.config.model_type]
    architecture = getattr(gguf.MODEL_ARCH, family.architecture)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(out), gguf.MODEL_ARCH_NAMES[architecture])
    keys = [*header_keys(model.config), *tokenizer_keys(folder, model.config.vocab_size, "")]
    for method, value in keys:
        getattr(writer, method)(value)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": 2}
    for name, tensor in model.state_dict().items():
        layer = "".join(name.split(".")[2:3])
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            parts = {"gate_exps": gate, "up_exps": up}
            if fused:
                parts = {"gate_up_exps": tensor}
            stored = {f"blk.{layer}.ffn_{key}.weight": value for key, value in parts.items()}
        elif name.endswith("experts.down_proj"):
            stored = {f"blk.{layer}.ffn_down_exps.weight": tensor}
        else:
            projection = "".join(name.split(".")[-2:-1])
            if family.permutes_rows and projection in heads:
                rows = tensor.view(heads[projection], 2, -1, tensor.shape[1])
                tensor = rows.transpose(1, 2).reshape(tensor.shape)
            stored = {names.get_name(name, try_suffixes=(".weight", ".bias")): tensor}
        for gguf_name, value in stored.items():
            is_narrow = value.ndim > 1 and "gate_inp" not in gguf_name
            wanted = gguf.GGMLQuantizationType[kind if is_narrow else "F32"]
            data = gguf.quants.quantize(value.contiguous().numpy(), wanted)
            writer.add_tensor(gguf_name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_a_file_of_stacked_experts_is_compared(tmp_path, family: str) -> None:
    changes = {**MIXTURE, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    changes["norm_topk_prob"] = family == "qwen3_moe"
    trained = train_family(tmp_path / family, family, **changes)
    ask("merge", trained.run, "--out", tmp_path / "merged")
    for kind, fused in (("F16", False), ("Q8_0", False), ("F16", True)):
        file = tmp_path / f"{kind}-{fused}.gguf"
        write_mixture(tmp_path / "merged", file, kind, fused=fused)
        result = verify(trained.run, file)
        assert result["differences"] == [], kind
        assert result["kept"] == pytest.approx(1.0, abs=0.01)
    assert_expert_faults_are_named(trained, tmp_path / "F16-False.gguf")


@pytest.mark.full
def test_another_normalisation_of_experts_is_named(tmp_path) -> None:
    trained = train_family(
        tmp_path / "mixture",
        "qwen3_moe",
        **MIXTURE,
        moe_intermediate_size=64,
        norm_topk_prob=False,
    )
    ask("merge", trained.run, "--out", tmp_path / "merged")
    write_mixture(tmp_path / "merged", tmp_path / "mixture.gguf", "F16")
    result = verify(trained.run, tmp_path / "mixture.gguf")
    assert [difference["name"] for difference in result["differences"]] == ["norm_topk_prob"]
    assert abs(result["causes"]["settings of the file"]) > 1e-5


def assert_expert_faults_are_named(trained: SimpleNamespace, file: Path) -> None:
    reader = gguf.GGUFReader(str(file), "r+")
    name = "blk.1.ffn_up_exps.weight"
    (data,) = (tensor.data for tensor in reader.tensors if tensor.name == name)
    data[1] = data[0]
    architecture = reader.fields["general.architecture"].contents()
    key = f"{architecture}.expert_used_count"
    set_field(reader, key, 1)
    result = verify(trained.run, file)
    found = [difference["name"] for difference in result["differences"]]
    assert found == [key, f"blk.1.ffn_gate_exps.weight and {name}"]
    assert "settings of the file" in result["causes"]


def test_nothing_learnt_gives_no_share() -> None:
    assert kept_share(2.0, 1.0, 1.5, 0.1) == pytest.approx(0.5)
    assert kept_share(2.0, 1.9, 1.95, 0.1) is None, "within the noise of the rows"
    assert kept_share(2.0, 2.1, 2.0, 0.0) is None, "the loss rose"
    assert kept_share(2.0, 1.9999, 2.0, 0.0) is None
    assert kept_share(2.0, 1.0, float("nan"), 0.1) is None


@pytest.mark.full
def test_a_run_that_learnt_nothing_has_no_share(llama, tmp_path) -> None:
    config = json.loads((llama.folder / "run.yaml").read_text())
    config["train"] |= {"steps": 1, "learning_rate": 1e-7}
    config["run"]["folder"] = str(tmp_path / "idle")
    (tmp_path / "idle.yaml").write_text(json.dumps(config))
    ask("train", tmp_path / "idle.yaml")
    ask("merge", tmp_path / "idle", "--out", tmp_path / "merged")
    result = verify(tmp_path / "idle", tmp_path / "merged")
    assert result["kept"] is None
    assert result["same"]
    assert "unknown: on these rows" in ask(
        "verify", tmp_path / "idle", "--file", tmp_path / "merged"
    )
    with pytest.raises(UsageError, match="another run"):
        verify(tmp_path / "idle", llama.file)


def test_the_head_of_the_reference_model_gets_learnt_positions_only(llama) -> None:
    run = load_run(llama.run)
    weights = RunWeights(run)
    reference = ReferenceModel(run, weights)
    reference.fill(weights.trained)
    rows, _ = load_evaluation(run, 8)
    batches = reference.batches(rows, None)
    head_shapes = []
    reference.model.get_output_embeddings().register_forward_hook(
        lambda _, arguments, logits: head_shapes.append(logits.shape)
    )
    scores = reference.score(batches)
    learnt_count = sum(row.supervised for row in rows)
    assert sum(shape[:-1].numel() for shape in head_shapes) == learnt_count
    losses = []
    for batch in batches:
        logits = reference.model(**batch.inputs).logits[:, :-1].double()
        losses.append(
            torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), batch.labels[:, 1:], reduction="sum"
            )
        )
    assert scores.loss == pytest.approx(float(sum(losses)) / learnt_count, rel=1e-6)


class LogitRows(TorchDispatchMode):
    """Records the largest number of rows in a result that has a column for each token."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        has_logits = isinstance(result, torch.Tensor) and not func.is_view
        if has_logits and result.shape[-1:] == (self.vocabulary_size,):
            self.rows = max(self.rows, result.shape[:-1].numel())
        return result


def test_the_logits_of_a_batch_are_computed_in_parts(llama, monkeypatch) -> None:
    """The logits of all learnt tokens of a batch need 1 GB for 1,024 tokens of 262,144."""
    run = load_run(llama.run)
    weights = RunWeights(run)
    reference = ReferenceModel(run, weights)
    reference.fill(weights.trained)
    rows, _ = load_evaluation(run, 8)
    batches = reference.batches(rows, None)
    whole = reference.score(batches)
    monkeypatch.setattr(verify_reference, "_TOKENS_PER_LOSS", 2)
    with LogitRows(reference.config.vocab_size) as logits:
        parts = reference.score(batches)
    assert logits.rows == 2
    assert torch.equal(parts.predictions, whole.predictions)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_the_weights_of_an_attention_module_of_pytorch_are_read_together() -> None:
    """Its forward uses the weight of `out_proj` without calling it, as in the vision tower of
    Gemma 3.
    """
    attention = torch.nn.MultiheadAttention(8, 2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), attention)
    units = [(unit, recurse) for unit, recurse in _find_units(model) if recurse]
    assert units == [(attention, True)]


def test_a_setting_may_be_in_the_outer_configuration_only() -> None:
    """Folders of Qwen 3-VL have `tie_word_embeddings` there."""
    text = SimpleNamespace(vocab_size=9)
    outer = SimpleNamespace(tie_word_embeddings=True, get_text_config=lambda: text)
    both = SimpleNamespace(vocab_size=9, tie_word_embeddings=True)
    both.get_text_config = lambda: both
    assert list(_changed_settings(both, outer)) == []
    outer.tie_word_embeddings = False
    assert list(_changed_settings(both, outer)) == [("tie_word_embeddings", False, True)]


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_a_tensor_of_a_gguf_file_is_read_in_parts(kind: str, tmp_path, monkeypatch) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((50, 64), dtype=np.float32)
    blocks = gguf.quants.quantize(values, quantisation)
    file = tmp_path / "blocks"
    file.write_bytes(bytes(32) + blocks.tobytes())
    entry = TensorEntry(kind, (5, 10, 64), 32, blocks.nbytes // 50)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, quantisation)).view(5, 10, 64)
    assert torch.equal(read_tensor_values(file, entry), expected)
    monkeypatch.setattr(verify_gguf_model, "_PART_BYTES", 3 * entry.row_bytes)
    read = np.fromfile
    sizes = []

    def read_and_record(file: Any, dtype: Any, count: int) -> np.ndarray:
        sizes.append(count)
        return read(file, dtype, count)

    monkeypatch.setattr(np, "fromfile", read_and_record)
    assert torch.equal(read_tensor_values(file, entry), expected)
    assert max(sizes) == 3 * entry.row_bytes


class LargestResult(TorchDispatchMode):
    """Records the number of values in the largest result of an operator, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.size = max(self.size, result.numel())
        return result


@pytest.mark.parametrize(
    ("description", "advice"),
    [("folder, int4", "--type fp8 or int8 rounds"), ("GGUF, Q4_0", "--type Q8_0 or BF16 rounds")],
)
def test_the_advice_names_types_of_the_same_format(description: str, advice: str) -> None:
    losses = {"base_loss": 3.0, "trained_loss": 1.0, "file_loss": 2.0, "noise": 0.01}
    rows = {"rows": 32, "tokens": 600, "row_source": "held-out"}
    result = Verification("x", description, **losses, kept=0.5, min_kept=0.9, agreement=0.6, **rows)
    assert advice in result.lines()[-1]


def test_losses_of_tokens_are_computed_in_parts() -> None:
    """The logits of a large vocabulary are not copied as a whole."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 50, generator=generator)
    labels = torch.randint(50, (200,), generator=generator)
    with LargestResult() as largest:
        losses, predictions = _score_tokens(logits, labels)
    assert torch.equal(losses, torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
    assert torch.equal(predictions, logits.argmax(-1))
    assert largest.size <= 64 * 50


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_K"])
def test_tensors_are_compared_in_parts(kind: str, monkeypatch) -> None:
    """A comparison in parts finds the same differences, and its intermediate results are small."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(96, 64, generator=generator)
    trained = base + 0.5 * torch.randn(96, 64, generator=generator)
    damaged = trained.clone()
    damaged[7] = 4 * damaged[7]
    weights = SimpleNamespace(changed_names={"w"}, base=lambda name: base)
    results = []
    for part_size in (1 << 20, 640):
        monkeypatch.setattr(verify_tensors, "_PART_SIZE", part_size)
        for value in (trained, damaged):
            comparison = verify_tensors.TensorComparison()
            tensors = {"w": WrittenTensor("w", kind, (96, 64), value.clone)}
            written = WrittenModel("file", tensors, merge_dtype="bf16")
            with LargestResult() as largest:
                verify_tensors._compare_values(comparison, weights, written, "w", value, trained)
            results.append(comparison)
    assert largest.size <= 96 * 64 // 8
    whole, whole_damaged, parts, parts_damaged = results
    assert whole.differences == parts.differences == []
    assert len(whole_damaged.differences) == 1
    assert whole_damaged.differences == parts_damaged.differences
    assert parts_damaged.change.kept == pytest.approx(whole_damaged.change.kept)
    assert parts_damaged.change.expected == pytest.approx(whole_damaged.change.expected)


@pytest.mark.full
def test_a_run_that_trained_every_weight_is_compared(llama, tmp_path) -> None:
    config = json.loads((llama.folder / "run.yaml").read_text())
    config["adapter"] = {"kind": "none"}
    config["precision"] = {"preset": "bf16-mixed"}
    config["train"] |= {"learning_rate": 1e-2}
    config["run"]["folder"] = str(tmp_path / "whole")
    (tmp_path / "whole.yaml").write_text(json.dumps(config))
    ask("train", tmp_path / "whole.yaml")
    file = tmp_path / "whole.gguf"
    ask("export", tmp_path / "whole", "--to", "gguf", "--type", "BF16", "--out", file)
    result = verify(tmp_path / "whole", file)
    assert result["differences"] == []
    assert result["kept"] == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("change", ["template", "end token", "rope", "tensor"])
def test_a_difference_of_a_merged_folder_is_named(llama, tmp_path, change: str) -> None:
    folder = tmp_path / "merged"
    shutil.copytree(llama.merged, folder)
    config_file = folder / "config.json"
    if change == "template":
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        expected = "tokenizer: chat_template"
    elif change == "end token":
        file = folder / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 7}))
        expected = "generation_config.json: eos_token_id"
    elif change == "rope":
        settings = json.loads(config_file.read_text())
        settings["rope_parameters"]["rope_theta"] = 5e5
        config_file.write_text(json.dumps(settings))
        expected = "config.json: rope_parameters"
    else:
        tensors = load_file(folder / "model.safetensors")
        expected = "model.layers.0.mlp.down_proj.weight"
        tensors[expected] = tensors[expected].T.contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = verify(llama.run, folder)
    assert [difference["name"] for difference in result["differences"]] == [expected]
    if change == "rope":
        assert "settings of the file" in result["causes"]


def test_the_result_is_a_section_of_the_report(llama) -> None:
    ask("report", llama.run)
    verify(llama.run, llama.file)
    page = (llama.run / "report.html").read_text()
    assert "Written files" in page
    assert "bf16.gguf" in page
    assert "the file is the trained model" in page


def test_the_comparison_loads_the_run_once(llama, tmp_path, monkeypatch) -> None:
    folders = []

    def count(folder: Path, **options: Any) -> Any:
        folders.append(folder)
        return load_run(folder, **options)

    monkeypatch.setattr("isotype.inference.loaded.load_run", count)
    ask("merge", llama.run, "--out", tmp_path / "merged", "--verify")
    assert len(folders) == 1


def test_the_reference_model_holds_the_weights_of_one_block(llama) -> None:
    run = load_run(llama.run)
    weights = RunWeights(run)
    reference = ReferenceModel(run, weights)
    layers = reference.model.model.layers
    held = []

    def record(*_: Any) -> None:
        held.append([sum(p.numel() for p in layer.parameters()) for layer in layers])

    for layer in layers:
        layer.mlp.register_forward_pre_hook(record)
    reference.fill(weights.trained)
    reference.model(torch.tensor([[1, 2, 3]]))
    size = max(map(max, held))
    assert size > 0
    assert held == [[size, 0], [0, size]]
    assert sum(p.numel() for p in reference.model.parameters()) == 0


def test_the_result_is_a_section_of_the_model_card(llama) -> None:
    verify(llama.run, llama.file)
    store_server_result(llama.run)
    verify(llama.run, llama.file)
    card = (llama.run / "adapter" / "README.md").read_text()
    assert card.count("## Verified files and servers") == 1
    assert "| `bf16.gguf` (GGUF, BF16) |" in card
    assert "| server, llama.cpp | 2.0000 | 1.0000 | unknown | unknown | other answers |" in card
    assert "10.0.0.1" not in card, "a card may be published"
    assert find_damage(llama.run / "adapter") is None


def store_server_result(run: Path) -> None:
    file = run / "verify.json"
    result = {
        "loss": {"base": 2.0, "trained": 1.0, "served": None},
        "kept": None,
        "format": "server, llama.cpp",
        "server": "http://10.0.0.1",
        "summary": "other answers",
    }
    results = json.loads(file.read_text()) | {"http://10.0.0.1": result}
    file.write_text(json.dumps(results))


def test_files_of_another_model_and_absent_rows_are_refused(llama, tmp_path) -> None:
    tiny("llama", vocab_size=320, hidden_size=32, bos_token_id=None).save_pretrained(
        tmp_path / "small"
    )
    splitting().save_pretrained(tmp_path / "small")
    with pytest.raises(UsageError, match="another model"):
        verify(llama.run, tmp_path / "small")
    torch.manual_seed(7)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "bos_token_id": None}
    tiny("llama", seed=5, **sizes).save_pretrained(tmp_path / "other")
    splitting().save_pretrained(tmp_path / "other")
    with pytest.raises(UsageError, match="another base model"):
        verify(llama.run, tmp_path / "other")
    export_model(tmp_path / "small", tmp_path / "small.gguf", "F16")
    with pytest.raises(UsageError, match="another model"):
        verify(llama.run, tmp_path / "small.gguf")
    rows = llama.folder / "chats.jsonl"
    rows.rename(tmp_path / "moved.jsonl")
    try:
        with pytest.raises(UsageError, match=r"chats\.jsonl"):
            verify(llama.run, llama.file)
    finally:
        (tmp_path / "moved.jsonl").rename(rows)


def test_a_file_cut_short_and_files_of_another_model_are_refused(llama, tmp_path) -> None:
    content = llama.file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match=r"cut\.gguf: no whole GGUF file"):
        verify(llama.run, tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(UsageError, match="does not begin with GGUF"):
        verify(llama.run, tmp_path / "text.gguf")
    with pytest.raises(UsageError, match="no such file"):
        verify(llama.run, tmp_path / "absent.gguf")


def test_options_without_verify_are_refused(llama) -> None:
    with pytest.raises(UsageError, match="--keep has no effect without --verify"):
        ask("merge", llama.run, "--keep", 0.5)


def file_tensors(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors}


def test_4_and_5_bit_types_keep_the_head_wider(llama, tmp_path) -> None:
    """As llama-quantize does, which gives the head Q6_K."""
    for kind in ("Q4_0", "q5_0"):
        file = tmp_path / f"{kind}.gguf"
        ask("export", llama.run, "--to", "gguf", "--type", kind, "--out", file)
        kinds = {name: t.tensor_type.name for name, t in file_tensors(file).items()}
        assert kinds["output.weight"] == "Q8_0"
        assert kinds["output_norm.weight"] == "F32"
        assert kinds["token_embd.weight"] == kinds["blk.0.ffn_up.weight"] == kind.upper()
        result = verify(llama.run, file, "--keep", 0.0)
        assert result["differences"] == []
        assert 0.5 < result["kept"] < 1.5


def test_the_error_of_a_bf16_run_is_measured_and_an_fp32_run_has_none(llama) -> None:
    """The comparison with a server allows this error."""
    run = load_run(llama.run, as_served=False)
    assert run.precision.generate == "bf16"
    assert 1e-4 < compute_expectations(run, 4).run_error < 0.05
    exact = replace(run, precision=run.precision.but(generate="fp32"))
    assert compute_expectations(exact, 4).run_error == 0.0


def test_a_file_is_named_by_its_file_type(llama, tmp_path) -> None:
    """A Q4_K_M file of a small model has more bytes in other types than in Q4_K."""
    file = tmp_path / "k.gguf"
    shutil.copy(llama.file, file)
    for number, name in ((15, "Q4_K_M"), (0, "F32"), (25, "IQ4_NL"), (999, "BF16")):
        set_field(gguf.GGUFReader(str(file), "r+"), "general.file_type", number)
        assert _file_type(read_header(file)) == name


def test_an_export_rounds_the_sum_of_base_and_adapter_once(llama, tmp_path) -> None:
    """A merge to bf16 on the way would round it twice, and lose a part of a light adapter."""
    file = tmp_path / "q8.gguf"
    ask("export", llama.run, "--to", "gguf", "--type", "Q8_0", "--out", file)
    exact = RunWeights(load_run(llama.run)).trained("model.layers.0.mlp.up_proj.weight")
    stored = file_tensors(file)["blk.0.ffn_up.weight"]
    want = gguf.quants.quantize(exact.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(stored.data, want)


@pytest.mark.full
def test_a_gguf_base_goes_back_into_its_own_types(llama, tmp_path) -> None:
    base = tmp_path / "base.gguf"
    export_model(llama.base, base, "Q4_0")
    config = json.loads((llama.folder / "run.yaml").read_text())
    config["model"]["name"] = str(base)
    config["adapter"]["targets"] = ["q_proj", "down_proj"]
    config["precision"] = {"preset": "auto"}
    config["run"]["folder"] = str(tmp_path / "run")
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    ask("train", tmp_path / "run.yaml")
    file = tmp_path / "own.gguf"
    ask("export", tmp_path / "run", "--to", "gguf", "--type", "base", "--out", file)
    assert verify(tmp_path / "run", file, "--keep", 0.0)["differences"] == []
    before = file_tensors(base)
    after = file_tensors(file)
    assert {name: t.tensor_type for name, t in before.items()} == {
        name: t.tensor_type for name, t in after.items()
    }
    for name, tensor in before.items():
        is_adapted = "attn_q." in name or "ffn_down." in name
        assert np.array_equal(tensor.data, after[name].data) != is_adapted, name
    with pytest.raises(UsageError, match="is no GGUF file"):
        ask("export", llama.run, "--to", "gguf", "--type", "base", "--out", tmp_path / "no.gguf")


@pytest.mark.full
def test_a_base_type_without_a_quantiser_is_refused(llama, tmp_path) -> None:
    base = tmp_path / "base.gguf"
    write_file(AutoModelForCausalLM.from_pretrained(llama.base), llama.base, base, "IQ4_NL")
    config = json.loads((llama.folder / "run.yaml").read_text())
    config["model"]["name"] = str(base)
    config["train"]["steps"] = 1
    config["precision"] = {"preset": "auto"}
    config["run"]["folder"] = str(tmp_path / "run")
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    ask("train", tmp_path / "run.yaml")
    with pytest.raises(UsageError, match="has no quantiser for IQ4_NL"):
        ask(
            "export",
            tmp_path / "run",
            "--to",
            "gguf",
            "--type",
            "base",
            "--out",
            tmp_path / "o.gguf",
        )

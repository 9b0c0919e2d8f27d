"""`--verify` and `isotype verify`: files that hold what was trained are the same, and each fault of a
file is named.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.api import export_model
from tests.commands import ask, invoke
from tests.gguf_files import splitting
from tests.models import SIZES, tiny

from isotype.errors import UsageError

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
        "train": {"steps": 16, "batch_size": 4, "learning_rate": 2e-2, "schedule": "constant"},
        "run": {"folder": str(folder / "run"), "samples": [], "report": False},
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


def test_a_file_of_the_base_is_named_as_not_merged(llama, tmp_path) -> None:
    export_model(llama.base, tmp_path / "base.gguf", "BF16")
    result = verify(llama.run, tmp_path / "base.gguf")
    assert result["differences"][0]["name"] == "adapter"
    assert "not merged" in result["differences"][0]["message"]
    assert result["kept"] == pytest.approx(0.0, abs=0.01)


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

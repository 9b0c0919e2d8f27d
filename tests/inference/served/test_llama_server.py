"""`isotype verify --served` with llama.cpp's own server: what was trained is the same, and each
breakage is named. The tests need the program `llama-server`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.api import export_model
from tests.commands import ask, invoke
from tests.inference.served.llama_server import TEMPLATE, find_server, serve, train_answers
from tests.inference.test_verify import (
    FAMILIES,
    MIXTURE,
    set_field,
    write_mixture,
)

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(find_server() is None, reason="llama-server is not installed")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> SimpleNamespace:
    """A run of Llama, and its F16 file."""
    trained = train_answers(tmp_path_factory.mktemp("served") / "llama")
    trained.file = trained.folder / "f16.gguf"
    ask("export", trained.run, "--to", "gguf", "--type", "F16", "--out", trained.file)
    return trained


def verify(run: Path, *options: Any) -> dict[str, Any]:
    """Starts llama-server with the options, and returns the object of `--json`."""
    with serve(*options) as url:
        outcome = invoke("verify", run, "--served", url, "--json")
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    result = json.loads(outcome.stdout)
    assert outcome.exit_code == (0 if result["same"] else 1)
    return result


def names(result: dict[str, Any]) -> list[str]:
    return [difference["name"] for difference in result["differences"]]


def test_a_served_file_is_the_trained_model_and_the_base_is_not(llama, tmp_path) -> None:
    result = verify(llama.run, "-m", llama.file)
    assert result["same"], result
    assert result["kept"] == pytest.approx(1.0, abs=0.005)
    assert set(result["checks"].values()) == {"same"}
    stored = json.loads((llama.run / "verify.json").read_text())
    assert stored[result["server"]]["format"] == "server, llama.cpp"
    export_model(llama.base, tmp_path / "base.gguf", "F16")
    result = verify(llama.run, "-m", tmp_path / "base.gguf")
    assert "as the base does" in result["cause"]
    assert result["kept"] == pytest.approx(0.0, abs=0.01)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_the_same_in_each_type(tmp_path, family: str) -> None:
    changes = {"head_dim": 16, "query_pre_attn_scalar": 16} if family.startswith("gemma") else {}
    trained = train_answers(tmp_path / family, family, **changes)
    for kind in ("F16", "BF16", "Q8_0"):
        file = tmp_path / f"{kind}.gguf"
        ask("export", trained.run, "--to", "gguf", "--type", kind, "--out", file)
        result = verify(trained.run, "-m", file)
        assert result["same"], (kind, result)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0"])
def test_4_and_5_bit_files_are_served_with_their_own_rounding(llama, tmp_path, kind: str) -> None:
    """The server answers as the file's own weights do in fp32, which `verify --file` measures."""
    file = tmp_path / f"{kind}.gguf"
    ask("export", llama.run, "--to", "gguf", "--type", kind, "--out", file)
    measured = invoke("verify", llama.run, "--file", file, "--json", "--keep", 0)
    in_file = json.loads(measured.stdout)["loss"]["served"]
    served = verify(llama.run, "-m", file, "--cache-type-k", "f32", "--cache-type-v", "f32")
    checks = served["checks"]
    assert {checks[name] for name in ("prompt", "tokens", "first")} == {"same"}
    # llama.cpp also rounds activations to 8 bits
    assert served["loss"]["served"] == pytest.approx(in_file, abs=0.05)


@pytest.mark.full
def test_a_mixture_of_experts_is_the_same(tmp_path) -> None:
    # llama.cpp divides by the sum of the chosen experts' weights, whatever config.json says
    changes = {**MIXTURE, "moe_intermediate_size": 64, "norm_topk_prob": True}
    trained = train_answers(tmp_path / "mixture", "qwen3_moe", **changes)
    ask("merge", trained.run, "--out", tmp_path / "merged")
    write_mixture(tmp_path / "merged", tmp_path / "mixture.gguf", "F16")
    result = verify(trained.run, "-m", tmp_path / "mixture.gguf")
    assert result["same"], result


def broken_file(llama: SimpleNamespace, tmp_path: Path, key: str, value: Any) -> Path:
    file = tmp_path / "broken.gguf"
    shutil.copy(llama.file, file)
    set_field(gguf.GGUFReader(str(file), "r+"), key, value)
    return file


@pytest.mark.full
def test_another_template_is_named(llama, tmp_path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    result = verify(llama.run, "-m", llama.file, "--jinja", "--chat-template-file", template)
    assert names(result) == ["prompt", "system", "tools", "thinking"]
    assert "--chat-template-file" in result["differences"][0]["fix"]


@pytest.mark.full
def test_a_doubled_first_token_is_named(llama, tmp_path) -> None:
    template = tmp_path / "double.jinja"
    template.write_text("{{ bos_token }}" + TEMPLATE)
    result = verify(llama.run, "-m", llama.file, "--jinja", "--chat-template-file", template)
    assert names(result) == ["first"]
    assert "comes twice" in result["differences"][0]["message"]


@pytest.mark.full
def test_a_wrong_end_token_is_named(llama, tmp_path) -> None:
    file = broken_file(llama, tmp_path, "tokenizer.ggml.eos_token_id", 286)
    result = verify(llama.run, "-m", file)
    assert names(result) == ["stop"]
    assert "an answer ends after" in result["differences"][0]["message"]
    result = verify(llama.run, "-m", llama.file, "--ignore-eos")
    assert names(result) == ["stop"]
    assert "goes on" in result["differences"][0]["message"]


@pytest.mark.full
def test_another_rotary_base_is_named(llama) -> None:
    result = verify(llama.run, "-m", llama.file, "--rope-freq-base", 300)
    assert "logprobs" in names(result)
    assert "rotary base" in result["cause"]


@pytest.mark.full
def test_an_adapter_that_is_not_applied_is_named(llama, tmp_path) -> None:
    export_model(llama.base, tmp_path / "base.gguf", "F16")
    ask("export", llama.run, "--to", "gguf", "--out", tmp_path / "lora.gguf")
    base = (
        "-m",
        tmp_path / "base.gguf",
        "--chat-template-file",
        llama.run / "adapter/chat_template.jinja",
    )
    applied = verify(llama.run, *base, "--lora", tmp_path / "lora.gguf")
    assert applied["same"], applied
    absent = verify(llama.run, *base)
    assert {"answers", "logprobs", "kept"} <= set(names(absent))
    assert "as the base does" in absent["cause"]
    scaled = verify(llama.run, *base, "--lora-scaled", f"{tmp_path / 'lora.gguf'}:0.5")
    assert "scale 0.5" in scaled["cause"]


@pytest.mark.full
def test_a_q4_0_file_is_named(llama, tmp_path) -> None:
    q4 = tmp_path / "q4.gguf"
    ask("export", llama.run, "--to", "gguf", "--type", "Q4_0", "--out", q4)
    set_field(gguf.GGUFReader(str(tmp_path / "q4.gguf"), "r+"), "general.file_type", 2)
    result = verify(llama.run, "-m", tmp_path / "q4.gguf")
    assert "logprobs" in names(result)
    assert "weights (Q4_0) are rounded" in result["cause"]

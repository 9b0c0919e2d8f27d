"""`isotype init`, `doctor env`, `report`, `plan`, and Ctrl-C, as a user types them."""

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from isotype.__main__ import collect_less_while_importing
from isotype.config.load import load
from isotype.errors import UsageError
from tests.commands import ask, invoke


def test_garbage_collections_are_rare_only_while_modules_are_imported(monkeypatch):
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    collect_less_while_importing()
    assert gc.get_threshold()[0] == 10_000
    for number in range(12):
        monkeypatch.setitem(sys.modules, f"imported_{number}", gc)
        gc.collect(0)
    assert gc.get_threshold()[0] == 10_000
    for _ in range(12):
        gc.collect(0)
    assert (gc.get_threshold(), gc.callbacks) == (thresholds, callbacks)


def test_the_schema_forbids_unknown_keys_and_describes_every_key():
    schema = json.loads(ask("init", "--schema"))
    assert schema["$schema"].startswith("https://json-schema.org/")
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert all(key.get("description") for key in section["properties"].values())


def test_init_does_not_overwrite_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    assert str(file) in ask(
        "init", str(file), "--preset", "qlora", "--model", "m", "--data", "d.jsonl"
    )
    before = file.read_text()
    assert load(file).config.precision.preset == "nf4-lora"
    with pytest.raises(UsageError, match="exists already"):
        ask("init", str(file))
    assert file.read_text() == before
    ask("init", str(file), "--force", "--preset", "full")
    assert load(file).config.adapter.kind == "none"


def test_init_prints_the_file_that_it_writes_as_json(tmp_path):
    answer = json.loads(ask("init", str(tmp_path / "a.yaml"), "--json"))
    assert (tmp_path / "a.yaml").read_text() == answer["text"]
    assert ask("init", "-") == answer["text"]


def test_a_mistake_in_options_and_arguments_is_answered_with_what_works(tmp_path):
    (tmp_path / "empty.py").touch()
    small = ("model.init=random", "model.config={model_type: llama}", "data.train=stdlib")
    for arguments, fix in (
        (("eval", "r", "--data", "f"), "isotype eval RUN FILE"),
        (("merge", "base", "adapter"), "isotype merge RUN_OR_ADAPTER --out FOLDER; the run or"),
        (("chat", "r", "hello"), "isotype sample RUN"),
        (("export", "r"), "--to comfyui|compressed-tensors|gguf"),
        (("train", "--gpus", 2, "model.device=cpu", *small), "--processes 2"),
        (("doctor", "conform", tmp_path / "empty.py"), "define it: the file has no function"),
    ):
        assert fix in str(invoke(*arguments).exception), arguments


def test_a_model_whose_folder_lacks_config_json_is_refused_in_a_line(workshop, tmp_path):
    shutil.copytree(workshop.base, tmp_path / "base")
    (tmp_path / "base" / "config.json").unlink()
    for command in (("plan",), ("train", "--out", tmp_path / "run")):
        with pytest.raises(UsageError, match=r"no config\.json there") as refused:
            ask(*command, "--model", tmp_path / "base", "--data", workshop.chats)
        assert len(str(refused.value).splitlines()) <= 2


def test_env_as_json_is_the_env_json_of_a_run():
    result = invoke("doctor", "env", "--json")
    answer = json.loads(result.output)
    assert answer["environment"]["packages"]["torch"]
    assert answer["environment"]["devices"][0]["kind"] == "cpu"
    assert result.exit_code == int(any(f["severity"] == "error" for f in answer["findings"]))


def test_report_writes_the_page_and_prints_its_path(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    out = tmp_path / "page.html"
    assert json.loads(ask("report", tmp_path, "--out", out, "--json")) == {"report": str(out)}
    assert "<svg" in out.read_text()
    assert str(tmp_path / "report.html") in ask("report", tmp_path)
    with pytest.raises(UsageError, match="not a run folder"):
        ask("report", tmp_path / "empty")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "resolved.yaml").touch()
    with pytest.raises(UsageError, match=r"holds runs, but is none: .*/a"):
        ask("report", tmp_path / "runs")


SETTINGS = [
    "model.init=random", "model.config={model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3, "
    "num_attention_heads: 4, num_key_value_heads: 2}", "data.train=stdlib", "data.limit=40", "data.max_length=128", "train.steps=5",
    "adapter.r=4", "precision.preset=bf16-lora", "--device", "h200", "--json",
]  # fmt: skip


@pytest.mark.full
def test_a_target_of_memory_makes_auto_recompute(shared, tmp_path, monkeypatch):
    folder = shared / "data" / "stories260k"
    if not folder.is_dir():
        pytest.skip("no stories260k beside the checkout")
    monkeypatch.chdir(tmp_path)
    free = json.loads(ask("plan", *SETTINGS, f"model.tokenizer={folder}"))
    assert free["checkpointing"]["train.gradient_checkpointing"] == "none"
    target = 0.9 * free["memory"]["peak"] / 2**20
    less = json.loads(
        ask("plan", *SETTINGS, f"model.tokenizer={folder}", f"train.memory={target:.2f}MiB")
    )
    assert less["checkpointing"]["train.gradient_checkpointing"] != "none"
    assert less["memory"]["peak"] < free["memory"]["peak"]
    assert "train.memory" in less["checkpointing"]["reason"]


# --- Ctrl-C ends a command with status 130 and without a traceback, while it is imported too.


# sends SIGINT to its own process in place of the first import of a module, where a slow disk would
# have a user do it
INTERRUPTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize("module", ["isotype.cli.app", "torch"])
def test_an_interrupted_command_has_status_130_and_no_traceback(tmp_path, monkeypatch, module):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2] / 'src'}")
    monkeypatch.setenv("INTERRUPTED_AT", module)
    command = [sys.executable, "-m", "isotype", "doctor", "trace", "program.py"]
    (tmp_path / "program.py").write_text("import torch\n")
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert "Traceback" not in ended.stderr


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n"


def refusal_of_model(folder: Path, chats: Path) -> str:
    done = invoke("plan", "--model", folder, "--data", chats)
    assert isinstance(done.exception, UsageError), done.output
    return str(done.exception)


def test_an_adapter_as_the_model_names_its_base_and_how_to_train_it_further(workshop, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    text = refusal_of_model(folder, workshop.chats)
    assert f"command line model.name: {folder}: is a PEFT adapter, expected a model" in text
    assert f"write model.name: org/base and adapter.start_from: {folder}" in text
    assert f"isotype merge {folder}" in text


def test_a_configuration_of_another_tool_is_refused_with_the_command_that_translates_it(tmp_path):
    file = tmp_path / "axolotl.yml"
    file.write_text("base_model: org/base\nadapter: qlora\nmicro_batch_size: 2\nbf16: auto\n")
    mistyped = tmp_path / "run.yaml"
    mistyped.write_text("model: {name: m}\ntrain: {batchsize: 2}\n")
    for command in ("plan", "train"):
        assert f"fix       isotype import {file} --out NEW.yaml" in str(
            invoke(command, str(file)).exception
        )
        assert "isotype import" not in str(invoke(command, str(mistyped)).exception)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_model_that_git_lfs_did_not_fetch_is_refused_with_the_command(workshop, tmp_path, name):
    folder = shutil.copytree(workshop.base, tmp_path / "base")
    (folder / name).write_text(LFS_POINTER)
    text = refusal_of_model(folder, workshop.chats)
    assert f"{name} is a Git LFS pointer, without the content; git -C {folder} lfs pull" in text


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv", ".txt", ".jsonl.gz"])
def test_data_that_git_lfs_did_not_fetch_is_refused_with_the_command(workshop, tmp_path, suffix):
    file = tmp_path / f"rows{suffix}"
    file.write_text(LFS_POINTER)
    done = invoke("plan", "--model", workshop.base, "--data", file)
    assert isinstance(done.exception, UsageError), done.output
    assert f"{file}: is a Git LFS pointer, without the rows" in str(done.exception)
    assert done.exception.fix == f"git -C {tmp_path} lfs pull"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.objective=classification", "classes of a text are not offered"),
        ("train.objective=sequence-classification", "classes of a text are not offered"),
        ("model.num_labels=3", "classes of a text are not offered"),
        ("train.objective=embedding", "embedding models are not offered"),
    ],
)
def test_classes_and_embeddings_are_refused_by_name(workshop, setting, message):
    done = invoke("plan", "--model", workshop.base, "--data", workshop.chats, setting)
    assert message in str(done.exception)

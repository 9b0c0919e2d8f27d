"""The first hour of three people who arrive with files of their own: commands as they type them, in
their folder, and the words that they see.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.commands import ask, invoke
from tests.results import metrics

SHORT = (
    "train.steps=2",
    "train.batch_size=2",
    "train.accumulate=1",
    "precision.preset=fp32",
    "model.device=cpu",
    "run.report=false",
    "run.sample_tokens=2",
)
QUESTIONS = [
    (f"How much is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a in range(4) for b in range(6)
]


def refusal(*command: Any) -> str:
    """The message and the fix of a command that is refused, in one line."""
    done = invoke(*command)
    assert done.exception is not None, done.output
    assert done.exception.exit_status == 2  # type: ignore[attr-defined]
    return " ".join(str(done.exception).split())


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder) if "loss" in row]


@pytest.mark.full
def test_somebody_with_an_excel_sheet(
    workshop: SimpleNamespace, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ("train", "--model", workshop.base, *SHORT, "run.folder=run", "--data")
    Path("answers.xlsx").write_bytes(b"PK\x03\x04")
    assert "save the sheet as CSV in UTF-8" in refusal(*train, "answers.xlsx")

    lines = ["sep=;", "Instruction;Input;Output "]
    lines += [f'"{question}";;"{answer} So; it is."' for question, answer in QUESTIONS]
    Path("answers.csv").write_bytes("\r\n".join([*lines, ";;", ""]).encode("utf-8-sig"))
    text = " ".join(ask("plan", *train[1:], "answers.csv").split())
    assert "answers.csv (training): 24 rows, alpaca" in text
    assert (
        "has the keys Instruction (read as instruction) and Output (read as output), beside"
        " Input (read as input)"
    ) in text
    ask(*train, "answers.csv")
    assert len(losses(Path("run"))) == 2
    assert "So; it is." in Path("run/examples.json").read_text()


@pytest.mark.full
def test_somebody_with_pairs_of_the_public_form(
    workshop: SimpleNamespace, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"system": "Be brief.", "question": question, "chosen": answer, "rejected": "No idea."}
        for question, answer in QUESTIONS
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = ("train", "--model", workshop.base, "--data", "pairs.jsonl", *SHORT, "run.folder=run")
    first = refusal(*train)
    assert "pairs.jsonl:1: the row has chosen and rejected: preference pairs" in first
    assert "train.objective=dpo learns from pairs" in first
    assert "data.columns: {prompt: question, completion: chosen}" in first

    second = refusal(*train, "train.objective=dpo")
    assert "pairs.jsonl:1: no key 'prompt'" in second
    assert second.endswith("data.columns: {prompt: question}")

    columns = "data.columns={prompt: question}"
    text = " ".join(ask("plan", *train[1:], "train.objective=dpo", columns).split())
    assert "pairs.jsonl (training): 24 rows, preference" in text
    assert "the keys chosen and rejected, beside question (read as prompt)" in text
    assert "is not read" not in text
    ask(*train, "train.objective=dpo", columns)
    assert abs(losses(Path("run"))[0] - 0.6931) < 1e-3  # the reference is the model itself
    shown = Path("run/examples.json").read_text()
    assert "Be brief." in shown


FACTORY = """\
### model
model_name_or_path: MODEL
trust_remote_code: true

### method
stage: kto
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: all
pref_beta: 0.1

### dataset
dataset: log,letters
cutoff_len: 64
max_samples: 20

### output
output_dir: saves/kto
logging_steps: 1
plot_loss: true
report_to: none

### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
learning_rate: 5.0e-4
num_train_epochs: 1.0
"""


def test_somebody_with_a_folder_of_llamafactory(
    workshop: SimpleNamespace, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    log = [
        {
            "turns": [{"role": "user", "content": q}, {"role": "assistant", "content": a}],
            "liked": i % 2 == 0,
        }
        for i, (q, a) in enumerate(QUESTIONS)
    ]
    Path("data/log.json").write_text(json.dumps(log))
    letters = [
        {"instruction": "Say", "input": q, "output": a, "kto_tag": i % 3 == 0}
        for i, (q, a) in enumerate(QUESTIONS)
    ]
    Path("data/letters.json").write_text(json.dumps(letters))
    registry = {
        "log": {
            "file_name": "log.json",
            "formatting": "sharegpt",
            "columns": {"messages": "turns", "kto_tag": "liked"},
            "tags": {
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
            },
        },
        "letters": {
            "file_name": "letters.json",
            "columns": {
                "prompt": "instruction",
                "query": "input",
                "response": "output",
                "kto_tag": "kto_tag",
            },
        },
    }
    Path("data/dataset_info.json").write_text(json.dumps(registry))
    Path("kto.yaml").write_text(FACTORY.replace("MODEL", str(workshop.base)))

    done = invoke("import", "kto.yaml", "--out", "run.yaml")
    account = {line.split()[1]: line for line in done.output.splitlines() if line[:2].strip()}
    assert account["stage"].split()[:3] == ["6", "stage", "changed"]
    assert "train.objective: kto" in account["stage"]
    assert "named in dataset_info.json" in account["dataset"]
    assert "limit of each source" in account["max_samples"]
    text = " ".join(Path("run.yaml").read_text().split())
    assert "columns: {messages: turns, label: liked}" in text
    assert "columns: {label: kto_tag}" in text

    plan = " ".join(ask("plan", "run.yaml", "precision.preset=fp32").split())
    assert "data/log.json (training): 20 rows, labelled" in plan
    assert "the keys turns (read as messages) and liked (read as label)" in plan
    assert "data/letters.json (training): 20 rows, labelled" in plan
    assert "17 answers are labelled as wanted (42%), 23 as unwanted" in plan
    assert "is not read" not in plan
    ask("train", "run.yaml", *SHORT)
    assert abs(losses(Path("saves/kto"))[0] - 0.5) < 1e-3  # the reference is the model itself
    assert Path("saves/kto/adapter/adapter_model.safetensors").is_file()

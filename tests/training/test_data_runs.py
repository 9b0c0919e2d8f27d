"""Runs on packed, weighted and streamed rows: they train, say what they did, and resume bit for
bit.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.results import read, same_tensors
from tests.training.interrupted import cut_back

from isotype.config.load import load
from isotype.tasks.choose import plan_run, train

KINDS: dict[str, dict[str, Any]] = {
    "packed and weighted": {"packing": True, "max_length": 96, "weighted": True},
    "streamed and packed": {
        "stream": True,
        "shuffle_buffer": 10,
        "packing": True,
        "max_length": 96,
    },
}


def settings(workshop: Any, tmp_path: Path, kind: str) -> dict[str, Any]:
    data = dict(KINDS[kind])
    if data.pop("weighted", False):
        other = tmp_path / "other.csv"
        other.write_text(
            "question,answer\n" + "".join(f"What is {i}?,A number {i}.\n" for i in range(30))
        )
        columns = {"prompt": "question", "completion": "answer"}
        data["train"] = [
            {"name": str(workshop.chats), "weight": 2},
            {"name": str(other), "weight": 1, "columns": columns},
        ]
    return data


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.full) if "weighted" in kind else kind for kind in KINDS],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    configured: Any, workshop: Any, tmp_path: Path, kind: str, capsys: Any
) -> None:
    data = settings(workshop, tmp_path, kind)
    short = {"steps": 7, "eval_every": 3}
    assert train(configured("halved", data=data, train=short)) == 0
    shutil.copytree(tmp_path / "halved", tmp_path / "whole")
    cut_back(tmp_path / "halved", 7)
    again = load(tmp_path / "halved/resolved.yaml", resolved=True)
    assert train(again, resume=tmp_path / "halved") == 0
    assert "not those of the run's last start" not in capsys.readouterr().out
    same_tensors(tmp_path / "whole", tmp_path / "halved")
    facts = read(tmp_path / "whole", "data")
    assert bool(facts["packing"]) == ("packed" in kind)
    assert ("stream" in facts) == ("streamed" in kind)
    record = read(tmp_path / "whole", "preflight")
    assert not record["findings"]
    assert "PF018" in record["checks"]


def test_a_resumed_run_is_told_that_its_data_or_its_template_has_changed(
    configured: Any, workshop: Any, tmp_path: Path, capsys: Any
) -> None:
    mine, held, template = tmp_path / "mine.jsonl", tmp_path / "held.jsonl", tmp_path / "chat.jinja"
    lines = Path(workshop.chats).read_text().splitlines(keepends=True)
    mine.write_text("".join(lines[4:]))
    held.write_text("".join(lines[:4]))
    template.write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    data = {"train": str(mine), "eval": str(held), "chat_template": str(template)}
    assert train(configured(data=data, train={"steps": 2})) == 0
    for step, (file, words) in enumerate(
        (
            (mine, "mine.jsonl"),
            (template, "the files are the same: the tokenizer, its chat template"),
        ),
        3,
    ):
        file.write_text(
            file.read_text().replace("How", "So how")
            if file == mine
            else template.read_text().replace(": ", " says ")
        )
        capsys.readouterr()
        assert train(configured(data=data, train={"steps": step}), resume=tmp_path / "run") == 0
        said = next(
            line
            for line in capsys.readouterr().out.splitlines()
            if "not those of the run's last start" in line
        )
        assert words in said
        changes = json.loads((tmp_path / "run/resumes.json").read_text())["changes"]
        assert {
            "after_step": step - 1,
            "of": "rows",
            "what": said.removeprefix("changed").strip(),
        } in changes
        assert "resumes.json" in json.loads((tmp_path / "run/data.json").read_text())["notes"][-1]
    assert {
        "after_step": 3,
        "of": "settings",
        "what": "train.steps: 3 -> 4 (the schedule is stretched from this step on)",
    } in changes
    of_evaluation = [change for change in changes if change["of"] == "evaluation rows"]
    # by the template, not by the training file
    assert [change["after_step"] for change in of_evaluation] == [3]


def test_the_plan_covers_packed_rows(configured: Any, tmp_path: Path) -> None:
    made = plan_run(configured(data={"packing": True, "max_length": 128}, train={"steps": None}))
    assert made.data["packed_from"] > made.data["train_rows"]
    assert made.schedule["steps"] == -(-made.data["train_rows"] // 4)
    assert 96 < made.memory.length == made.data["longest"] + -made.data["longest"] % 8 <= 128
    assert made.memory.not_simulated is None
    assert f"training rows packed from {made.data['packed_from']}" in made.to_text()


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_lists_the_rows_that_it_left_out(
    configured: Any, workshop: Any, tmp_path: Path, stream: bool
) -> None:
    file = tmp_path / "messy.jsonl"
    sound = workshop.chats.read_text().splitlines()
    empty = json.dumps(
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}
    )
    file.write_text(
        "\n".join([*sound[:20], "{broken", *sound[20:], empty, '{"messages": 3}']) + "\n"
    )
    data = {"train": str(file), "on_bad_row": "skip", "eval_split": 0.0} | (
        {"stream": True, "shuffle_buffer": 10} if stream else {}
    )
    # a stream finds a row when a step reads it
    assert train(configured(data=data, train={"steps": 14 if stream else 2})) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/bad_rows.jsonl").read_text().splitlines()]
    assert [row["place"].removeprefix(f"{file}:") for row in rows] == ["21", "50", "51"]
    assert [row["reason"] for row in rows][1] == "the answer is empty"
    facts = json.loads((tmp_path / "run/data.json").read_text())
    assert not stream or facts["stream"]["left_out"] == 3

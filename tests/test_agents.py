"""Each command of AGENTS.md runs as it stands, in their order in one folder, and its tables and its
example of a refusal are what happens.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from isotype.cli.app import main
from isotype.errors import PreflightError, UsageError

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
# a log with an error of mixed dtypes; the doctor ends with 1 where it found something
LOG = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16\n"
FOUND_SOMETHING = {"isotype doctor train.log --json"}
# small enough for a test
SHORT = ["train.steps=2", "run.report=false", "run.sample_tokens=2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, workshop) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "MODEL").symlink_to(workshop.base)
    (folder / "DATA.jsonl").write_bytes(workshop.chats.read_bytes())
    (folder / "train.log").write_text(LOG)
    return folder


def invoke(command: list[str], monkeypatch, capsys) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command line."""
    monkeypatch.setattr("sys.argv", command)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_it_is_one_screen_and_linked():
    assert len(PAGE.splitlines()) <= 75
    assert "](AGENTS.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](../AGENTS.md)" in (ROOT / "docs/index.md").read_text(encoding="utf-8")


def test_each_command_runs_in_their_order(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert len(COMMANDS) == 16
    results = {}
    for line in COMMANDS:
        command = shlex.split(line, comments=True)
        text = shlex.join(command)
        if command[:3] == ["isotype", "train", "run.yaml"]:
            command += SHORT
        status, out, err = invoke(command, monkeypatch, capsys)
        assert status == (text in FOUND_SOMETHING), f"{text}\n{err[-2000:]}"
        if "--json" in command:
            # one object
            results[text] = json.loads(out)
    (resumed,) = (value for text, value in results.items() if "--resume" in text)
    stored = json.loads((place / "runs/a/result.json").read_text())
    assert resumed["status"] == stored["status"] == "done"
    for key in ("eval_loss", "adapter", "check"):
        assert resumed[key] == stored[key]
    (planned,) = (value for text, value in results.items() if text.startswith("isotype plan"))
    assert planned["memory"]["peak"] > 0
    assert json.loads((place / "runs/a/precision.json").read_text())["violations"] == []
    logged = [json.loads(row) for row in (place / "runs/a/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in logged if "loss" in row]
    assert {"loss", "grad_norm", "share_changed"} <= set(steps[-1])
    (merged,) = (value for text, value in results.items() if text.startswith("isotype merge"))
    assert {"noise", "merged_loss"} <= set(merged)
    (explained,) = (value for text, value in results.items() if "train.log" in text)
    assert explained["findings"][0]["fix"]


def test_a_bad_key_is_status_2_with_its_line_and_nothing_on_stdout(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    (place / "typo.yaml").write_text("model: {name: MODEL}\ndata: {trian: DATA.jsonl}\n")
    command = ["isotype", "train", "typo.yaml", "--json"]
    status, out, err = invoke(command, monkeypatch, capsys)
    assert (status, out) == (2, "")
    assert status == UsageError.exit_status
    assert "typo.yaml:2 data.trian" in err
    assert "data.train" in err


def test_a_refusal_reads_as_the_page_shows(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    settings = ["adapter.kind=none", "precision.preset=bf16-pure", "precision.rounding=nearest"]
    command = ["isotype", "train", "--model", "MODEL", "--data", "DATA.jsonl", "--out", "refused"]
    rate = "train.learning_rate=1e-7"
    status, out, err = invoke([*command, "--json", *settings, rate], monkeypatch, capsys)
    assert status == PreflightError.exit_status == 3
    (example,) = re.findall(r"^```\n(error .*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    for line in example.splitlines():
        assert line in err
    refused = json.loads(out)
    assert refused["status"] == "refused"
    stored = json.loads((place / "refused/preflight.json").read_text())
    assert stored["findings"] == refused["preflight"]["findings"]
    assert stored["findings"][0]["fix"] in err


def test_the_statuses_are_those_of_the_command_line():
    statuses = [int(status) for status in re.findall(r"^\| (\d+) \|", PAGE, flags=re.MULTILINE)]
    assert statuses == [0, 1, 2, 3, 130]
    text = " ".join((ROOT / "src/isotype/cli/app.py").read_text(encoding="utf-8").split())
    assert "0 done, 1 the run failed or there are findings, 2 bad configuration or usage" in text

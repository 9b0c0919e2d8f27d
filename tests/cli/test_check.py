"""`isotype doctor check` as its user runs it: table, JSON, exit statuses; bad input is one line and status 2."""

import json
from pathlib import Path

import pytest

from tests.commands import isotype


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "args.json").write_text('{\n "output_dir": "o",\n "fp16": true,\n "bf16": true\n}\n')
    return tmp_path


def test_the_table_and_the_finding(repository: Path):
    done = isotype("doctor", "check", "configs", cwd=repository)
    assert done.returncode == 1
    assert "will really do" in done.stdout
    assert "error CF001" in done.stdout
    assert "configs/args.json:3" in done.stdout


def test_json_has_findings_and_records(repository: Path):
    report = json.loads(isotype("doctor", "check", "configs", "--json", cwd=repository).stdout)
    (finding,) = report["findings"]
    assert finding["place"] == {"file": "configs/args.json", "line": 3, "symbol": "fp16"}
    assert finding["details"]["bf16"].startswith("true")
    assert report["records"][0]["roles"]["compute"]["value"] == "bf16"


def test_bf16_is_right_on_h100_and_refused_on_t4(repository: Path):
    (repository / "configs" / "args.json").write_text('{"output_dir": "o", "bf16": true, "logging_steps": 1}')
    assert isotype("doctor", "check", "configs", "--device", "h100", cwd=repository).returncode == 0
    assert isotype("doctor", "check", "configs", "--device", "Tesla T4", cwd=repository).returncode == 1


def test_fail_on_warning_changes_the_exit_status_of_a_warning(repository: Path):
    (repository / "configs" / "args.json").write_text('{"mixed_precision": "bf16", "downcast_bf16": true, "compute_environment": "x"}')
    assert isotype("doctor", "check", "configs", cwd=repository).returncode == 0
    assert isotype("doctor", "check", "configs", "--fail-on", "warning", cwd=repository).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no such file"),
        ([".", "--device", "abacus"], "abacus"),
        ([".", "--fail-on", "x"], "--fail-on"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], words: str, tmp_path: Path):
    done = isotype("doctor", "check", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_broken_file_is_named_with_its_line(tmp_path: Path):
    (tmp_path / "args.json").write_text('{\n "fp16": true,\n "bf16" true}\n')
    done = isotype("doctor", "check", "args.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "args.json:3" in done.stdout

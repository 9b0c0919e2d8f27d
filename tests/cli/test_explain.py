"""`isotype doctor explain` as its user runs it: codes, files, standard input; bad input is one line and status 2."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.warm import interpreter

ERROR = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"


def isotype(*arguments: str, text: str | None = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([interpreter(), "-m", "isotype", *arguments], input=text, capture_output=True, text=True, timeout=900)


def test_standard_input_a_file_and_pasted_text_say_the_same(tmp_path: Path):
    log = tmp_path / "train.log"
    log.write_text(ERROR + "\n")
    answers = [isotype("doctor", "explain", "--json", *given, text=ERROR) for given in ([], [str(log)], [ERROR])]
    findings = [json.loads(a.stdout)["findings"][0] for a in answers]
    assert {f["code"] for f in findings} == {"EX001"}
    assert [a.returncode for a in answers] == [1, 1, 1]
    assert findings[1]["place"] == {"file": str(log), "line": 1}


def test_not_a_dtype_error_is_a_note_and_status_0():
    done = isotype("doctor", "explain", text="KeyError: 'x'\n")
    assert done.returncode == 0
    assert "not a dtype error" in done.stdout


@pytest.mark.parametrize("code", ["EX001", "cf020", "DT001", "PR008"])
def test_a_code_prints_its_page(code: str):
    done = isotype("doctor", "explain", code)
    assert done.returncode == 0
    assert done.stdout.startswith(f"# {code.upper()}: ")


def test_list_names_every_code():
    lines = isotype("doctor", "explain", "--list").stdout.splitlines()
    assert len(lines) > 80
    assert all(len(line.split()) > 2 for line in lines)


@pytest.mark.parametrize(("argument", "words"), [("EX999", "not a code"), ("missing.log", "no such file"), (".", "folder")])
def test_bad_input_is_one_line(argument: str, words: str):
    done = isotype("doctor", "explain", argument)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_binary_file_is_no_crash(tmp_path: Path):
    file = tmp_path / "x.bin"
    file.write_bytes(bytes(range(256)) * 50)
    assert isotype("doctor", "explain", str(file)).returncode == 0

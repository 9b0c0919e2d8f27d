"""`isotype doctor explain` as its user runs it: codes, files, standard input; bad input is one line and status 2."""

import json
from pathlib import Path

import pytest

from tests.commands import isotype

ERROR = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"


def test_standard_input_a_file_and_pasted_text_say_the_same(tmp_path: Path):
    log = tmp_path / "train.log"
    log.write_text(ERROR + "\n")
    answers = [isotype("doctor", "explain", "--json", *given, input=ERROR) for given in ([], [log], [ERROR])]
    findings = [json.loads(a.stdout)["findings"][0] for a in answers]
    assert {f["code"] for f in findings} == {"EX001"}
    assert [a.returncode for a in answers] == [1, 1, 1]
    assert findings[1]["place"] == {"file": str(log), "line": 1}


def test_not_a_dtype_error_is_a_note_and_status_0():
    done = isotype("doctor", "explain", input="KeyError: 'x'\n")
    assert done.returncode == 0
    assert "not a dtype error" in done.stdout


@pytest.mark.parametrize("code", ["EX001", "cf020", "DT001", "PR008"])
def test_a_code_prints_its_page(code: str):
    done = isotype("doctor", "explain", code, input="")
    assert done.returncode == 0
    assert done.stdout.startswith(f"# {code.upper()}: ")


@pytest.mark.parametrize(("argument", "words"), [("EX999", "not a code"), ("missing.log", "no such file"), (".", "folder")])
def test_bad_input_is_one_line(argument: str, words: str):
    done = isotype("doctor", "explain", argument, input="")
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1

"""`isotype doctor run` runs a program as Python does, and prints under its traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
WITHOUT_TORCH = """
import pathlib, sys
print(__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__file__)
print("torch" in sys.modules, "typer" in sys.modules)
if sys.argv[1] == "exit":
    sys.exit(7)
if sys.argv[1] == "message":
    sys.exit("the end")
if sys.argv[1] == "raise":
    raise ValueError("expected dtype float")
"""


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=cwd, timeout=300
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(WITHOUT_TORCH)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(WITHOUT_TORCH)
    return tmp_path


@pytest.mark.parametrize("action", ["end", "exit", "message", "raise"])
@pytest.mark.parametrize("program", [["train.py"], ["-m", "package.train"]])
@pytest.mark.parametrize("form", [["isotype.doctor", "run"], ["isotype", "doctor", "run"]])
def test_output_and_status_are_those_of_python(folder, program, action, form):
    plain = run(*program, action, cwd=folder)
    explained = run("-m", *form, *program, action, cwd=folder)
    assert explained.returncode == plain.returncode
    assert explained.stdout == plain.stdout
    assert explained.stdout.splitlines()[1] == "False False"
    # under -m Python's own traceback begins with two frames of runpy
    traceback = [line for line in plain.stderr.splitlines() if "<frozen runpy>" not in line]
    assert explained.stderr.splitlines() == traceback


def test_explanation_follows_the_traceback(tmp_path):
    program = str(PROGRAMS / "experts.py")
    plain = run(program)
    facts = tmp_path / "fault.json"
    explained = run("-m", "isotype", "doctor", "run", f"--json={facts}", program)
    assert explained.returncode == plain.returncode == 1
    assert explained.stderr.startswith(plain.stderr + "\nisotype doctor run\nerror RN008 ")
    content = json.loads(facts.read_text())
    assert content["finding"]["code"] == "RN008"
    assert content["evidence"]["operands"]["out"] == "fp32[4 8]"
    assert content["evidence"]["autocast"].startswith("on, bf16, since ")


def test_import_of_the_hook_explains(tmp_path):
    program = tmp_path / "hooked.py"
    program.write_text("import isotype.hook\n" + (PROGRAMS / "experts.py").read_text())
    assert "error RN008 " in run(str(program)).stderr


def test_unknown_program_and_option():
    for words, message in (
        (["missing.py"], "can't open missing.py"),
        (["--no-such-option", "x.py"], "no option --no-such-option"),
        (["-m", "no_such_module"], "no module no_such_module"),
        (["--json"], "--json needs a file"),
    ):
        result = run("-m", "isotype", "doctor", "run", *words)
        assert result.returncode == 2
        assert message in result.stderr

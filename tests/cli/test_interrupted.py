"""Ctrl-C at any moment of a command: one line, no traceback, status 130."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import isotype.interrupted as interrupted_module
from isotype.interrupted import leaving, line

TRAIN = "interrupted: isotype train did not finish; nothing was begun, and the same command starts again\n"
# sends SIGINT to its own process in place of the first import of a module, where a slow disk would have a user do it
INTERRUPTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
sys.meta_path.insert(0, Interrupting())
"""


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """`interrupted(module, *arguments)`: `python *arguments` with SIGINT at the import of the module."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2] / 'src'}")

    def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("INTERRUPTED_AT", module)
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=900)

    return run


@pytest.mark.parametrize("module", ["isotype.cli", "isotype.cli.app", "typer", "isotype.cli.train", "isotype.config.load"])
def test_an_interrupted_import_is_no_traceback(interrupted, module):
    ended = interrupted(module, "-m", "isotype", "train", "--model", "no/such", "--data", "none.jsonl")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", TRAIN)


@pytest.mark.parametrize(
    ("command", "left"),
    [("eval run", "; the run is as it was"), ("sample run", "; the run is as it was"), ("chat run", "; the run is as it was"),
     ("diff one two", "; both runs are as they were"), ("plan x.yaml", "; nothing was begun, and the same command starts again"),
     ("report run", ""), ("doctor", ""), ("kernels x.py", ""), ("conform x.py", ""), ("trace x.py", ""),
     ("explain CF001", "")],
)  # fmt: skip
def test_every_command_says_that_it_was_interrupted(interrupted, command, left):
    ended = interrupted("isotype.cli.train", "-m", "isotype", *command.split())
    said = f"interrupted: isotype {command.partition(' ')[0]} did not finish{left}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", said)


@pytest.mark.parametrize("module", ["torch", "transformers", "isotype.inference.loaded", "isotype.tasks.language.sample"])
def test_an_interrupt_while_libraries_are_imported_is_one_line(interrupted, module, tmp_path):
    """With a model's folder, whose configuration is looked at after most of the imports."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    ended = interrupted(module, "-m", "isotype", "sample", "model", "a question")
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "interrupted: isotype sample did not finish; the run is as it was\n"


@pytest.mark.parametrize(
    "raised",
    [
        "raise KeyboardInterrupt",
        "exec('raise KeyboardInterrupt')",  # as dataclasses and named tuples make their methods
        "try: raise KeyboardInterrupt\n    except BaseException as e: raise ImportError('no torch') from e",
    ],
)
def test_whatever_an_interrupt_becomes_the_status_is_130(tmp_path, raised):
    program = f"import sys\nimport isotype.__main__ as entry, isotype.cli.app as app\ndef main():\n    {raised}\napp.main = main\n"
    (tmp_path / "program.py").write_text(program + "sys.argv = ['isotype', 'eval', 'run']\nentry.main()\n")
    ended = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=900)
    assert (ended.returncode, ended.stderr) == (130, "interrupted: isotype eval did not finish; the run is as it was\n")


def test_what_an_interrupted_command_leaves_is_told_by_the_innermost_that_writes(monkeypatch):
    monkeypatch.setattr(interrupted_module, "_said", False)  # an interrupted run of another test may have said its line
    with contextlib.suppress(KeyboardInterrupt), leaving("outer"):
        with leaving("done"):
            pass
        with leaving(lambda: "inner"):
            raise KeyboardInterrupt
    assert line(["plan"]) == "interrupted: inner"
    interrupted_module._inside.clear()
    assert line(["--version"]) == "interrupted: isotype did not finish"


def test_the_installed_command_handles_an_interrupted_import(interrupted):
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]["isotype"]
    entry = EntryPoint("isotype", declared, "console_scripts")
    # what pip writes into bin/
    script = f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())"
    ended = interrupted("isotype.cli.app", "-c", script, "--help")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted: isotype did not finish\n")


def test_nothing_slow_is_imported_before_ctrl_c_is_heeded():
    source = str(Path(__file__).parents[2] / "src")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = {*sys.modules}; import isotype.__main__; print(*{*sys.modules} - before)"
    )
    imported = subprocess.run([sys.executable, "-S", "-c", program, source], capture_output=True, text=True, check=True, timeout=900).stdout
    assert {name.partition(".")[0] for name in imported.split()} <= {"isotype", "importlib", "warnings", "__future__"}


def test_a_second_interrupt_while_python_shuts_down_is_no_traceback():
    """An exit handler stands for the time that Python needs to shut down."""
    program = (
        "import atexit, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import isotype.__main__ as entry, isotype.cli.app as app\n"
        "def interrupted(): raise KeyboardInterrupt\n"
        "app.main = interrupted\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "entry.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == "interrupted: isotype did not finish\n"

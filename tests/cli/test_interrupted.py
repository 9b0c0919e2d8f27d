"""Ctrl-C while a command is still being imported: the exit status of a later one, and no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

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
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_the_installed_command_handles_an_interrupted_import(interrupted):
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]["isotype"]
    entry = EntryPoint("isotype", declared, "console_scripts")
    # what pip writes into bin/
    script = f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())"
    ended = interrupted("isotype.cli.app", "-c", script, "--help")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


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
    assert ended.stderr == ""

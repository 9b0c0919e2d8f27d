"""Ctrl-C ends a command with status 130 and without a traceback, while it is imported too."""

import subprocess
import sys
from pathlib import Path

import pytest

from isotype.cli.merge import merge
from isotype.runs.checkpoint.atomic_folder import write_folder

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


@pytest.mark.parametrize(("placed", "left"), [(False, "was not written, and the same command starts again"), (True, "was written")])
def test_an_interrupted_merge_says_whether_the_folder_was_written(tmp_path, monkeypatch, capsys, placed, left):
    out = tmp_path / "merged"

    def interrupted(*given):
        if placed:
            write_folder(out, lambda folder: None)
        raise KeyboardInterrupt

    monkeypatch.setattr("isotype.inference.loaded.load_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge(tmp_path / "run", out)
    assert capsys.readouterr().err == f"interrupted: {out} {left}\n"

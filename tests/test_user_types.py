"""What an editor knows of `import isotype`: a user's file is type-checked against the package."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import isotype

pytestmark = pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy")

# what the package imports is skipped: reading torch alone takes mypy a minute, and its types are checked with the package's own
SETTINGS = """[mypy]
follow_imports = silent
ignore_missing_imports = true
[mypy-torch.*,transformers.*,peft.*,datasets.*,accelerate.*,bitsandbytes.*,triton.*,tokenizers.*,safetensors.*,numpy.*,matplotlib.*,pydantic.*]
follow_imports = skip
"""
USER = """
import torch
from isotype import Finding, OpContract, Precision, expect, optimize, restore, trace, train

precision = Precision.preset("bf16-lora")
reveal_type(precision)
reveal_type(precision.base)
reveal_type(optimize)
reveal_type(optimize(torch.nn.Linear(1, 1), precision))
reveal_type(restore(torch.nn.Linear(1, 1)))
with trace(torch.nn.Linear(1, 1)) as seen:
    reveal_type(seen.findings)
reveal_type(train)
precision.bsae
"""


def test_a_users_file_sees_classes_and_functions(tmp_path):
    """The misspelt role is the one error in the file, and nothing that the package exports is Any."""
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    source = Path(isotype.__file__).parents[1]
    (tmp_path / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "--no-error-summary", "--cache-dir", "cache", "user.py"]
    environment = {**os.environ, "MYPYPATH": str(source)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    shown = [line.split('"')[1] for line in lines if line.startswith("note: Revealed")]
    assert shown[0] == "isotype.precision.precision.Precision", done.stdout + done.stderr
    assert shown[1] == "str" or shown[1] == "builtins.str"
    assert shown[2].startswith("def (model: Any, precision:")
    assert shown[3] == "isotype.optimize.manifest.Manifest"
    assert shown[4] in ("int", "builtins.int")
    assert "isotype.finding.Finding" in shown[5]
    assert shown[6].startswith("def (")
    assert shown[6].endswith("isotype.entry.run.Run")
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert "bsae" in errors[0]

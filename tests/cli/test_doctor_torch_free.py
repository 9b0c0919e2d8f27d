"""check and explain import no torch and answer in under 0.3 s of processor time."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 0.3
CODE = """
import sys
from isotype.cli.app import main
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def processor_time(arguments: list[str], text: str, cache: Path) -> float:
    """Of a child that may keep compiled modules, as an installed isotype does."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], input=text, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", ["check", "explain", "code"])
def test_fast_and_without_torch(command: str, tmp_path: Path):
    (tmp_path / "args.yaml").write_text("output_dir: o\nbf16: true\nfp16: true\nlogging_steps: 1\n")
    arguments = {"check": ["check", str(tmp_path / "args.yaml"), "--json"], "explain": ["explain", "--json"], "code": ["explain", "CF001"]}[
        command
    ]
    text = "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16\n"
    best = processor_time(arguments, text, tmp_path / "cache")
    for _ in range(7):  # the first compiles, and a busy machine only ever adds
        if best < LIMIT:
            break
        best = min(best, processor_time(arguments, text, tmp_path / "cache"))
    assert best < LIMIT

"""benchmarks/ops_gpu.py at the sizes of a test: its code runs, every peer has a line, and our gradients are as good as plain PyTorch's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "ops_gpu.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_every_case_and_peer_has_a_line():
    done = run("--device", "cpu", "--tiny")
    assert done.returncode == 0, done.stderr[-2000:]
    heads = re.findall(r"^linear_cross_entropy .* (frozen|trainable) bf16", done.stdout, re.MULTILINE)
    assert heads == ["frozen", "trainable"] * 2
    for name in ("rms_norm", "silu_mul", "gelu_mul_tanh", "rope", "cross_entropy"):
        assert re.search(rf"^{name} \[", done.stdout, re.MULTILINE)
    for block in done.stdout.split("\n\n"):
        first = {name: float(error) for name, error in re.findall(r"^  (\S.{29}) .*gradient error (\S+)", block, re.MULTILINE)}
        ours = [error for name, error in first.items() if name.startswith("isotype")]
        plain = [error for name, error in first.items() if name.strip() == "plain"]
        assert not ours or max(ours) <= 2 * plain[0], block
    for peer in ("Liger-Kernel", "Cut Cross-Entropy", "TRL's chunked loss", "torch F.linear_cross_entropy"):
        assert done.stdout.count(f"  {peer}") >= 4


def test_without_a_gpu_it_says_what_to_do():
    done = run("--device", "cpu")
    assert done.returncode == 1
    assert "--tiny" in done.stderr

"""benchmarks/ops_gpu.py at the sizes of a test: its code runs, every peer has a line, and our gradients are as good as plain PyTorch's."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.warm import interpreter

pytestmark = pytest.mark.full


ELEMENTWISE = ("rms_norm", "rms_norm_heads", "silu_mul", "gelu_mul_tanh", "rope", "cross_entropy")
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "ops_gpu.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([interpreter(), str(SCRIPT), *options], capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_every_case_and_peer_has_a_line(tmp_path):
    cases = [*(f"head-{name}-{kind}" for name in ("llama", "gemma") for kind in ("frozen", "trainable")), "unsloth", *ELEMENTWISE]
    done = run("--device", "cpu", "--tiny", "--json", str(tmp_path / "rows.json"), *(word for case in cases for word in ("--case", case)))
    assert done.returncode == 0, done.stderr[-2000:]
    heads = re.findall(r"^head-(\S+) .* bf16", done.stdout, re.MULTILINE)
    assert heads == ["llama-frozen", "llama-trainable", "gemma-frozen", "gemma-trainable"]
    assert done.stdout.count("  Unsloth ") == 5
    for name in ELEMENTWISE:
        assert re.search(rf"^{name} \[", done.stdout, re.MULTILINE)
    assert done.stdout.count("  plain ") == 4 + len(ELEMENTWISE)
    for block in done.stdout.split("\n\n"):
        first = {name: float(error) for name, error in re.findall(r"^  (\S.{29}) .*gradient error (\S+)", block, re.MULTILINE)}
        ours = [error for name, error in first.items() if name.startswith("isotype")]
        plain = [error for name, error in first.items() if name.strip() == "plain"]
        assert not plain or max(ours) <= 2 * plain[0], block
    written = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["case"] for row in written} >= {"head-gemma-trainable", "rope"}
    assert all(row["failed"] or (row["times"] and row["errors"]) for row in written)
    assert not [row for row in written if row["failed"] and row["peer"].startswith(("isotype", "plain"))]
    for peer in ("Liger-Kernel", "Cut Cross-Entropy", "TRL's chunked loss", "torch F.linear_cross_entropy"):
        assert done.stdout.count(f"  {peer}") >= 4

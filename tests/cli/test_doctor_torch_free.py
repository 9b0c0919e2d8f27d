"""check and explain answer at once with real work to do: a YAML file with a finding, an error to recognise, a rule's page."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_torch_free import CPU_SECONDS, run_fast


@pytest.mark.parametrize("command", ["check", "explain", "code"])
def test_fast_and_without_torch(command: str, tmp_path: Path):
    file = tmp_path / "args.yaml"
    file.write_text("output_dir: o\nbf16: true\nfp16: true\nlogging_steps: 1\n")
    error = "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16"
    answer = run_fast(*{"check": ("check", str(file)), "explain": ("explain", error), "code": ("explain", "CF001")}[command])
    assert {"check": "error CF001", "explain": "error EX001", "code": "# CF001"}[command] in answer["stdout"]
    assert answer["heavy"] == []
    assert answer["seconds"] < CPU_SECONDS

"""Every failing program is explained with its true cause, place and fix, which were written down
first; its repaired twin, to which the fix was applied, ends without an error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from isotype.finding import Finding
from tests.api import collect_evidence, decide_cause

PROGRAMS = Path(__file__).parent / "programs"


class Truth(NamedTuple):
    """code, the text of the line, words of the place, the cause and the fix."""

    code: str
    line: str
    symbol: str
    cause: str
    fix: str


TRUTH = {
    "norm_output": Truth(
        "RN001",
        "return self.proj(hidden)",
        "blocks.0.proj",
        "`self.norm(x.float())` returns fp32, because the weights of blocks.0.norm are fp32",
        "`hidden.to(torch.bfloat16)`",
    ),
    "lora_adapters": Truth(
        "RN002",
        "return self.base(x) + self.lora_B(self.lora_A(x))",
        "1.lora_A",
        "1.lora_A.weight is fp32",
        'with torch.autocast("cpu", dtype=torch.bfloat16)',
    ),
    "fused_backward": Truth(
        "RN005",
        "inner = dy @ b",
        "backward",
        "backward runs outside autocast",
        '@torch.amp.custom_bwd(device_type="cpu")',
    ),
    "scaler": Truth(
        "RN006",
        "scaler.step(optimizer)",
        "<module>",
        "all 4 parameters of the optimizer are fp16",
        "model.float() before the optimizer is built",
    ),
    "optimizer_states": Truth(
        "RN007",
        "optimizer.step()",
        "<module>",
        "the model was cast afterwards",
        "cast the model before its first step",
    ),
    "experts": Truth(
        "RN008",
        "out.index_add_(0, rows, values)",
        "Experts",
        "`values` is bf16",
        "`values.to(out.dtype)`",
    ),
}


def run_in_process(name: str, monkeypatch, *arguments: str) -> Finding | None:
    """Runs a program; returns the finding about the exception that ended it."""
    path = PROGRAMS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    try:
        exec(code, {"__name__": "__main__"})
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next
        evidence = collect_evidence(error)
        return None if evidence is None else decide_cause(evidence)
    return None


@pytest.mark.parametrize("name", TRUTH)
def test_cause_place_and_fix(name, monkeypatch):
    truth = TRUTH[name]
    finding = run_in_process(name, monkeypatch)
    assert finding is not None
    assert finding.code == truth.code, finding.render()
    source = Path(finding.place.file).read_text(encoding="utf-8").splitlines()
    assert source[finding.place.line - 1].strip() == truth.line
    assert finding.place.symbol == truth.symbol
    assert truth.cause in finding.cause
    assert truth.fix in finding.fix


@pytest.mark.parametrize("name", TRUTH)
def test_repaired_program_ends_without_error(name, monkeypatch):
    path = PROGRAMS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "repaired"])
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})


def test_every_program_has_its_truth():
    assert {path.stem for path in PROGRAMS.glob("*.py")} == set(TRUTH)

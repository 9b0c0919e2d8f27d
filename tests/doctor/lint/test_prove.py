"""Executing what lint accuses: what is proved, what is disproved, and the bounds of the process."""

import os
from pathlib import Path

import pytest

from isotype.doctor.lint.command import lint_command
from isotype.doctor.lint.dataflow.plain import PURE
from isotype.doctor.lint.prove import command
from isotype.doctor.lint.prove.command import run_apart
from isotype.doctor.lint.prove.job import Job, Verdict

HEAD = "import torch\nfrom torch import nn\nimport some_missing_package\n\n\n"
BACKWARD = """class Project(torch.autograd.Function):
    @staticmethod
    {forward}def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    {backward}def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x
"""
ACCUMULATOR = """class Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(h, w)
        return h @ w.t()

    @staticmethod
    def backward(ctx, d):
        h, w = ctx.saved_tensors
        d = d.to(h.dtype)
        grad_w = torch.zeros_like(w)
        for hc, dc in zip(h.split({rows}), d.split({rows})):
            grad_w += dc.t() @ hc
        return d @ w.to(d.dtype), grad_w
"""
ATTENTION = """@some_missing_package.register
class Attention(nn.Module):
    def __init__(self, dim, num_heads=2):
        super().__init__()
        self.scale = dim ** -0.5

    def forward(self, q, k, v):
        mask = torch.full((q.shape[-2], k.shape[-2]), float("-inf"), device=q.device).triu(1)
        return torch.softmax(q @ k.mT * self.scale + mask, dim=-1) @ v
"""
ROTARY = """def table(seq_len, dim, dtype):
    angles = torch.outer(torch.arange(seq_len).to(dtype), 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim).to(dtype))
    return angles.cos(), angles.sin()
"""
CUDA = "@torch.amp.custom_{}(device_type='cuda')\n    "


@pytest.fixture
def told(tmp_path):
    """Code and evidence of every finding in a file alone."""

    def lint(text, **options):
        (tmp_path / "case.py").write_text(HEAD + text)
        found = lint_command([tmp_path / "case.py"], prove=True, possible=True, **options).findings
        return [(f.code, dict(f.details)["evidence"]) for f in found]

    return lint


def test_what_fails_is_proved_with_its_error(told):
    ((code, evidence),) = told(BACKWARD.format(forward="", backward=""))
    assert code == "LT002"
    assert evidence.startswith("proved: executed with fp32 inputs under bf16 autocast on a CPU: RuntimeError: ")
    assert "same dtype" in evidence
    assert "(line 15); in fp32 it runs" in evidence


def test_a_module_with_missing_imports_is_built_and_run(told):
    ((code, evidence),) = told(ATTENTION)
    assert (code, evidence[:7]) == ("LT007", "proved:")


def test_lost_precision_is_measured(told):
    ((code, evidence),) = told(ROTARY)
    assert (code, evidence[:7]) == ("LT008", "proved:")
    assert "a result is off by 0." in evidence
    ((code, evidence),) = told(ACCUMULATOR.format(rows=8))
    assert (code, evidence[:7]) == ("LT004", "proved:")
    assert "where the buffer is fp32" in evidence


def test_what_runs_well_is_only_possible(told):
    """Two parts lose nothing: the accusation is withdrawn."""
    assert told(ACCUMULATOR.format(rows=1024)) == [
        ("LT004", "possible: executed with bf16 inputs, no autocast on a CPU: no result is off by more than its rounding explains")
    ]


def test_decorators_for_cuda_count_on_the_cpu_that_executes(tmp_path):
    """They would do nothing here, and a right function would be proved wrong."""
    text = HEAD + BACKWARD.format(forward=CUDA.format("fwd"), backward=CUDA.format("bwd"))
    (tmp_path / "case.py").write_text(text)
    line = next(i for i, row in enumerate(text.splitlines(), 1) if "dy @ w" in row)
    from isotype.doctor.lint.dataflow.functions import SCENARIOS

    (verdict,) = run_apart([Job(str(tmp_path / "case.py"), line, "LT002", SCENARIOS[0])], seconds=300)
    assert verdict is not None
    assert verdict.outcome == "held"


def test_the_process_is_confined(tmp_path):
    """What the functions try does not happen, and the next one is still executed."""
    outside = tmp_path / "written"
    body = "    {}\n    return q @ torch.zeros(16, 16)\n"
    tries = {
        "writes": f"open({str(outside)!r}, 'w').write('x')",
        "removes": f"torch._utils.os.remove({__file__!r})" if hasattr(__import__("torch")._utils, "os") else f"open({str(outside)!r}, 'a')",
        "imports": "import socket",
        "starts": "__import__('subprocess')",
        "connects": "torch.hub.urlopen('http://localhost:1')",
        "leaves": "raise SystemExit(3)",
        "dies": "torch._C._initExtension.__self__ and __import__('os')",
        "fine": "pass",
    }
    file = tmp_path / "case.py"
    file.write_text(HEAD + "\n\n".join(f"def {name}(q):\n{body.format(what)}" for name, what in tries.items()))
    rows = file.read_text().splitlines()
    lines = [i for i, row in enumerate(rows, 1) if "return q" in row]
    verdicts = run_apart([Job(str(file), line, "LT007", PURE) for line in lines], seconds=600)
    outcomes = dict(zip(tries, (v.outcome if v else None for v in verdicts)))
    assert outcomes.pop("fine") == "failed", "bf16 meets fp32"
    assert set(outcomes.values()) == {"not run"}, outcomes
    assert not outside.exists()
    assert os.path.exists(__file__)


def test_what_never_ends_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("isotype.doctor.lint.prove.command.ONE", 8.0)
    (tmp_path / "case.py").write_text(HEAD + "def endless(q):\n    while True:\n        q @ torch.zeros(16, 16)\n")
    (verdict,) = run_apart([Job(str(tmp_path / "case.py"), 8, "LT007", PURE)], seconds=300)
    assert verdict is not None
    assert (verdict.outcome, "took more than 8 s" in verdict.text) == ("not run", True)


def test_a_rule_that_is_off_is_reported_where_a_run_proves_it(tmp_path):
    from isotype.doctor.lint.rule import all_rules

    off = [code for code, rule in all_rules().items() if not (rule.on or rule.by_name)]
    assert off
    file = Path(__file__).parent / "fixtures" / off[0] / "bad.py"
    (tmp_path / "case.py").write_bytes(file.read_bytes())
    found = lint_command([tmp_path / "case.py"], prove=True, possible=True).findings
    assert all(dict(f.details)["evidence"].startswith("proved") for f in found if f.code in off)


WIDENED = """import torch
import torch.nn.functional as F


def attend(query, key, value):
    weights = F.softmax(query @ key.mT, dim=-1, dtype=torch.float32)
    return weights @ value


def intruders(weight, delta):
    merged = weight + delta
    if weight.dtype in (torch.float16, torch.bfloat16):
        weight = weight.float()
    u, s, v = torch.linalg.svd(weight)
    u2, s2, v2 = torch.linalg.svd(merged)
    return u.mT @ u2
"""


def test_products_after_widening_and_decompositions_are_proved_in_a_folder(tmp_path):
    """These rules are off: in a folder they report what was executed and refused, and nothing else."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "case.py").write_text(WIDENED)
    (tmp_path / "use.py").write_text("from case import attend, intruders\n\nfunctions = attend, intruders\nmodel = model.half()\n")
    assert lint_command([tmp_path]).findings == []
    found = lint_command([tmp_path], prove=True).findings
    assert {f.code for f in found} == {"LT018", "LT026"}
    assert all(dict(f.details)["evidence"].startswith("proved") for f in found)


@pytest.mark.parametrize("selected", [(), ("LT018",)])
def test_a_failure_that_nobody_is_seen_to_meet_stays_possible(tmp_path, monkeypatch, selected):
    """Nothing casts a model here. Of rules that are off and not selected nothing is executed then."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "case.py").write_text(WIDENED.partition("\n\n\ndef intruders")[0] + "\n")
    (tmp_path / "use.py").write_text("from case import attend\n\nfunctions = [attend]\n")
    executed = []

    def failing(jobs, *, seconds):
        executed.extend(jobs)
        return [Verdict("failed", "executed: RuntimeError")] * len(jobs)

    monkeypatch.setattr(command, "run_apart", failing)
    assert lint_command([tmp_path], prove=True, select=selected).findings == []
    found = lint_command([tmp_path], prove=True, select=selected, possible=True).findings
    assert {f.code for f in found} == set(selected)
    assert all(dict(f.details)["evidence"].startswith("possible: ") for f in found)
    assert all(dict(f.details)["evidence"].endswith("; executed: RuntimeError") for f in found)
    assert bool(executed) == bool(selected)

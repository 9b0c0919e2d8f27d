"""The plugin in a pytest of its own: fixture, marker, and a failure that reads as a report."""

import pytest

pytest_plugins = ["pytester"]

FAULTY = """
import pytest, torch
from torch.autograd import Function

class Linear(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return d @ w, d.t() @ x

def inputs():
    return torch.ones(4, 8), torch.ones(6, 8)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source):
        pytester.makepyfile(test_it=source)
        return pytester.runpytest_inprocess(
            "-p", "isotype.testing.plugin", "-p", "no:cacheprovider", "--strict-markers"
        )

    return run


def test_failure_is_the_report_not_a_traceback(run):
    result = run(FAULTY + "\ndef test_linear(ampcheck):\n    ampcheck(Linear, inputs())\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "test_it.py:*: ampcheck",
            "*error AC002 Linear.backward*",
            "*where*test_it.py:13*",
            "*isotype doctor explain AC002*",
        ]
    )
    result.stdout.no_fnmatch_line("*def ampcheck(*")


def test_interpreted_marker_runs_kernels(run):
    pytest.importorskip("triton")
    result = run("""
import pytest, torch, triton
import triton.language as tl

@triton.jit
def double(x):
    tl.store(x, tl.load(x) * 2)

@pytest.mark.interpreted
def test_kernel():
    x = torch.ones(1).bfloat16()
    double[(1,)](x)
    assert x == 2
""")
    result.assert_outcomes(passed=1)

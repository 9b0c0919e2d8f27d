"""`isotype doctor conform` as its user runs it."""

import json

import pytest

from isotype.errors import UsageError
from tests.commands import invoke

FAULTY = """
import torch
from torch.autograd import Function

print("loading")

class Linear(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return d @ w, d.t() @ x

def right(x, w):
    return x @ w.t()

def build():
    return Linear, (torch.ones(4, 8), torch.ones(6, 8))

def build_right():
    return right, (torch.ones(4, 8),), {"params": (torch.ones(6, 8),)}

def build_nothing():
    return 3

def build_failing():
    raise OSError("no disk")

def build_option():
    return right, (torch.ones(2),), {"refrence": right}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ops.py"
    path.write_text(FAULTY)
    return path


def conform(*arguments):
    return invoke("doctor", "conform", *arguments)


def test_build_is_the_default_name(file):
    result = conform(file)
    assert result.exit_code == 1
    assert "Linear.backward" in result.stdout


def test_right_code_exits_0(file):
    result = conform(f"{file}:build_right")
    assert result.exit_code == 0, result.output
    assert "no findings" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py: no such file"),
        (["no.such.module:x"], "no.such.module: no such file or module"),
        (["{file}:biuld"], "has no 'biuld'"),
        (["{file}:build_nothing"], "returned int"),
        (["{file}:build_failing"], r"raised .*ops.py:\d+: OSError: no disk"),
        (["{file}:build_option"], "the option 'refrence'"),
        (["{file}:Linear"], "Linear needs inputs"),
        (["{file}:right"], "right needs inputs"),
        (["{file}", "--fail-on", "bad"], "--fail-on"),
    ],
)
def test_bad_usage_is_one_line(file, arguments, message):
    result = conform(*[a.format(file=file) for a in arguments])
    assert isinstance(result.exception, UsageError)
    with pytest.raises(UsageError, match=message):
        raise result.exception


def test_conform_finds_the_fault_of_each_real_case_and_passes_its_mend(shared, capsys):
    """Every fault in the folder of real cases is found, and its repaired form passes."""
    for case in sorted((shared / "cases").glob("amp-*")):
        found = conform(case / "case.py", "--json")
        assert found.exit_code == 1, case.name
        expected = json.loads((case / "expect.json").read_text())
        named = [f for f in json.loads(found.stdout)["findings"] if f["place"].get("symbol") == expected["culprit"]]
        assert any(abs(f["place"]["line"] - expected["culprit_line"]) <= 2 for f in named), case.name
        assert conform(case / "fixed.py", "--fail-on", "warning").exit_code == 0, case.name

"""Checks of dtypes by PyTorch's operators: the operand that each message is about, and its fix."""

import pytest
import torch
from torch import nn

from tests.api import RECORD, collect_evidence, decide_cause, remove_record_frames

PROGRAM = """import torch
from torch.nn import functional as F

def make_first():
    return {first}

def make_second():
    return {second}

def compute(a, b):
    return {line}

compute(make_first(), make_second())
"""
FLOATS = "torch.ones(3)"
LONGS = "torch.arange(3)"
BOOLS = "torch.arange(3) > 1"

# the failing line, what `a` and `b` are, the code of the cause, and a part of the fix
CASES = [
    ("torch.ones(3, 3).index_add_(0, a, b)", FLOATS, "torch.ones(3, 3)", "RN015", "`a.long()`"),
    ("a.gather(0, b)", FLOATS, FLOATS, "RN015", "`b.long()`"),
    ("torch.take(a, b)", FLOATS, FLOATS, "RN015", "`b.long()`"),
    ("torch.take_along_dim(a, b, 0)", FLOATS, FLOATS, "RN015", "`b.long()`"),
    ("torch.repeat_interleave(a, b)", FLOATS, FLOATS, "RN015", "`b.long()`"),
    ("torch.bincount(a)", FLOATS, FLOATS, "RN015", "`a.long()`"),
    ("[1, 2][a[0]]", FLOATS, FLOATS, "RN015", "`a[0].long()`"),
    ("a.masked_fill(b, 0)", FLOATS, LONGS, "RN029", "`b.bool()`"),
    ("a.masked_select(b)", FLOATS, LONGS, "RN029", "`b.bool()`"),
    ("torch.where(b, a, 0)", LONGS, FLOATS, "RN029", "`b.bool()`"),
    ("-a", BOOLS, FLOATS, "RN029", "`~a`"),
    ("1 - a", BOOLS, FLOATS, "RN029", "`~a`"),
    ("~a", FLOATS, FLOATS, "RN014", "`torch.ones(3, dtype=torch.bool)` at"),
    ("a.norm()", LONGS, FLOATS, "RN014", "`torch.arange(3, dtype=torch.float32)`"),
    ("F.kl_div(a, b)", FLOATS, LONGS, "RN014", "`torch.arange(3, dtype=torch.float32)`"),
    ("torch.add(a, a, out=b)", FLOATS, LONGS, "RN016", "`b = b.float()`"),
    ("a @ b", "torch.eye(2).to(torch.cfloat)", "torch.ones(2, 2)", "RN017", "`b.to(torch.complex64)`"),
    ("b @ a", "torch.eye(2).to(torch.float8_e5m2)", "torch.ones(2, 2)", "RN017", "`a.to(torch.float32)`"),
]  # fmt: skip


def explain(tmp_path, line, first, second):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(line=line, first=first, second=second))
    code = compile(program.read_text(), str(program), "exec")
    RECORD.install_with_first_steps()
    try:
        with pytest.raises((RuntimeError, TypeError, IndexError)) as failure:
            exec(code, {"__name__": "__main__"})
        failure.value.__traceback__ = failure.value.__traceback__.tb_next
        remove_record_frames(failure.value)
        return decide_cause(collect_evidence(failure.value))
    finally:
        RECORD.remove()


@pytest.mark.parametrize(("line", "first", "second", "code", "fix"), CASES)
def test_operand_and_fix(tmp_path, line, first, second, code, fix):
    finding = explain(tmp_path, line, first, second)
    assert finding.code == code, finding.render()
    assert fix in finding.fix, finding.render()


def test_check_of_sizes_that_prints_a_dtype_is_not_explained():
    def merge(tokens, features):
        if tokens.sum() != features.shape[0]:
            raise ValueError(f"tokens: {tokens.sum()}, features: {len(features)}, {features.dtype}")

    with pytest.raises(ValueError, match=r"torch\.float32") as failure:
        merge(torch.ones(2), torch.ones(3, 4))
    assert collect_evidence(failure.value) is None


def test_operator_that_fails_in_backward_leads_to_its_forward_line():
    weight = torch.eye(3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (torch.sparse.mm(torch.eye(3).to_sparse(), weight) @ torch.eye(3)).sum()
    with pytest.raises(RuntimeError) as failure:
        loss.to(torch.bfloat16).backward()
    text = decide_cause(collect_evidence(failure.value)).render()
    assert "isotype doctor run --forward-lines prints the line of the forward operator" in text


def test_weight_of_several_originals():
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)).to(torch.bfloat16)
    with pytest.raises(RuntimeError) as failure:
        layer(torch.ones(1, 2))
    finding = decide_cause(collect_evidence(failure.value))
    assert finding.code == "RN001", finding.render()


def test_dtype_argument_is_not_blamed_on_another_tensor(tmp_path):
    assert explain(tmp_path, "torch.randn(3, dtype=a)", "torch.int64", FLOATS).code == "RN000"


def test_check_whose_dtype_nothing_decides():
    def compute(x):
        assert x.dtype in (torch.float16, torch.bfloat16)

    with pytest.raises(AssertionError) as caught:
        compute(torch.ones(3))
    finding = decide_cause(collect_evidence(caught.value))
    assert "`torch.ones(3).to(torch.float16)`" in finding.fix
    assert "or the same with torch.bfloat16" in finding.fix


class Scripted(nn.Module):
    def __init__(self, layers):
        super().__init__()
        block = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
        self.block = torch.jit.script(block)

    def forward(self, x):
        return self.block(x)


@pytest.mark.parametrize(("layers", "name"), [(1, "block.0"), (2, "block")])
def test_layer_of_torchscript(layers, name):
    model = Scripted(layers).bfloat16()
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 3))
    finding = decide_cause(collect_evidence(caught.value))
    assert finding.message == f"{name} has bf16 weights and gets fp32"
    assert "`x.to(torch.bfloat16)`" in finding.fix

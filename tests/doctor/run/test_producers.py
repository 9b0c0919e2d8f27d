"""The expression that gave an operand its dtype, found in the source code of a program alone."""

from __future__ import annotations

import textwrap

import pytest

from tests.api import RECORD, collect_evidence


def find_producer_text(source, folder):
    """Returns the source code of the expression that gave the first operand of the failing line its
    dtype, or "" if none is proven.
    """
    path = folder / "program.py"
    path.write_text("import torch\n" + textwrap.dedent(source), encoding="utf-8")
    RECORD.install()
    try:
        with pytest.raises(RuntimeError) as error:
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {})
    finally:
        RECORD.remove()
    evidence = collect_evidence(error.value)
    producer = evidence.producer_of(evidence.operands[0])
    return producer.text if producer.is_proven else ""


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("torch.arange(x.size(1))", "steps / 10"),
        ("torch.arange(0, x.shape[1])", "steps / 10"),
        ("torch.arange(8, dtype=torch.float32)", "torch.arange(8, dtype=torch.float32)"),
        ("torch.arange(count(x))", ""),  # the source code shows no dtype
    ],
)
def test_floats_of_a_range(call, text, tmp_path):
    source = f"""
        def count(x):
            return len(x[0])
        def make_table(x):
            steps = {call}
            return {{"steps": steps / 10}}
        x = torch.ones(2, 8, dtype=torch.bfloat16)
        table = make_table(x)
        table["steps"] @ x.T
        """
    assert find_producer_text(source, tmp_path) == text

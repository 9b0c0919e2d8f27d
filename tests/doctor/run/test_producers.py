"""The expression that gave an operand its dtype, found in the source code of a program alone."""

from __future__ import annotations

import textwrap

import pytest

from tests.api import RECORD, collect_evidence


def find_producer_text(source, folder, position=0):
    """Returns the source code of the expression that gave an operand of the failing line its dtype,
    or "" if none is proven.
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
    producer = evidence.producer_of(evidence.operands[position])
    return producer.text if producer.is_proven else ""


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("torch.arange(x.size(1))", "steps / 10"),
        ("torch.arange(0, x.shape[1])", "steps / 10"),
        ("torch.arange(count(x)) - (count(x) - 1) / 2", ""),
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


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("[state @ x.T for state in states]", "second.mean(0, dtype=torch.float32)"),
        (
            "sum(state @ x.T for number, state in zip((1, 2), states))",
            "second.mean(0, dtype=torch.float32)",
        ),
        (
            "for number, (state, other) in enumerate(zip(states, [x, x])):\n"
            "        state @ other.T",
            "second.mean(0, dtype=torch.float32)",
        ),
        ("[second.float() @ x.T for x in [x]]", "second.float()"),
        ("{key: state @ x.T for key, state in {'a': states[1]}.items()}", ""),
        # the variable of a comprehension hides that of the function
        (
            "state = states[0]\n    rows = [state * 2 for state in states]\n"
            "    [row @ x.T for row in rows]",
            "second.mean(0, dtype=torch.float32)",
        ),
        # the items that a condition leaves out have no position
        (
            "rows = [state * 2 for state in states if state is not None]\n"
            "    for row in rows:\n        row @ x.T",
            "",
        ),
    ],
)
def test_variables_of_comprehensions(lines, text, tmp_path):
    source = f"""
def run(x, second):
    first = x * 2
    states = [first, second.mean(0, dtype=torch.float32)]
    {lines}
run(torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(1, 2, 8, dtype=torch.bfloat16))
"""
    assert find_producer_text(source, tmp_path) == text


def test_key_of_a_batch_leads_into_the_dataset(tmp_path):
    source = """
        import numpy
        def read_clip(number):
            return numpy.sin(numpy.arange(16)) + number
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, number):
                return {"audio": torch.from_numpy(read_clip(number)), "number": number}
        def compute_power(audio):
            return torch.stft(audio, 8, window=torch.ones(8), return_complex=True).abs() ** 2
        def encode(audio):
            filters = torch.ones(1, 5)
            return torch.matmul(filters, compute_power(audio))
        def embed(loader):
            for batch in loader:
                encode(batch["audio"])
        embed(torch.utils.data.DataLoader(Rows(), batch_size=2))
        """
    assert find_producer_text(source, tmp_path, 1) == "torch.from_numpy(read_clip(number))"

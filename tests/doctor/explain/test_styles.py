"""Tracebacks as rich and pytest print them become CPython's."""

from __future__ import annotations

import pytest

from isotype.doctor.explain import explain

RICH = """\
before
╭────────── Traceback (most recent call last) ──────────╮
│ /home/me/a/long/way/from/here/to/the/file/train.py:12 │
│ in main                                               │
│                                                       │
│   11 │   x = x.float()                                │
│ ❱ 12 │   return layer(x)                              │
│ ╭──────────────── locals ────────────────╮            │
│ │ x = 'train.py:1 in f'                  │            │
│ ╰────────────────────────────────────────╯            │
╰───────────────────────────────────────────────────────╯
RuntimeError: index_reduce_(): self (Float) and source
(BFloat16) must have the same scalar type
second line of its own

after"""


BOX = RICH.splitlines()


@pytest.mark.parametrize("rank", ["", "[rank1]: "])
def test_a_box_is_read_as_frames_and_its_broken_message_as_one_line(rank: str):
    (finding,) = explain([rank + line for line in BOX])
    assert (finding.code, finding.place.symbol, finding.place.line) == ("EX007", "main", 12)
    assert finding.place.file == "/home/me/a/long/way/from/here/to/the/file/train.py"
    assert dict(finding.details)["dtypes"] == "destination fp32, source bf16"


LONG = """\
=================================== FAILURES ===================================
__________________________________ test_deep ___________________________________

    def test_deep():
        a = torch.randn(2, 2)
>       assert merge(a, a.bfloat16()) is not None

test_a.py:6:
_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _

a = tensor([[0.5, 1.0], [2.0, 3.0]])

    def merge(a, b):
>       return a @ b
E       RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16

helper.py:2: RuntimeError
=========================== short test summary info ============================
FAILED test_a.py::test_deep - RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16
============================== 1 failed in 1.12s ==============================="""
SHORT = """\
__________________________________ test_deep ___________________________________
test_a.py:6: in test_deep
    assert merge(a, a.bfloat16()) is not None
helper.py:2: in merge
    return a @ b
E   RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16
=========================== short test summary info ============================
FAILED test_a.py::test_deep - RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16"""
NATIVE = """\
__________________________________ test_deep ___________________________________
Traceback (most recent call last):
  File "test_a.py", line 6, in test_deep
    assert merge(a, a.bfloat16()) is not None
  File "helper.py", line 2, in merge
    return a @ b
RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16
=========================== short test summary info ============================
FAILED test_a.py::test_deep - RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16"""


def test_each_of_pytests_styles_gives_one_finding_at_the_failing_line():
    for report in (LONG, SHORT, NATIVE):
        (finding,) = explain(report.splitlines())
        assert (finding.place.file, finding.place.line, finding.place.symbol) == ("helper.py", 2, "merge")
        assert finding.cause is not None
        assert finding.cause.startswith("operands of two dtypes: a is fp32, b bf16")


def test_lines_that_only_resemble_a_report_pass():
    text = "___ epoch 3 ___\nloss 1.2\n==== done ====\nE   nothing"
    assert [f.code for f in explain(text.splitlines())] == ["EX000"]

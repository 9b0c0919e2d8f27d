"""Tracebacks as rich and pytest print them become CPython's."""

from __future__ import annotations

from isotype.doctor.explain import explain

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
    for report in (SHORT, NATIVE):
        (finding,) = explain(report.splitlines())
        assert (finding.place.file, finding.place.line, finding.place.symbol) == ("helper.py", 2, "merge")
        assert finding.cause is not None
        assert finding.cause.startswith("operands of two dtypes: a is fp32, b bf16")


def test_lines_that_only_resemble_a_report_pass():
    text = "___ epoch 3 ___\nloss 1.2\n==== done ====\nE   nothing"
    assert [f.code for f in explain(text.splitlines())] == ["EX000"]

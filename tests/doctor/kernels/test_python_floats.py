"""Python floats are fp64 under torch.compile: kernels that compute blocks with them are found."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from isotype.finding import Severity
from isotype.pages import page
from tests.api import check_wrapper
from tests.api import kernels_check as check

from . import fault_kernels, large_kernels
from .large_kernels import copy_rows, row_scale

SOURCE = Path(large_kernels.__file__).read_text().splitlines()


def inputs() -> tuple[torch.Tensor]:
    return (torch.randn(4, 64),)


def loud(findings: list) -> list:
    return [f for f in findings if f.severity > Severity.NOTE]


def test_a_block_that_meets_a_python_float_is_found_in_a_launch() -> None:
    report = check_wrapper(lambda x: copy_rows(row_scale, x, False), inputs())
    (finding,) = loud(report.findings)
    assert (finding.code, str(finding.severity)) == ("KN021", "warning")
    assert "x * scale" in SOURCE[finding.place.line - 1]
    assert "scale = scale.to(tl.float32)" in str(finding.fix)
    assert page("KN021")


def test_a_scalar_that_is_cast_at_the_top_has_no_finding() -> None:
    report = check_wrapper(lambda x: copy_rows(row_scale, x, True), inputs())
    assert loud(report.findings) == []


def test_a_launch_inside_a_custom_operator_is_not_traced() -> None:
    @torch.library.custom_op("isotype_tests::row_scale", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return copy_rows(row_scale, x, False)

    report = check_wrapper(lambda x: operator(x.detach()), inputs())
    assert report.launches
    assert loud(report.findings) == []


def test_a_kernel_that_compiles_only_with_fp32_scalars() -> None:
    report = check(fault_kernels.loop_fp64_scalar, constexprs={"FIXED": False})
    (finding,) = [f for f in report.findings if f.code == "KN002"]
    details = dict(finding.details)
    assert all(label.endswith("with fp64 scalars") for label in details["fails for"].split(", "))
    assert "annotate" not in str(finding.fix)
    right = check(fault_kernels.loop_fp64_scalar, constexprs={"FIXED": True})
    assert loud(right.findings) == []

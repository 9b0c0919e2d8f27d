"""Offsets in int32 are found at the shape at which they pass 2^31, and at no smaller shape."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from isotype.pages import page
from tests.api import check_largest, choose_programs, parse_module

from . import large_kernels
from .large_kernels import KERNELS, copy_rows

SOURCE = Path(large_kernels.__file__).read_text().splitlines()


def draw_rows(rows: int = 4, columns: int = 64) -> tuple[torch.Tensor]:
    return (torch.randn(rows, columns, dtype=torch.bfloat16),)


def check(kernel, sizes: tuple[int, int], *, wide: bool):
    report = check_largest(lambda x: copy_rows(kernel, x, wide), draw_rows, sizes)
    assert not report.refused, report.refused
    assert report.launches == 1
    return report.findings


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_an_offset_that_passes_int32_is_found_on_its_line(kernel) -> None:
    findings = check(kernel, (65537, 32768), wide=False)
    assert findings
    for finding in findings:
        assert finding.code == "KN022"
        assert str(finding.severity) == "error"
        assert "# fault" in SOURCE[finding.place.line - 1], finding.render()
    assert page("KN022")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_right_twin_and_smaller_shapes_have_no_finding(kernel) -> None:
    assert check(kernel, (65537, 32768), wide=True) == []
    # 2^31 elements: the last offset is 2^31-1, and rows of the last tile that are masked lie beyond
    assert check(kernel, (65536 - 32, 32768), wide=False) == []
    assert check(kernel, (4, 64), wide=False) == []


def test_a_value_that_the_function_reads_is_named() -> None:
    def copy_counted(x):
        count = int((x != 0).sum().item())
        assert isinstance(count, int)
        return copy_rows(large_kernels.row_scale, x, True)

    report = check_largest(copy_counted, draw_rows, (65537, 32768))
    assert report.launches == 1
    line = inspect.getsourcelines(copy_counted)[1] + 1
    assert f"test_offsets.py:{line} reads the value of a tensor" in report.remarks[0]


class NarrowCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return copy_rows(large_kernels.row_scale, x, False)

    @staticmethod
    def backward(ctx, d):
        return d


@pytest.mark.parametrize(
    "arrange",
    [lambda x: (x,), lambda x: x, lambda x: [x], lambda x: [(x,), {"x": x}]],
    ids=["tuple", "tensor", "list", "calls"],
)
def test_inputs_have_every_form_that_other_checks_take(arrange) -> None:
    def build(rows: int = 4, columns: int = 64):
        return arrange(*draw_rows(rows, columns))

    def copy(x):
        return copy_rows(large_kernels.row_scale, x, False)

    report = check_largest(copy, build, (65537, 32768))
    assert not report.refused, report.refused
    assert report.findings


def test_an_autograd_function_is_applied() -> None:
    report = check_largest(NarrowCopy, draw_rows, (65537, 32768))
    assert report.launches == 1
    assert report.findings


def test_a_function_that_refuses_the_shape_is_not_asked() -> None:
    def refusing(x):
        if x.shape[1] > 1024:
            raise ValueError("at most 1024 columns")
        return copy_rows(large_kernels.row_scale, x, False)

    report = check_largest(refusing, draw_rows, (65537, 32768))
    assert "at most 1024 columns" in report.refused["65537,32768"]
    assert report.findings == []


def test_the_corners_of_a_grid_are_evaluated() -> None:
    programs = choose_programs((70000, 3, 2))
    assert {(0, 0, 0), (69999, 2, 1), (69999, 0, 0), (0, 2, 1)} <= set(programs)
    assert choose_programs((1, 1, 1)) == [(0, 0, 0)]


TEXT = """
#loc = loc("kernel.py":3:0)
module {
  tt.func public @k(%x: !tt.ptr<f32> loc("x"(#loc)), %n: i32 loc("n"(#loc))) attributes {noinline = false} {
    %0 = tt.get_program_id x : i32 loc(#loc2)
    %1:2 = scf.for %i = %0 to %n step %0 iter_args(%a = %0, %b = %n) -> (i32, i32)  : i32 {
      scf.yield %a, %b : i32, i32 loc(#loc1)
    } loc(#loc1)
    %2 = "tt.reduce"(%1#0) <{axis = 0 : i32}> ({
    ^bb0(%c: i32 loc("c"(#loc1)), %d: i32 loc("d"(#loc1))):
      tt.reduce.return %c : i32 loc(#loc1)
    }) : (tensor<4xi32>) -> i32 loc(#loc1)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc1 = loc("kernel.py":7:2)
#loc2 = loc("pid"(#loc1))
#loc3 = loc(callsite(#loc1 at #loc))
"""


def test_the_text_of_a_module_is_read() -> None:
    module = parse_module(TEXT)
    assert module.kernel.parameters == ["%x", "%n"]
    operations = module.kernel.blocks[0].operations
    assert [o.name for o in operations] == [
        "tt.get_program_id",
        "scf.for",
        "tt.reduce",
        "tt.return",
    ]
    assert operations[1].results == ["%1#0", "%1#1"]
    assert [o.name for o in operations[1].regions[0][0].operations] == ["scf.yield"]
    assert operations[2].regions[0][0].arguments == ["%c", "%d"]
    assert module.locations["#loc2"] == ("kernel.py", 7)
    assert module.locations["#loc3"] == ("kernel.py", 7)
